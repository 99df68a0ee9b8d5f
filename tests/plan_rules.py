"""What every plan of rows keeps: the limits of every device, and that its numbers fit together. RULES are all of it.

What a launch computes is not looked at here (the emulator does that), only that every row and column is taken once,
every access is aligned, every buffer is large enough.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from plan_alignment_rules import every_access_is_aligned_and_contiguous
from plan_cases import Constants, Problem, compute_bytes
from plan_coverage_rules import rows_and_columns_are_covered, weights_are_those_of_the_channels

from cunorm import kernels, launch
from cunorm.plan import Device, Launch, Plan
from cunorm.plan.device import UNEVEN_CLUSTERS
from cunorm.problem import (
    DTYPES,
    AnyProblem,
    BackwardProblem,
    ChannelBackward,
    ChannelForward,
    ForwardProblem,
)

RUNNING = "running_mean", "running_var"
OPERANDS = {
    ForwardProblem: {"x", "residual", "weight", "bias", "y", "residual_out", "mean", "rstd", *RUNNING},
    BackwardProblem: {"dy", "dresidual_out", "x", "weight", "bias", "mean", "rstd", "dx", "dweight", "dbias"},
    ChannelForward: {"x", "weight", "bias", "y", "mean", "rstd", *RUNNING},
    ChannelBackward: {"dy", "x", "weight", "bias", "mean", "rstd", "dx", "dweight", "dbias"},
}


# ---- Limits, arguments and scratch memory.


def within_the_limits_of_cuda(problem: Problem, device: Device, chosen: Plan) -> None:
    for item in chosen.launches:
        assert 1 <= item.grid <= 2**31 - 1
        threads = item.block[0] * item.block[1]
        assert threads % 32 == 0 and 32 <= threads <= 1024
        assert item.shared_bytes >= 0
        shared_bytes = item.shared_bytes + _static_shared_bytes(item, problem)
        assert shared_bytes <= device.shared_bytes
        # From 16 blocks on a cluster needs a kernel's consent, which the driver's side gives; more there are not.
        assert item.cluster in (1, 2, 4, 8, 16, *UNEVEN_CLUSTERS) and item.grid % item.cluster == 0
        assert device.groups(item.cluster) > 0, "the device cannot run such a cluster"
        assert item.cluster == 1 or device.capability >= 90
        if item.kernel.startswith("row_block") and _takes_turns(item, problem):
            # All of these groups run at once: what does not find room would begin when others have ended. But peeled,
            # there are at least as many as it takes for all rows of one to begin alike.
            most = device.groups(item.cluster, device.blocks_with(shared_bytes))
            assert item.grid // item.cluster <= max(most, 16 // problem.itemsize)
        if item.kernel.startswith("row_bulk"):
            blocks: Any = dict(item.constants)["MIN_BLOCKS"]
            assert threads * blocks <= device.threads_per_multiprocessor and blocks <= device.blocks_with(shared_bytes)
            # Those that take turns run at once.
            assert item.kernel == "row_bulk_forward" or item.grid <= blocks * device.multiprocessors
        if item.cooperative:
            # One block a multiprocessor, which has room for any; or as many as the kernel's text says, if they fit.
            share: Any = dict(item.constants).get("BLOCKS_PER_MULTIPROCESSOR", 1)
            assert item.grid <= device.multiprocessors * share
            assert threads * share <= device.threads_per_multiprocessor
            # Of the shared memory of a multiprocessor, a kilobyte is kept for each block.
            assert (shared_bytes + 1024) * share <= device.shared_bytes + 1024


def _takes_turns(item: Launch, problem: Problem) -> bool:
    """Whether a block of row_block_* has more than one group of rows."""
    constants: Constants = dict(item.constants)
    return bool(item.grid // item.cluster * constants["ROWS_PER_BLOCK"] < problem.rows)


def _static_shared_bytes(item: Launch, problem: Problem) -> int:
    """What a kernel that also has dynamic shared memory declares itself."""
    constants: Constants = dict(item.constants)
    size = compute_bytes(problem)
    if item.kernel == "row_grid_forward":
        return 2 * 2 * constants["THREADS"] // 32 * size
    if item.kernel.startswith("row_pipeline"):
        # Of two turns: what each warp has of the row, and what all need to sum and to finish it.
        of_warp, of_row = (3 + constants["PEELED"], 5) if item.kernel.endswith("forward") else (2, 4 + 6)
        return int(2 * (of_warp * constants["THREADS"] // 32 + of_row) * size)
    if item.kernel.startswith("row_held"):
        # The same, of two turns; for each place of the ring two barriers, and for each turn two.
        of_warp, of_row = (3, 5) if item.kernel.endswith("forward") else (2, 4 + 6)
        turn = (of_warp * constants["THREADS"] // 32 + of_row) * size
        return int(2 * (turn + 2 * 8) + constants["RING"] * 2 * 8)
    if item.kernel.startswith("row_stream"):
        # Of each stage: what each warp has of the row, what all need to sum and to finish it, and four barriers.
        of_warp, of_row = (3, 3) if item.kernel.endswith("forward") else (2, 4)
        return int(constants["AHEAD"] * ((of_warp * constants["THREADS"] // 32 + of_row) * size + 4 * 8))
    if item.kernel.startswith("row_bulk"):
        # What the warps have of two sums in two places, the statistics of the run, or of two, and its barrier, or some.
        warps = -(-constants["THREADS_PER_ROW"] // 32) * constants["ROWS_AT_ONCE"]
        runs = 1 if item.kernel.endswith("forward") else 2
        return int((2 * 2 * warps + 2 * runs * constants["ROWS_PER_BLOCK"]) * size + 16 * runs)
    if not item.kernel.startswith("row_block"):
        assert item.shared_bytes == 0
        return 0
    scratch = 2 * 2 * -(-constants["THREADS_PER_ROW"] // 32) * constants["ROWS_PER_BLOCK"] * size
    claims = constants.get("CLAIMS", 0) > 0  # what is claimed is told beside the statistics, or in a block by itself
    exchange = 2 * item.cluster * (4 if claims and item.cluster > 1 else 3) * size + 2 * 8
    return int(scratch + exchange + 2 * size * claims)


def every_field_of_the_kernel(problem: AnyProblem, device: Device, chosen: Plan) -> None:
    buffers = OPERANDS[type(problem)] | {scratch.name for scratch in chosen.scratch}
    for item in chosen.launches:
        fields = kernels.argument_fields(item.kernel)
        assert sorted(name for name, _, _ in fields) == sorted(name for name, _ in item.arguments)
        for code, value in launch.argument_values(item):
            if code == "P":
                assert value is None or value in buffers
            else:
                assert isinstance(value, float if code == "d" else int) and -(2**63) <= value < 2**63


def scratch_memory(problem: AnyProblem, device: Device, chosen: Plan) -> None:
    assert len({scratch.name for scratch in chosen.scratch}) == len(chosen.scratch)
    end = 0
    for scratch in sorted(chosen.scratch, key=lambda scratch: (scratch.offset, scratch.bytes)):
        assert scratch.offset % 256 == 0 and scratch.offset >= end
        end = scratch.offset + scratch.bytes
    assert end <= chosen.workspace_bytes < end + 256 * (len(chosen.scratch) + 1)


# Bytes that each kernel takes of each buffer between kernels, from its arguments and its constants, how many groups of
# blocks there are, and the size of a sum.
_SIZES: dict[str, Callable[[dict[str, Any], int, int], int]] = {
    "partials": lambda a, groups, size: a["rows"] * a["columns"] * size,
    "second partials": lambda a, groups, size: a["rows"] * a["second_columns"] * size,
    "column sums": lambda a, groups, size: a["columns"] * size,
    "so many times 16 bytes": lambda a, groups, size: a["count"] * 16,
    "four bytes for each way that rows begin, in pieces of 16": lambda a, groups, size: -(-a["CLAIMS"] // 4) * 16,
    "a row a share": lambda a, groups, size: (
        (_channel_sums(a) if a["channels"] else (groups + a["CLASSES"] - 1) * a["columns"]) * size
    ),
    "a row a group that shares rows": lambda a, groups, size: (
        (_channel_sums(a) if a.get("channels") else groups // a["blocks_per_row"] * a["columns"]) * size
    ),
    "a row a block": lambda a, groups, size: groups * a["columns"] * size,
    "a row a group of rows": lambda a, groups, size: groups // a["tiles"] * a["columns"] * size,
    "a double a chunk": lambda a, groups, size: a["rows"] * a["splits"] * 8,
    "a double a chunk of a set": lambda a, groups, size: a["sets"] * a["splits"] * 8,
    "one a set": lambda a, groups, size: a["sets"] * size,
    "two a chunk": lambda a, groups, size: 2 * a["rows"] * a["splits"] * size,
    "one a row": lambda a, groups, size: a["rows"] * size,
    "three a block, with a tag beside each word, for two turns": lambda a, groups, size: 2 * groups * 3 * 2 * size,
    "16 bytes a block, for two turns": lambda a, groups, size: 2 * _places(a, groups) * 16,
    "16 bytes a block, for the turns that are kept": lambda a, groups, size: 2 * a["LAG"] * _places(a, groups) * 16,
    "16 bytes a block, for the turns that are kept and two more": lambda a, groups, size: (
        (2 * a["LAG"] + 2) * _places(a, groups) * 16
    ),
    "16 bytes a block, for the turns that are kept; of four numbers 32": lambda a, groups, size: (
        2 * a["LAG"] * _places(a, groups) * 16 * (1 + a["PEELED"])
    ),
}
_SCRATCH = {
    "column_sums": {"partials": "partials", "second_partials": "second partials", "sums": "column sums"},
    "zeros": {"target": "so many times 16 bytes"},
    "row_block_forward": {"claimed": "four bytes for each way that rows begin, in pieces of 16"},
    "row_block_backward": dict.fromkeys(["dweight", "dbias"], "a row a share"),
    "row_bulk_backward": dict.fromkeys(["dweight", "dbias"], "a row a block"),
    "row_grid_forward": {"words": "three a block, with a tag beside each word, for two turns"},
    "row_held_forward": {"words": "16 bytes a block, for two turns"},
    "row_held_backward": dict.fromkeys(["dweight", "dbias"], "a row a group that shares rows")
    | {"words": "16 bytes a block, for two turns"},
    "row_pipeline_forward": {"words": "16 bytes a block, for the turns that are kept; of four numbers 32"},
    "row_pipeline_backward": dict.fromkeys(["dweight", "dbias"], "a row a group that shares rows")
    | {"words": "16 bytes a block, for the turns that are kept"},
    "row_stream_forward": {"words": "16 bytes a block, for the turns that are kept and two more"},
    "row_stream_backward": dict.fromkeys(["dweight", "dbias"], "a row a group that shares rows")
    | {"words": "16 bytes a block, for the turns that are kept and two more"},
    "row_split_statistics": dict.fromkeys(["chunk_means", "chunk_deviations"], "a double a chunk")
    | dict.fromkeys(["mean", "mean_remainder", "rstd"], "one a row"),
    "split_merge": dict.fromkeys(["chunk_means", "chunk_deviations"], "a double a chunk of a set")
    | dict.fromkeys(["mean", "mean_remainder", "rstd"], "one a set"),
    "row_split_forward": dict.fromkeys(["mean", "mean_remainder", "rstd"], "one a row")
    | dict.fromkeys(["chunk_means", "chunk_deviations"], "a double a chunk"),
    "row_split_gradient_sums": {"sums": "two a chunk"},
    "row_split_backward": dict.fromkeys(["dweight", "dbias"], "a row a group of rows") | {"sums": "two a chunk"},
}


def _channel_sums(given: dict[str, Any]) -> int:
    """Sums over channels, or over parts of one where a block has no whole one: of each row, each.

    Blocks that share rows turn by turn add up such parts themselves.
    """
    _, channels_per_row, positions, _, _ = given["channels"]
    parts = 1 if {"LAG", "RING"} & given.keys() else -(-positions // min(positions, given["columns_per_block"]))
    return int(given["rows"]) * channels_per_row * parts


def _places(given: dict[str, Any], blocks: int) -> int:
    """One for every block that could share the rows of a group, of all groups."""
    return int(blocks // given["blocks_per_row"] * 32 * given["PARTS_PER_LANE"])


def scratch_buffers_hold_what_the_kernels_put_there(problem: Problem, device: Device, chosen: Plan) -> None:
    sizes = {scratch.name: scratch.bytes for scratch in chosen.scratch}
    itemsize = compute_bytes(problem)
    for item in chosen.launches:
        given: dict[str, Any] = {**dict(item.arguments), **dict(item.constants)}
        for name, value in item.arguments:
            if isinstance(value, str) and value in sizes and given.get("splits") != 0:
                size = _SIZES[_SCRATCH[item.kernel][name]](given, item.grid // item.cluster, itemsize)
                assert size == sizes[value], (item.kernel, name)
        if "words" in given:
            assert given["word_pairs"] * 16 == sizes[given["words"]], "all are cleared"


def scratch_is_written_before_it_is_read(problem: AnyProblem, device: Device, chosen: Plan) -> None:
    names = {scratch.name for scratch in chosen.scratch}
    written: set[str] = set()
    for item in chosen.launches:
        arguments = dict(item.arguments)
        read = _constant_fields(item.kernel)
        if arguments.get("rows") == 0 or arguments.get("splits") == 0:  # of nothing, nothing is read
            read = set()
        assert not {arguments[field] for field in read} & names - written, item.kernel
        written |= {str(arguments[field]) for field, _ in _declarations(item.kernel) if field not in read}


@functools.cache
def _declarations(kernel: str) -> list[tuple[str, str]]:
    """The pointers of the ``struct Arguments`` in a kernel's shipped text: name and type."""
    match = re.search(r"struct Arguments \{.*?\n\};", kernels.kernel_text(kernel, {}), re.DOTALL)
    assert match is not None
    return [(name, kind) for kind, name in re.findall(r"^  ([\w ]+\*) (\w+);", match[0], re.M)]


def _constant_fields(kernel: str) -> set[str]:
    return {field for field, kind in _declarations(kernel) if kind.startswith("const ")}


def the_workspace_is_modest(problem: Problem, device: Device, chosen: Plan) -> None:
    """Scratch memory is a third of what must move at most, beside what is small.

    That is a quarter of a megabyte a multiprocessor (partial sums of what its blocks hold), one row of partial sums,
    and where rows are not contiguous what is known of each row: five numbers of 8 bytes.
    """
    small = device.multiprocessors * 2**18 + 16 * problem.columns + 40 * problem.rows + 2048
    assert chosen.workspace_bytes <= problem.bytes_moved // 3 + small


# ---- Every result is written.


def every_result_is_written(problem: Problem, device: Device, chosen: Plan) -> None:
    """Each output that is wanted and not empty is a field of some launch, and its type is right."""
    written = {
        str(value): (item, field)
        for item in chosen.launches
        for field, value in item.arguments
        if isinstance(value, str) and field not in _constant_fields(item.kernel)
    }
    filled = bool(problem.rows and problem.columns)
    if isinstance(problem, ForwardProblem):
        wanted = {"y"} if filled else set()
        wanted |= {"residual_out"} if filled and problem.residual_out is not None else set()
        if problem.stats and problem.rows:
            wanted |= {"rstd", "mean"} if problem.norm.centered else {"rstd"}
        assert written.keys() >= wanted
        return
    wanted = {"dx"} if problem.dx is not None and filled else set()
    kinds = {"sums": "SUM_TYPE", "second_sums": "SECOND_SUM_TYPE"}
    for name, dtype in (("dweight", problem.dweight), ("dbias", problem.dbias)):
        if dtype is not None and problem.columns:
            wanted.add(name)
            item, field = written[name]
            assert sum(value == name for launched in chosen.launches for _, value in launched.arguments) == 1
            kind = kinds[field] if item.kernel == "column_sums" else f"{field.upper()}_TYPE"
            assert dict(item.constants)[kind] == DTYPES[dtype].cuda
            assert item.kernel == "column_sums" or field == name
    assert written.keys() >= wanted
    assert not (written.keys() & {"dweight", "dbias"}) - wanted


def launches_may_overlap(problem: AnyProblem, device: Device, chosen: Plan) -> None:
    """Each launch may begin before the one before it has ended: it waits itself, or reads what is not there yet.

    That the wait comes first is seen in what the compiler makes of it (test_compile.py).
    """
    for place, item in enumerate(chosen.launches):
        text = kernels.kernel_source(item.kernel, {})
        assert place == 0 or "wait_for_earlier_launches();" in text, f"{item.kernel} does not wait"
        assert item is chosen.launches[-1] or "let_next_launch_begin();" in text, f"nothing overlaps {item.kernel}"


RULES = [
    within_the_limits_of_cuda,
    every_field_of_the_kernel,
    scratch_memory,
    scratch_buffers_hold_what_the_kernels_put_there,
    scratch_is_written_before_it_is_read,
    the_workspace_is_modest,
    every_access_is_aligned_and_contiguous,
    rows_and_columns_are_covered,
    weights_are_those_of_the_channels,
    every_result_is_written,
    launches_may_overlap,
]

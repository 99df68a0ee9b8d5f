"""Every kernel that a plan asks for compiles for every architecture, and nothing of it spills. Needs no GPU.

Which these are is in compile_cases.py. What is seen in PTX besides: a kernel that may begin before the launch before it
has ended waits before all else, but for row_weight_gradients, the last passes of row_split_* and channel_split_* and,
where rows are claimed, row_block_forward, which may read what the plan was given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from compile_cases import (
    ALIKE,
    ARCHS,
    ASYNCHRONOUS,
    KNOWN_SPILLS,
    PLAIN,
    Case,
    cases,
    channel_launches,
    channel_problems,
    complaint,
    features,
    grid_problems,
    launches,
    launches_for,
    launches_of,
    pipeline_problems,
    split_problems,
    sums_problems,
    with_options,
)
from plan_cases import GPUS, plain_backward, plain_channel_norm, plain_forward, plan_of

from cunorm import compiling, kernels, resources
from cunorm.plan import Launch, channel_grid, channel_pipeline, channel_slab, plan
from cunorm.problem import ACTIVATIONS, DTYPES
from cunorm.resources import compile_resources

pytest.importorskip("cupy", reason="needs CuPy, for NVRTC")
IN_BULK = "row_bulk", "row_held", "row_stream"


@pytest.mark.parametrize("kernel", kernels.kernel_names())
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_and_do_not_spill(arch: str, dtype: str, kernel: str) -> None:
    every = launches_of(arch, dtype, kernel)
    # Some copy asynchronously, which there is since sm_80, and of these some would spill doubles; and rows are claimed,
    # by counters that are cleared, and come in bulk, but for doubles, since sm_90.
    asked_for = not kernel.startswith(ASYNCHRONOUS) or GPUS[arch].capability >= 80
    asked_for = asked_for and (not kernel.startswith(("zeros", *IN_BULK)) or GPUS[arch].capability >= 90)
    asked_for = asked_for and not (kernel.startswith(IN_BULK) and dtype == "float64")
    asked_for = asked_for and not (kernel.startswith("row_held") and GPUS[arch].capability != 90)
    if kernel == "channel_pipeline_backward" and DTYPES[dtype].itemsize == 2:
        asked_for = asked_for and GPUS[arch].shared_bytes > 100 << 10  # else it has no room for three parts
    assert bool(every) == (asked_for and not ("pipeline" in kernel and dtype == "float64"))
    complaints = {}
    for item in every:
        of_rows = dict(item.arguments).get("columns"), dict(item.constants).get("WEIGHTS_OF")
        known = KNOWN_SPILLS.get((kernel, dtype, *of_rows), 0) if arch == "sm_90" else 0  # type: ignore[call-overload]
        found = complaint(item, compile_resources(kernel, dict(item.constants), arch), GPUS[arch], known)
        if found is not None:
            complaints[" ".join(f"{name}={value}" for name, value in item.constants)] = found
    assert not complaints, "\n".join(f"{kernel} {arch} {what}: {found}" for what, found in complaints.items())


SHARES = {"float16": 0, "float32": 1, "float64": 2}


@pytest.mark.parametrize("dtype", list(SHARES))
def test_slabs_know_what_their_kernels_declare(dtype: str) -> None:
    """A slab's shared memory is reckoned before anything is compiled: never with less than there will be."""
    device, seen = GPUS["sm_90"], 0
    # The dtypes share the norms, of which there are two problems each.
    for problem in (item for place, item in enumerate(channel_problems(dtype)) if place // 2 % 3 == SHARES[dtype]):
        for family in (channel_slab, channel_grid, channel_pipeline):
            slab: Any = next(iter(family.candidates(problem, device)), None)
            if slab is None:
                continue
            kernel = family.__name__.removeprefix("cunorm.plan.") + "_"
            item = next(item for item in plan_of(slab, problem).launches if item.kernel.startswith(kernel))
            taken = compile_resources(item.kernel, dict(item.constants), device.arch)
            # The compiler drops what a single block does not tell others, and moments that update nothing.
            assert taken.shared_bytes <= slab.static_bytes(problem) <= taken.shared_bytes + 2048
            seen += 1
    assert seen >= 8


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_slabs_have_the_registers_that_they_count_on(dtype: str, activation: str | None) -> None:
    """Also those that are not chosen here, where as many blocks as can be share a multiprocessor."""
    device = GPUS["sm_90"]
    for problem in plain_channel_norm((8, 320, 64 * 64), dtype, 10, last=True, activation=activation):
        slab = max(channel_slab.candidates(problem, device), key=lambda slab: slab.tiles.min_blocks)
        assert slab.tiles.min_blocks >= 3
        item = next(item for item in plan_of(slab, problem).launches if item.kernel.startswith("channel_slab_"))
        assert complaint(item, compile_resources(item.kernel, dict(item.constants), device.arch), device) is None


def _ways(items: Iterable[Launch]) -> set[tuple[object, ...]]:
    return {
        (*(constants[name] for name in ("STAGE", "PEELED", "WEIGHTS")), _are_whole(constants), item.cluster > 1)
        for item in items
        if item.kernel.startswith("row_block")
        for constants in [dict(item.constants)]
    }


def _are_whole(constants: dict[str, Any]) -> bool:
    """Whether all threads have all of their vectors in every row."""
    return constants["WHOLE_VECTORS"] == constants["VECTORS"]


@pytest.mark.parametrize("kernel", ["row_block_forward", "row_block_backward"])
def test_every_way_to_lay_out_rows_is_compiled(kernel: str) -> None:
    """There is no size up to 300,000 whose rows lie in a way that none of the sizes above has."""
    sizes = sorted({*range(1, 3000, 7), *range(3000, 300_000, 997), *(2**i for i in range(19))})
    for arch in ("sm_90", "sm_100"):
        every = (Case(dtype, columns) for dtype in DTYPES for columns in sizes)
        asked = launches((problem for case in every for problem in case.problems()), arch)
        known = launches((problem for case in cases(arch) for problem in case.problems()), arch)
        assert _ways(item for item in asked if item.kernel == kernel) <= _ways(
            item for item in known if item.kernel == kernel
        )


@pytest.mark.parametrize("kernel", ["row_block_forward", "row_block_backward", "column_sums"])
def test_what_is_compiled_has_all_that_any_kernel_has(kernel: str) -> None:
    """Each value of each constant, each pair that counts, and each way to lay out rows: some of the kernels do."""
    for dtypes in (("float16", "bfloat16"), ("float32",)):
        every: set[tuple[object, ...]] = set()
        some: set[tuple[object, ...]] = set()
        for dtype in dtypes:
            for item in launches_for("sm_90", dtype)[kernel].values():
                every |= features(dict(item.constants), in_pairs=True)
            for item in launches_of("sm_90", dtype, kernel):
                some |= features(dict(item.constants), in_pairs=True)
        assert some == every


def test_every_option_is_compiled() -> None:
    activations, ways = set(), set()
    for arch in ARCHS:
        for case in cases(arch):
            activations.add(case.norm.activation)
            ways.add((case.norm.centered, case.residual, case.weight is None, case.offset == 0))
    assert activations == {None, *ACTIVATIONS}
    assert len(ways) >= 7
    assert {case for arch in ARCHS for case in cases(arch)} >= {*PLAIN, *with_options()}


def test_rows_of_channels_are_compiled_in_every_way() -> None:
    for archs, grid in ((ALIKE, 0), (["sm_90"], 1), (["sm_100"], 1), (["sm_120"], 1)):
        every = [item for arch in archs for dtype in DTYPES for item in channel_launches(dtype, arch)]
        ways = {(item.kernel, dict(item.constants).get("WEIGHTS_OF")) for item in every}
        assert ways >= {("row_block_forward", way) for way in ("part", "vector", "crossing", "numbers")}
        assert ways >= {("row_block_backward", way) for way in ("part", "vector", "crossing")}
        assert ("row_grid_forward", "part") in ways or not grid


def test_a_spill_is_seen() -> None:
    """Far more vectors a thread than any plan asks for: the test above must fail for it."""
    (item,) = launches(Case("float32", 4096).problems()[:1], "sm_80")
    constants = dict(item.constants) | {"VECTORS": 64, "WHOLE_VECTORS": 0}
    taken = compile_resources(item.kernel, constants, "sm_80")
    assert "spilled" in str(complaint(item, taken, GPUS["sm_80"]))


# ---- Launches that overlap.


def ptx_of(item: Launch) -> list[str]:
    """The lines of a kernel, for sm_90, from its beginning on."""
    from cupy_backends.cuda.libs import nvrtc

    source = kernels.kernel_source(item.kernel, dict(item.constants))
    options = (*compiling.COMPILE_OPTIONS, *resources._CUPY_OPTIONS, *resources._include_options(), "-arch=compute_90")
    program = nvrtc.createProgram(source, f"{item.kernel}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        text = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    text = text if isinstance(text, str) else text.decode()
    return [line.strip() for line in text[text.index(f".entry {item.kernel}(") :].splitlines()]


def before(instruction: str, ptx: list[str]) -> list[str]:
    """The lines before an instruction that every thread comes to: no branch leads past it."""
    assert ptx.count(instruction) == 1  # as it stands here: without a predicate
    lines = ptx[: ptx.index(instruction)]
    text = "\n".join(lines)
    assert not re.search(r"\b(?:ret|exit|trap|call)\b", text)
    labels = set(re.findall(r"^(\$\w+):", text, re.MULTILINE))
    assert labels.issuperset(re.findall(r"\bbra[.\w]*\s+(\$\w+);", text))
    return lines


def reads_memory(line: str) -> bool:
    """Whether an instruction is a copy, a load, or a hint of one, of what nobody writes meanwhile."""
    copy, load = r"cp\.async\.c[ag]\.shared\.global", r"ld\.global(?:\.L2::cache_hint)?(?:\.[vbfus]\d+)+"
    hint = r"prefetch\.global\.L2::evict_last"
    return bool(re.match(rf"(?:@!?%\w+\s+)?(?:{copy}|{load}|{hint})\s", line))


def touches_memory(line: str) -> bool:
    """Whether an instruction reads or writes what other launches may write or read."""
    name = re.match(r"(?:@!?%\w+\s+)?((?:ld|ldu|st|cp|atom|red|prefetch|prefetchu|multimem|discard)[.\w:]*)\s", line)
    return name is not None and not re.match(r"(?:ld|st)\.(?:\w+\.)?(?:param|shared)\b", name[1])


LET_GO, WAIT = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"
ARRIVE = "barrier.cluster.arrive.relaxed.aligned;"


def launches_at(places: slice, dtype: str) -> list[Launch]:
    """Those at some places of plans, each kernel once."""
    problems = [*split_problems(dtype), *grid_problems(dtype), *sums_problems(dtype), *channel_problems(dtype)]
    problems += pipeline_problems(dtype)  # and of rows that are held
    every = (item for problem in problems for item in plan(problem, GPUS["sm_90"]).launches[places])
    return list({item.kernel: item for item in every}.values())


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_later_launch_waits_before_it_touches_memory(dtype: str) -> None:
    later = launches_at(slice(1, None), dtype)
    # Rows that are claimed have a test of their own.
    later = [item for item in later if item.kernel != "row_block_forward"]
    passes = "row_split_forward", "row_split_backward", "channel_split_forward", "channel_split_backward"
    assert {item.kernel for item in later} == {
        *passes, "column_sums", "split_merge", "channel_split_gradient_merge", "row_weight_gradients"
    }  # fmt: skip
    for item in later:
        ptx = ptx_of(item)
        assert any(map(touches_memory, ptx)), item.kernel
        early = [line for line in before(WAIT, ptx) if touches_memory(line)]
        if item.kernel in (*passes, "row_weight_gradients"):
            # Before it nothing is written that it reads so, as the rules of plans have it (channel_plan_rules.py,
            # plan_rules.py): x, dy and the weights, of row_split_* x only if there was no residual.
            early = [line for line in early if not reads_memory(line)]
        assert not early, item.kernel


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_words_are_used_when_all_blocks_have_cleared_them(dtype: str) -> None:
    """That is asked with acquire; and told with release, before a block asks for what would delay it."""
    cooperative = [item for item in launches_at(slice(1), dtype) if item.cooperative]
    families = "row_held", "row_pipeline", "row_stream", "channel_pipeline"
    pipelines = {f"{family}_{way}" for family in families for way in ("forward", "backward")}
    grids = {"row_grid_forward", "channel_grid_forward", "channel_grid_backward"}
    assert {item.kernel for item in cooperative} == grids | (set() if dtype == "float64" else pipelines)
    for item in cooperative:
        ptx = ptx_of(item)
        names = "atom.add.release.gpu", "ld.acquire.gpu", ".relaxed.gpu"
        told, asked, used = (next(i for i, line in enumerate(ptx) if name in line) for name in names)
        assert told < asked < used, item.kernel
        assert any("bar.sync" in line for line in ptx[told:asked]), "what was counted lies in shared memory"
        early = [line for line in ptx[:told] if touches_memory(line)]
        assert early and all(re.match(r"(?:@!?%\w+\s+)?st\.global\.v4", line) for line in early), item.kernel


def test_the_class_of_a_share_is_read_behind_a_barrier() -> None:
    """One thread of row_block_backward writes it. Where dx is not wanted, no row has a barrier."""
    problem = replace(plain_backward(8192, 50_257, "bfloat16"), dx=None)
    item, _ = plan(problem, GPUS["sm_90"]).launches
    constants = dict(item.constants)
    assert item.kernel == "row_block_backward" and int(constants["CLASSES"]) > 1 and constants["WANTS_DX"] == 0
    ptx = ptx_of(item)
    barrier, read = (next(i for i, line in enumerate(ptx) if name in line) for name in ("bar.sync", "ld.shared"))
    assert barrier < read


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_rows_are_claimed_when_their_counters_are_set(dtype: str) -> None:
    """And nothing is written before; but rows and weights are on their way."""
    itemsize, claiming = DTYPES[dtype].itemsize, 0
    for size in (131_072, 131_056, 8194, 31_746, 100_514):
        columns = size // itemsize
        for problem in (plain_forward(70_000, columns, dtype), plain_forward(70_000, columns, dtype, residual=True)):
            *cleared, item = plan(problem, GPUS["sm_90"]).launches
            if not cleared:
                continue
            ptx = ptx_of(item)
            assert item.kernel == "row_block_forward" and any("atom" in line for line in ptx)
            assert all(map(reads_memory, filter(touches_memory, before(WAIT, ptx))))
            claiming += 1
    assert claiming >= 6


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_an_earlier_launch_lets_the_next_begin_at_its_start(dtype: str) -> None:
    earlier = launches_at(slice(None, -1), dtype)
    earlier += plan(plain_forward(70_000, 131_072 // DTYPES[dtype].itemsize, dtype), GPUS["sm_90"]).launches[:-1]
    earlier += plan(plain_backward(100_000, 257, dtype), GPUS["sm_90"]).launches[:-1]
    not_of_doubles = "row_bulk", "row_held", "row_pipeline", "row_stream", "channel_pipeline"
    families = () if dtype == "float64" else not_of_doubles
    assert {item.kernel for item in earlier} == {f"{family}_backward" for family in families} | {
        "zeros", "column_sums", "row_block_backward", "row_split_gradient_sums", "row_split_backward",
        "row_split_statistics", "channel_split_statistics", "split_merge",
        "channel_split_gradient_sums", "channel_split_gradient_merge", "channel_slab_backward", "channel_grid_backward"
    }  # fmt: skip
    for item in earlier:
        assert not [line for line in before(LET_GO, ptx_of(item)) if touches_memory(line) or "bra" in line], item.kernel


@pytest.mark.parametrize("make", [plain_forward, plain_backward])
def test_runs_leave_when_copies_in_bulk_can_see_them(make: Callable[..., Any]) -> None:
    """What threads wrote to shared memory is fenced by each, before the barrier in front of what sends it; and a block
    goes on, or ends, when that has been read. Neither the emulator nor compute-sanitizer would see that missing."""
    item = plan(make(100_000, 257, "bfloat16"), GPUS["sm_90"]).launches[0]
    assert item.kernel.startswith("row_bulk")
    ptx = ptx_of(item)
    sends = [i for i, line in enumerate(ptx) if "cp.async.bulk.global.shared" in line]
    for sent in sends:
        fence = max(i for i, line in enumerate(ptx[:sent]) if "fence.proxy.async" in line)
        assert any("bar.sync" in line for line in ptx[fence:sent])
        stores = [i for i, line in enumerate(ptx[:sent]) if line.startswith(("st.shared", "@")) and "st.shared" in line]
        assert max(stores) < fence, "something is written after the fence"
        assert any("cp.async.bulk.wait_group.read" in line for line in ptx[sent:])
    assert sends


@pytest.mark.parametrize(("make", "residual"), [(plain_forward, False), (plain_forward, True), (plain_backward, False)])
def test_parts_are_told_of_when_copies_in_bulk_can_see_them(make: Callable[..., Any], residual: bool) -> None:
    """The same where who sends waits at an mbarrier: each thread fences what it wrote, and then arrives."""
    more = {"residual": True} if residual else {}
    item = plan(make(1000, 131_073, "bfloat16", **more), GPUS["sm_90"]).launches[0]
    assert item.kernel.startswith("row_stream")
    ptx = ptx_of(item)
    fences = [i for i, line in enumerate(ptx) if "fence.proxy.async" in line]
    assert len(fences) == 1 + residual
    arrivals = [i for i, line in enumerate(ptx) if "mbarrier.arrive.shared" in line]
    for fence in fences:
        arrived = min(i for i in arrivals if i > fence)
        # With a residual a few sums of the warp are written between, which nobody sends.
        wide = [line for line in ptx[fence:arrived] if "st.shared" in line and (".v4" in line or ".v2" in line)]
        assert not wide and any("st.shared" in line for line in ptx[:fence])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_clusters_wait_for_no_numbers_before_the_first_sums(dtype: str) -> None:
    """A barrier with release would wait for all that is on its way; and weights behind all numbers come last."""
    for problem in plain_channel_norm((2, 512, 4096), dtype, 16, last=True):
        slabs = channel_slab.candidates(problem, GPUS["sm_90"])
        item = plan_of(next(slab for slab in slabs if slab.blocks_per_slab == 8), problem).launches[0]
        ptx = ptx_of(item)
        assert [line for line in ptx if "barrier.cluster.arrive" in line] == [ARRIVE]
        first_copy = next(place for place, line in enumerate(ptx) if re.search(r"\bcp\.async\.c[ag]", line))
        assert any(line.startswith("ld.global") for line in ptx[:first_copy])
        assert ptx.index(ARRIVE) < first_copy


def test_loads_of_what_is_kept_say_so() -> None:
    """And no asynchronous copy does: who begins one asks by itself (see kernels/cache_hints.cuh)."""
    for rows, asked in ((1000, False), (30_000, True)):
        for problem in (plain_forward(rows, 1024, "bfloat16"), plain_forward(rows, 1023, "bfloat16", residual=True)):
            item = plan(problem, GPUS["sm_90"]).launches[-1]
            assert dict(item.constants)["STAGE"] == "direct"
            hints = [line for line in ptx_of(item) if "cache_hint" in line]
            assert all("ld.global.L2::cache_hint" in line for line in hints)
            assert asked == (len(hints) >= dict[str, Any](item.constants)["VECTORS"])
        item = plan(plain_backward(rows, 4096, "bfloat16"), GPUS["sm_90"]).launches[0]
        ptx = ptx_of(item)
        assert not any("cache_hint" in line for line in ptx)
        prefetches = [line for line in ptx if "prefetch.global.L2::evict_last" in line]
        copies = [line for line in ptx if "cp.async.cg" in line]
        assert len(prefetches) == (len(copies) if asked else 0)


@pytest.mark.parametrize(
    "lines",
    [
        ["@%p1 bra $L_end;", WAIT, "$L_end:"],
        ["@%p1 bra $L_wait;", "ret;", "$L_wait:", WAIT],
        ["@%p1 griddepcontrol.wait;"],
        ["mov.u32 %r1, 0;"],
    ],
)
def test_a_wait_that_a_thread_may_miss_is_seen(lines: list[str]) -> None:
    with pytest.raises(AssertionError):
        before(WAIT, lines)


def test_what_touches_memory() -> None:
    for line in (
        "ld.f32 %f1, [%rd1];", "@%p1 ld.global.v4.u32 {%r1, %r2}, [%rd1];", "st.global.f64 [%rd1], %fd1;",
        "st.relaxed.gpu.global.u64 [%rd1], %rd2;", "cp.async.cg.shared.global [%r1], [%rd1], 16;",
        "prefetch.global.L2 [%rd1];", "ld.volatile.global.u32 %r1, [%rd1];",
    ):  # fmt: skip
        assert touches_memory(line), line
    for line in ("ld.param.u64 %rd1, [a];", "st.shared.f32 [%r1], %f1;", "ld.volatile.shared.u32 %r1, [%r2];",
                 "setp.lt.s32 %p1, %r1, 2;", "cvta.to.global.u64 %rd1, %rd2;"):  # fmt: skip
        assert not touches_memory(line), line


def test_what_reads_what_nobody_writes() -> None:
    for line in ("cp.async.cg.shared.global [%r1], [%rd1], 16;", "@%p1 cp.async.ca.shared.global [%r1], [%rd1], 4;",
                 "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];", "ld.global.u16 %rs1, [%rd1];",
                 "ld.global.L2::cache_hint.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1], %rd2;"):  # fmt: skip
        assert reads_memory(line) and touches_memory(line), line
    for line in ("st.global.u16 [%rd1], %rs1;", "ld.relaxed.gpu.global.u64 %rd2, [%rd1];",
                 "ld.volatile.global.u32 %r1, [%rd1];", "atom.global.add.u32 %r1, [%rd1], 1;",
                 "prefetch.global.L2 [%rd1];", "ld.acquire.gpu.global.u32 %r1, [%rd1];"):  # fmt: skip
        assert not reads_memory(line), line

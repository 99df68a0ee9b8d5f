"""Merges what chunks have left: a launch for the statistics of rows and of channels, and blocks for such sums."""

from __future__ import annotations

from cunorm.plan.constants import compute_constants
from cunorm.plan.launches import Builder, Value
from cunorm.plan.running import running_arguments, running_constants
from cunorm.problem import ChannelForward, ForwardProblem

__all__ = ["launch_merge", "merge_block"]

_THREADS = 256


def merge_block(parts: int) -> tuple[int, int]:
    """How many threads add up so many parts, and how many do so in a block."""
    lanes = 1 if parts <= 4 else 32 if parts <= 256 else _THREADS
    return lanes, _THREADS // lanes


def launch_merge(
    builder: Builder,
    problem: ForwardProblem | ChannelForward,
    chunks: dict[str, Value],
    statistics: dict[str, Value],
    splits: int,
    points_per_split: int,
) -> None:
    """Make the statistics of every set from those of its chunks. A row is a sample of one channel.

    Chunks have ``points_per_split`` but for the last, where they do not say how many they have.
    """
    if isinstance(problem, ChannelForward):
        sizes = {name: getattr(problem, name) for name in ("sets", "channels", "channels_per_set", "points")}
        running, wants_variance = problem.running, problem.y is None
    else:
        sizes = {"sets": problem.rows, "channels": 1, "channels_per_set": 1, "points": problem.columns}
        running, wants_variance = None, False
    lanes, sets_per_block = merge_block(splits * sizes["channels_per_set"])
    builder.launch(
        "split_merge",
        compute_constants(problem)
        | {"SET_LANES": lanes, "SETS_PER_BLOCK": sets_per_block, "WANTS_VARIANCE": int(wants_variance)}
        | running_constants(running),
        -(-sizes["sets"] // sets_per_block),
        (lanes, sets_per_block),
        {
            "chunk_counts": 0,
            **chunks,
            **statistics,
            **running_arguments(running, sizes["points"] * sizes["channels_per_set"]),
            **sizes,
            "splits": splits,
            "points_per_split": points_per_split,
            "eps": problem.eps,
        },
    )

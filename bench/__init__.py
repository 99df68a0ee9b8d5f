"""The benchmarks: suites, the libraries compared, the timing, the plots and tables; ``python -m cunorm bench``.

In a notebook, `load` reads saved results and `measure` makes new ones.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence

from cunorm.bench.results import Measurement, Results, load
from cunorm.bench.suites import DIRECTIONS, DTYPES, GELUS, LAYOUTS, MODEL_SUITES, SUITES, Row, suite
from cunorm.channel_norm import CHANNEL_NORMS

__all__ = ["Measurement", "Results", "Row", "load", "measure"]

_PLAIN = ("forward", "backward")
_OPS = ("layer_norm", "rms_norm", *GELUS, *CHANNEL_NORMS)


def measure(
    what: str | Iterable[Row | Sequence[int]],
    *,
    op: str = "layer_norm",
    dtype: str = "float16",
    directions: Sequence[str] = ("forward", "backward"),
    only: str = "",
    providers: Sequence[str] = (),
    max_seconds: float = float("inf"),
) -> Results:
    """Time problems with every library that is installed, on the current CUDA device. It takes PyTorch.

    Parameters
    ----------
    what : str, or sequence of shapes or rows
        The name of a suite; or shapes, of which ``op``, ``dtype`` and ``directions`` say what is measured; or a `Row`
        for each problem.
    op : {"layer_norm", "rms_norm", "gelu", "gelu_tanh", "bias_gelu", "bias_gelu_tanh"}
    dtype : {"float16", "bfloat16", "float32"}
    directions : sequence of {"forward", "forward_stats", "backward", "both"}
    only : str
        Only rows with all of these words in their name; ``!word`` is for without.
    providers : sequence of str
        Only these libraries: cunorm, torch, liger, ...
    max_seconds : float
        Begin no row after that.

    Returns
    -------
    results : Results
        Each result was compared with float64 before its time counted.

    Raises
    ------
    ValueError
        For suites, ops, dtypes, directions and providers that there are not, and where no row is left.
    TypeError
        For what is neither a suite's name nor a sequence of shapes or rows.
    RuntimeError
        Without a GPU or PyTorch.

    Examples
    --------
    >>> from cunorm import bench
    >>> results = bench.measure([(4096, 4096), (32768, 8192)], dtype="bfloat16")  # doctest: +SKIP
    """
    if isinstance(what, str):
        if what not in SUITES | MODEL_SUITES:
            raise ValueError(f"what is {what!r}; the suites are {', '.join(SUITES | MODEL_SUITES)}")
        rows = suite(what)
    else:
        named = (("op", [op], _OPS), ("dtype", [dtype], DTYPES), ("directions", directions, DIRECTIONS))
        for name, given, known in named:
            for value in given:
                if value not in known:
                    raise ValueError(f"{name} has {value!r}; it must be of {', '.join(known)}")
        allowed = _PLAIN if op in GELUS else (*_PLAIN, "both") if op in CHANNEL_NORMS else DIRECTIONS
        for direction in directions:
            if direction not in allowed:
                raise ValueError(f"directions has {direction!r}; those of {op} are {', '.join(allowed)}")
        rows = []
        for item in what:
            if isinstance(item, Row):
                rows.append(item)
            else:
                shape = _shape(what, item)
                rows += [_row(op, shape, dtype, direction) for direction in directions]
    rows = [row for row in rows if row.matches(only)]
    if not rows:
        raise ValueError(f"nothing is left to measure of {what!r} with only={only!r}")
    from cunorm.bench.timing import Gpu

    machine = Gpu()
    from cunorm.bench.peers import PROVIDERS
    from cunorm.bench.run import run

    unknown = [name for name in providers if name not in PROVIDERS]
    if unknown:
        raise ValueError(f"providers has {unknown[0]!r}; it is none of {', '.join(PROVIDERS)}")
    return run(rows, providers or list(PROVIDERS), machine, max_seconds=max_seconds)


def _row(op: str, shape: tuple[int, ...], dtype: str, direction: str) -> Row:
    if op not in CHANNEL_NORMS:
        return Row("shapes", op, shape, dtype, direction)
    if len(shape) < 2:
        raise ValueError(f"what has {shape}; for {op} a shape must have samples and channels, at least")
    groups = math.gcd(shape[1], 32) if op == "group_norm" else 0
    return Row("shapes", op, shape, dtype, direction, layout=LAYOUTS[0], groups=groups)


def _shape(what: object, item: Sequence[int]) -> tuple[int, ...]:
    """One of the shapes of ``what``."""
    try:
        shape = tuple(map(operator.index, item))
    except TypeError:
        must = "it must be the name of a suite, or a sequence of shapes, each a sequence of ints, or of rows"
        raise TypeError(f"what is {what!r}; {must}") from None
    if not shape or min(shape) < 1:
        raise ValueError(f"what has {shape}; a shape must have a dimension, and none may be empty")
    return shape

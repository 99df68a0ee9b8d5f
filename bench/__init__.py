"""The benchmarks: suites, the libraries compared, the timing, the plots and tables; ``python -m cunorm bench``.

In a notebook, `load` reads saved results and `measure` makes new ones; both show themselves, and have a ``frame`` for
pandas and a ``plot``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cunorm.bench.results import Measurement, Results, load
from cunorm.bench.suites import MODEL_SUITES, SUITES, Row, suite

__all__ = ["Measurement", "Results", "Row", "load", "measure"]


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
        The name of a suite; or shapes, of ``op`` and ``dtype`` in each of the ``directions``; or a `Row` for each
        problem, which can be of all that suites have.
    op : {"layer_norm", "rms_norm", "gelu", "gelu_tanh", "bias_gelu", "bias_gelu_tanh"}
        What is done along the last axis, for shapes.
    dtype : {"float16", "bfloat16", "float32"}
        Of x, for shapes.
    directions : sequence of {"forward", "forward_stats", "backward", "both"}
        For shapes.
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
        For suites and providers that there are not, and where no row is left.
    RuntimeError
        Without a GPU or PyTorch.

    Examples
    --------
    >>> from cunorm import bench
    >>> results = bench.measure([(4096, 4096), (32768, 8192)], dtype="bfloat16")  # doctest: +SKIP
    >>> results.plot()  # doctest: +SKIP
    """
    if isinstance(what, str):
        if what not in SUITES | MODEL_SUITES:
            raise ValueError(f"what is {what!r}; the suites are {', '.join(SUITES | MODEL_SUITES)}")
        rows = suite(what)
    else:
        rows = []
        for item in what:
            shape = () if isinstance(item, Row) else tuple(item)
            of_shape = [Row("shapes", op, shape, dtype, direction) for direction in directions]
            rows += [item] if isinstance(item, Row) else of_shape
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

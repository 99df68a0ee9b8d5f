"""Experiments with the text of a kernel: edit it, check it, look at what it takes, time it, and let every call run it.

What is shipped is never touched: an experiment's text is a text of its own, which stands in for a shipped one only
while the experiment is active.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cunorm.experiments.edited import Experiment

__all__ = ["experiment"]


def experiment(kernel: str) -> Experiment:
    """Begin an experiment with a kernel: its shipped text, to be edited, checked, timed and run.

    Parameters
    ----------
    kernel : str
        The name of a kernel, that is of a file in ``cunorm/kernels`` without its ``.cu``.

    Returns
    -------
    experiment : Experiment
        With the text as ``source``, and the methods ``check``, ``resources``, ``bench`` and ``active``.

    Raises
    ------
    ValueError
        For a kernel that there is not; the message lists those that there are.
    TypeError
        For a kernel that is no str.

    Examples
    --------
    >>> e = cunorm.experiment("row_block_forward")
    >>> e.source = e.source.replace("__launch_bounds__(THREADS", "__launch_bounds__(1 * THREADS")
    >>> print(e.changed)
    kernels/row_block_forward.cu
    -extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS_PER_ROW * ROWS_PER_BLOCK, MIN_BLOCKS)
    +extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(1 * THREADS_PER_ROW * ROWS_PER_BLOCK, MIN_BLOCKS)
    """
    from cunorm.experiments.edited import Experiment

    return Experiment(kernel)

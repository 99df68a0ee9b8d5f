"""What problems of every kind have in common."""

from __future__ import annotations

from dataclasses import dataclass

from cunorm.problem.tensors import DTYPES, ChannelTensor, Matrix, Vector, View

__all__ = ["ACTIVATIONS", "GELUS", "Gradients", "ProblemOfX", "RunningStatistics"]

# gelu is the exact one, x * Phi(x); gelu_tanh its approximation.
ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")
GELUS = ("gelu", "gelu_tanh")


class ProblemOfX:
    x: Matrix | ChannelTensor  # a subclass's field, as are those below

    @property
    def itemsize(self) -> int:
        """The bytes of a number of x, and of every tensor that is like it."""
        return DTYPES[self.x.dtype].itemsize


class Gradients:
    """What is wanted of dx, dweight and dbias; of the sums a dtype."""

    dx: Matrix | ChannelTensor | None
    dweight: str | None
    dbias: str | None

    @property
    def sums(self) -> dict[str, str]:
        """dweight and dbias, those that are wanted, with their dtypes."""
        return {name: dtype for name, dtype in (("dweight", self.dweight), ("dbias", self.dbias)) if dtype is not None}

    @property
    def wants_nothing(self) -> bool:
        return self.dx is None and not self.sums


@dataclass(frozen=True)
class RunningStatistics:
    """The running mean and variance of a batch norm: its statistics, or what it updates with them.

    An update is ``running = kept * running + taken * new``, the new variance ``unbiased`` or not. Where the running
    statistics are ``given``, nothing is updated.
    """

    mean: Vector
    variance: Vector
    given: bool
    kept: float = 0.0
    taken: float = 0.0
    unbiased: bool = True

    @staticmethod
    def of(
        mean: View, variance: View, *, given: bool, kept: float = 0.0, taken: float = 0.0, unbiased: bool = True
    ) -> RunningStatistics:
        return RunningStatistics(Vector.of(mean), Vector.of(variance), given, kept, taken, unbiased)

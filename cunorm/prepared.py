"""What an op prepares: the names of its operands, the tensors to allocate, and a call that is ready to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cunorm.problem import AnyProblem, View, contiguous_strides

__all__ = [
    "BACKWARD_NAMES",
    "BACKWARD_OPERANDS",
    "BACKWARD_RESULTS",
    "FORWARD_NAMES",
    "FORWARD_OPERANDS",
    "FORWARD_RESULTS",
    "NOWHERE",
    "RUNNING_OPERANDS",
    "Described",
    "Gradients",
    "Op",
    "Output",
    "Prepared",
    "Results",
    "cannot_run",
    "placed",
]

Results = tuple[Any, Any, Any, Any]
Gradients = tuple[Any, Any, Any]

# What a user gives and what comes of it, and what the pointers of a call are those of, in order.
FORWARD_NAMES = ("x", "residual", "weight", "bias", "out", "running_mean", "running_var")
FORWARD_RESULTS = ("y", "residual_out", "mean", "rstd")
FORWARD_OPERANDS = (*FORWARD_NAMES[:4], *FORWARD_RESULTS)
RUNNING_OPERANDS = (*FORWARD_OPERANDS[:5], *FORWARD_NAMES[5:], *FORWARD_OPERANDS[5:])
BACKWARD_NAMES = ("dy", "dresidual_out", "x", "weight", "bias", "mean", "rstd")
BACKWARD_RESULTS = ("dx", "dweight", "dbias")
BACKWARD_OPERANDS = (*BACKWARD_NAMES, *BACKWARD_RESULTS)


def placed(given: Iterable[Any], where: Sequence[bool]) -> list[Any]:
    """The values that were given where it says so, None elsewhere."""
    rest = iter(given)
    return [next(rest) if here else None for here in where]


@dataclass(frozen=True)
class Output:
    """Shape and dtype of a tensor to allocate, C-contiguous.

    With a ``permutation`` it is dense too, but its axes lie in memory in that order.
    """

    shape: tuple[int, ...]
    dtype: str
    permutation: tuple[int, ...] | None = None

    @property
    def shape_in_memory(self) -> tuple[int, ...]:
        return self.shape if self.permutation is None else tuple(self.shape[axis] for axis in self.permutation)

    @property
    def places(self) -> tuple[int, ...]:
        """Where in memory's order each axis is: what transposes an array of ``shape_in_memory`` to this."""
        axes = range(len(self.shape))
        return tuple(axes if self.permutation is None else map(self.permutation.index, axes))

    @property
    def strides(self) -> tuple[int, ...]:
        strides = contiguous_strides(self.shape_in_memory)
        return tuple(strides[place] for place in self.places)

    def view(self, device: tuple[str, int]) -> View:
        """What the tensor will look like, with no address yet."""
        return View(0, self.shape, self.strides, self.dtype, device)


@dataclass(frozen=True)
class Prepared:
    """One kind of call, ready to run.

    ``run(pointers, workspace, stream)`` takes the data pointers of the op's inputs, then of its outputs, 0 for those
    that are None; a pointer to ``workspace_bytes`` of scratch memory on the device; and the raw handle of a stream. The
    last two mean nothing on the CPU.
    """

    outputs: tuple[Output | None, ...]
    device: tuple[str, int]
    workspace_bytes: int
    run: Callable[[Sequence[int], int, int], None]


# A device whose calls are not run: what is prepared there tells the problem.
NOWHERE = ("nowhere", 0)


def cannot_run(pointers: Sequence[int], workspace: int, stream: int) -> None:
    raise RuntimeError("a call that is only described cannot run")


@dataclass(frozen=True)
class Described(Prepared):
    """A call on `NOWHERE`: the problem that it is, and what its pointers are those of, in order."""

    problem: AnyProblem
    operands: tuple[str, ...]


class Op(Protocol):
    """An op with its attributes (axis, eps, ...): hashable, and all that an adapter needs to differentiate it.

    The operands named here are the most that an op has: a norm may have nearly all of them, an activation has x, bias
    and y. What an op has not is None wherever it would stand, in both directions, so that adapters treat all ops alike.
    The running mean and variance of a batch norm come together, or not at all.
    """

    @property
    def name_in_ops(self) -> str:
        """Its name among `cunorm.op_names.OPS`."""

    @property
    def keeps_bias(self) -> bool:
        """Whether the gradients need the bias: where an activation was taken of what the bias was added to."""

    @property
    def updates_running(self) -> bool:
        """Whether running statistics that are given are written: else they are read."""

    def prepare_forward(
        self,
        x: View,
        residual: View | None,
        weight: View | None,
        bias: View | None,
        out: View | None,
        stats: bool,
        running: tuple[View, ...] = (),
    ) -> Prepared:
        """Inputs x, residual, weight, bias; outputs y, residual_out, mean, rstd.

        The pointers of ``running``, if given, stand behind that of y.

        What a call does not give is None among the outputs: residual_out without a residual, mean and rstd without
        ``stats`` or for an op that has none, and y where there is an ``out`` (which has y's place then).
        """

    def prepare_backward(
        self,
        dy: View,
        dresidual_out: View | None,
        x: View,
        weight: View | None,
        bias: View | None,
        mean: View | None,
        rstd: View | None,
        output_mask: tuple[bool, bool, bool],
        bias_dtype: str | None,
    ) -> Prepared:
        """Inputs dy, dresidual_out, x, weight, bias, mean, rstd; outputs dx, dweight, dbias.

        ``x`` is what the op was computed of: residual_out, where there was a residual. dx is the gradient of both
        summands. ``bias_dtype`` is dbias's, where the bias itself is not given.
        """

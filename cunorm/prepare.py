"""What all ops prepare calls with: the tensors that come of one, and the plan for its problem, compiled."""

from __future__ import annotations

from collections.abc import Sequence

from cunorm import cuda, launch
from cunorm.plan import Plan, plan
from cunorm.prepared import NOWHERE, Described, Output, Prepared, cannot_run
from cunorm.problem import AnyProblem, PointwiseBackward, PointwiseForward, View
from cunorm.tuning_file import Entry, entry_for

__all__ = ["chosen_plan", "gradient_outputs", "prepare_launches", "views_of"]


def views_of(outputs: Sequence[Output | None], device: tuple[str, int]) -> list[View | None]:
    """What the outputs of a call will look like."""
    return [None if output is None else output.view(device) for output in outputs]


def gradient_outputs(
    dx: Output,
    vector_shape: tuple[int, ...],
    weight: View | None,
    bias: View | None,
    output_mask: tuple[bool, bool, bool],
    bias_dtype: str | None,
) -> tuple[Output | None, Output | None, Output | None]:
    """dx, dweight, dbias of a norm, as far as the mask asks for them; ``bias_dtype`` is as `Op` has it."""
    weight_dtype = dx.dtype if weight is None else weight.dtype
    if bias_dtype is None:
        bias_dtype = weight_dtype if bias is None else bias.dtype
    want_dx, want_dweight, want_dbias = output_mask
    dweight, dbias = Output(vector_shape, weight_dtype), Output(vector_shape, bias_dtype)
    return dx if want_dx else None, dweight if want_dweight else None, dbias if want_dbias else None


def prepare_launches(
    problem: AnyProblem,
    operands: tuple[str, ...],
    outputs: tuple[Output | None, ...],
    device: tuple[str, int],
) -> Prepared:
    """A call of the plan for a problem.

    On the device of `cunorm.prepared.NOWHERE` it is only described.
    """
    if device == NOWHERE:
        return Described(outputs, device, 0, cannot_run, problem, operands)
    _, device_index = device
    chosen, _ = chosen_plan(problem, device_index)
    call = launch.Call(chosen, operands, device_index)
    return Prepared(outputs, ("cuda", device_index), chosen.workspace_bytes, call)


def chosen_plan(problem: AnyProblem, device_index: int) -> tuple[Plan, Entry | None]:
    """The plan for a problem on a CUDA device here, with what was tuned for it, if anything was; and that."""
    if isinstance(problem, (PointwiseForward, PointwiseBackward)):
        return plan(problem, cuda.device(device_index)), None
    tuned = entry_for(problem, device_index)
    return plan(problem, cuda.device(device_index), tuned.geometry if tuned else None), tuned

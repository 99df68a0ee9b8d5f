"""What a call computes apart from its tensors: an op forward or backward, as graphs can keep it."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from cunorm import execute, op_names
from cunorm.execute import Adapter
from cunorm.prepare import gradient_outputs
from cunorm.prepared import BACKWARD_NAMES, Gradients, Op, Output, Prepared, Results, placed
from cunorm.problem import View

__all__ = ["Backward", "Forward", "Work", "from_text", "gather", "scatter", "to_text"]

_T = TypeVar("_T")


def gather(values: Sequence[_T | None]) -> list[_T]:
    """The values that are not None: TensorFlow's functions take no None."""
    return [value for value in values if value is not None]


def scatter(given: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """What `gather` took from ``values``, back in its places."""
    return placed(given, [value is not None for value in values])


@dataclass(frozen=True)
class Forward:
    """An op with statistics, which are always computed: whether gradients are recorded cannot be asked."""

    op: Op

    names: ClassVar = ("x", "residual", "weight", "bias", "running_mean", "running_var")

    def prepare(self, views: Sequence[View | None]) -> Prepared:
        """The call of inputs like these, in the order of ``names``."""
        x, residual, weight, bias, *running = views
        assert x is not None
        return self.op.prepare_forward(x, residual, weight, bias, None, True, tuple(gather(running)))

    def run(self, adapter: Adapter, tensors: Sequence[Any]) -> Results:
        x, residual, weight, bias, *running = tensors
        return execute.forward(adapter, self.op, x, residual, weight, bias, None, True, tuple(gather(running)))

    def operands(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Inputs and outputs in the order in which `Prepared.run` takes their pointers."""
        *others, running_mean, running_var = inputs
        y, *results = outputs
        return [*others, y, *gather((running_mean, running_var)), *results]


@dataclass(frozen=True)
class Backward:
    """The gradients of an op. The rest is as `Op.prepare_backward` has it."""

    op: Op
    output_mask: tuple[bool, bool, bool]
    bias_dtype: str | None

    names: ClassVar = BACKWARD_NAMES

    def prepare(self, views: Sequence[View | None]) -> Prepared:
        """As `Forward.prepare`."""
        dy, dresidual_out, x, *others = views
        assert dy is not None
        assert x is not None
        weight, bias, mean, rstd = others
        return self.op.prepare_backward(
            dy, dresidual_out, x, weight, bias, mean, rstd, self.output_mask, self.bias_dtype
        )

    def results(self, tensors: Sequence[Any]) -> Sequence[Output | None]:
        """What comes of tensors, as far as it does not depend on their shapes."""
        _, _, x, weight, bias, *_ = (None if tensor is None else _without_shape(tensor) for tensor in tensors)
        assert x is not None
        return gradient_outputs(Output((), x.dtype), (), weight, bias, self.output_mask, self.bias_dtype)

    def run(self, adapter: Adapter, tensors: Sequence[Any]) -> Gradients:
        dy, dresidual_out, x, weight, bias, mean, rstd = tensors
        mask, bias_dtype = self.output_mask, self.bias_dtype
        return execute.backward(adapter, self.op, dy, dresidual_out, x, weight, bias, mean, rstd, mask, bias_dtype)

    def operands(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """As `Forward.operands`."""
        return [*inputs, *outputs]


Work = Forward | Backward


def _without_shape(tensor: Any) -> View:
    return View(0, (), (), tensor.dtype.name, ("cpu", 0))


def to_text(work: Work, inputs: Sequence[Any], outputs: Sequence[Any]) -> str:
    """Work, and which of its inputs and outputs there are, as one text that any process reads."""
    return _text_of(work, *(tuple(value is not None for value in values) for values in (inputs, outputs)))


@functools.lru_cache(maxsize=4096)
def _text_of(work: Work, inputs: tuple[bool, ...], outputs: tuple[bool, ...]) -> str:
    gradients = [work.output_mask, work.bias_dtype] if isinstance(work, Backward) else None
    parts = [op_names.recipe_of(work.op), gradients, inputs, outputs]
    return json.dumps(parts)


@functools.lru_cache(maxsize=4096)
def from_text(text: str) -> tuple[Work, list[bool], list[bool]]:
    """What `to_text` was given."""
    recipe, gradients, inputs, outputs = json.loads(text)
    op = op_names.made_of(recipe)
    if gradients is None:
        return Forward(op), inputs, outputs
    output_mask, bias_dtype = gradients
    return Backward(op, tuple(output_mask), bias_dtype), inputs, outputs

"""``python -m cunorm explain``: prints what `cunorm.explain` says of a shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cunorm import gpus
from cunorm.cli import UsageError
from cunorm.cli.options import check_op_options
from cunorm.explanation import explain

__all__ = ["run"]


def run(op: str, shape: tuple[int, ...], dtype: str, activation: str | None, **options: Any) -> None:
    """Print the plan for C-contiguous tensors, of one dtype."""
    if op == "gelu":
        if activation not in (None, "gelu", "gelu_tanh"):
            raise UsageError(f"--activation {activation} is not for gelu; it must be gelu or gelu_tanh")
        options["approximate"] = "tanh" if activation == "gelu_tanh" else "none"
        activation = None
    named = ("axis", "residual", "num_groups", "data_format", "training")
    check_op_options(op, activation=activation, **{name: options[name] for name in named})
    try:
        if options["measure"]:
            gpus.check_usable("--measure")
        explanation = explain(SimpleNamespace(shape=shape, dtype=dtype), op, activation=activation, **options)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    print(explanation, flush=True)

"""How the tensors of each framework meet cunorm: one file or folder a framework.

The framework is found from the type of the tensor, by the name of the package that defines it; its adapter is imported
when its first tensor arrives. So no framework is ever imported that the user has not imported already, and a new one is
a new file or folder, whose ADAPTER provides ``cunorm.execute.Adapter``, and a line in the table.
"""

from __future__ import annotations

import importlib
import types
from typing import TYPE_CHECKING, Any

from cunorm.checks import value_of_keras
from cunorm.execute import Adapter

__all__ = ["adapter_of", "library_of"]

# The package that defines a tensor's type -> the adapter module. What is not here but has __dlpack__ goes through
# dlpack.
_ADAPTERS = {
    "numpy": "numpy",
    "cupy": "cupy",
    "torch": "torch",
    "jax": "jax",
    "jaxlib": "jax",
    "tensorflow": "tensorflow",
}
_MODULES = {*_ADAPTERS.values(), "dlpack", "keras"}
_adapters = types.SimpleNamespace()  # those that were needed yet, by module
_found: dict[type, str] = {}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # ``cunorm.adapters.torch.replace_norms``, after no more than ``import cunorm``.
        if name in _MODULES:
            return importlib.import_module(f"cunorm.adapters.{name}")
        raise AttributeError(f"module 'cunorm.adapters' has no attribute {name!r}")


def adapter_of(tensor: Any) -> Adapter:
    """The adapter for a tensor's framework. A TypeError where there is none."""
    return getattr(_adapters, _module_of(type(tensor)))  # type: ignore[no-any-return]


def library_of(kind: type) -> str | None:
    """The name of the library whose tensors are of a type; None where it is not known. A constant to torch.compile."""
    # A subclass (torch.nn.Parameter, a user's own) is defined elsewhere than its base: the first base that is known
    # counts.
    names = (_ADAPTERS.get(base.__module__.partition(".")[0]) for base in kind.__mro__)
    return next(filter(None, names), None)


setattr(library_of, "_dynamo_marked_constant", True)  # noqa: B010


def _module_of(kind: type) -> str:
    """The name of the adapter's module, which is imported. torch.compile calls this while it traces, for a constant."""
    name = _found.get(kind)
    if name is None:
        name = _find(kind)
        setattr(_adapters, name, importlib.import_module(f"cunorm.adapters.{name}").ADAPTER)
        _found[kind] = name
    return name


setattr(_module_of, "_dynamo_marked_constant", True)  # noqa: B010


def _find(kind: type) -> str:
    if library := library_of(kind):
        return library
    if kind.__module__.startswith("keras.") and kind.__name__ == "KerasTensor":
        raise TypeError("x is a KerasTensor, which has no numbers yet: call this in the call of a layer")
    if hasattr(kind, "__jax_array__"):
        return "jax"
    if hasattr(kind, "__dlpack__"):
        return "dlpack"
    raise TypeError(
        f"x is a {kind.__module__}.{kind.__qualname__}; it must be a NumPy, CuPy, PyTorch, JAX or TensorFlow tensor, "
        f"or have __dlpack__{value_of_keras(kind)}"
    )

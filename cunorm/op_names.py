"""Ops by name: one object for equal attributes, which torch.compile finds by name and other processes make again."""

from __future__ import annotations

import functools
import itertools
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

from cunorm.prepared import Op

__all__ = ["OPS", "as_constant", "interned", "is_compiling", "made_of", "name_op", "recipe_of"]


def is_compiling() -> bool:
    """Whether torch.compile traces what runs here: PyTorch's adapter puts in this place what torch.compile answers."""
    return False


def as_constant(value: Any) -> Any:
    """A number that torch.compile may take for a symbol, as what it is: an index or what a set holds is no symbol."""
    if type(value) is int:
        return operator.index(value)
    if type(value) is float:
        (value,) = {value}
    return value


# Every op that there is, by a name: torch.compile can follow a name to an object, but not how an object was found.
OPS = types.SimpleNamespace()
_op_numbers = itertools.count()


def name_op(op: Op, name: str) -> None:
    """Put an op, which knows its name then, among `OPS`."""
    object.__setattr__(op, "name_in_ops", name)
    setattr(OPS, name, op)


# What ops were made of by what, by their names among `OPS`; and what makes them. Ops that are not here were there from
# the start, and have the same names in every process.
_recipes: dict[str, tuple[Any, ...]] = {}
_makers: dict[str, Callable[..., Any]] = {}


def recipe_of(op: Op) -> tuple[Any, ...]:
    """Text and numbers of which any process makes an op like this, by `made_of`."""
    return _recipes.get(op.name_in_ops, (op.name_in_ops,))


def made_of(recipe: Sequence[Any]) -> Op:
    """The op of a recipe, which may have been through JSON."""
    name, *given = recipe
    arguments = [tuple(argument) if isinstance(argument, list) else argument for argument in given]
    op: Op = _makers[name](*arguments) if arguments else getattr(OPS, name)
    return op


def interned(
    make: Callable[..., Any], kind: str, arguments_of: Callable[[Any], tuple[Any, ...]]
) -> tuple[Any, Callable[..., str | None]]:
    """What finds the op that ``make`` makes of a user's arguments, one op for equal ones; and what finds its name.

    The first keeps what it found, as functools.lru_cache does. The name is among `OPS`, and is None where ``make``
    raises a TypeError or a ValueError. ``kind`` names ``make`` in recipes, and ``arguments_of`` gives the arguments of
    which it makes an op as text and numbers, whatever types the user's had.
    """
    names: dict[tuple[Any, ...], str] = {}

    def name_of_op(arguments: tuple[Any, ...]) -> str:
        op = make(*arguments)
        attributes = tuple(vars(op).values())
        if attributes not in names:
            name = f"op_{next(_op_numbers)}"
            _recipes[name] = (kind, *arguments_of(op))
            name_op(op, name)
            names.setdefault(attributes, name)
        return names[attributes]

    @functools.lru_cache(maxsize=4096, typed=True)
    def find(*arguments: Any) -> Any:
        return getattr(OPS, name_of_op(arguments))

    def find_name(*arguments: Any) -> str | None:
        try:
            return name_of_op(arguments)
        except (TypeError, ValueError):
            return None

    _makers[kind] = find
    # torch.compile calls this while it traces, and takes the result for a constant.
    setattr(find_name, "_dynamo_marked_constant", True)  # noqa: B010
    return find, find_name

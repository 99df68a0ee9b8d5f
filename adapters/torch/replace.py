"""`replace_norms`: the norms and GELUs of any model computed by cunorm, in place.

A layer stays the object that it is, with its parameters, buffers, hooks and place in the model: what changes is its
class, to a subclass whose ``forward`` calls cunorm. So optimizers, tied weights and references go on working.
"""

from __future__ import annotations

import collections
import copyreg
import fnmatch
import functools
import inspect
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize

from cunorm.adapters.torch import modules
from cunorm.adapters.torch.library import is_tracing
from cunorm.adapters.torch.proof import Formula, prove
from cunorm.checks import check_eps, check_momentum
from cunorm.text import kind_of

__all__ = ["Entry", "Report", "replace_norms"]

Choice = str | type[nn.Module]
_MadeOf = tuple[type[nn.Module], type[nn.Module], bool]  # ours, the layer's own, and whether it is for what is traced

# torch.nn's layer -> ours, and what it computes.
_OURS: dict[type[nn.Module], tuple[type[nn.Module], str]] = {
    nn.LayerNorm: (modules.LayerNorm, "layer_norm"),
    nn.RMSNorm: (modules.RMSNorm, "rms_norm"),
    nn.GroupNorm: (modules.GroupNorm, "group_norm"),
    nn.InstanceNorm1d: (modules.InstanceNorm1d, "instance_norm"),
    nn.InstanceNorm2d: (modules.InstanceNorm2d, "instance_norm"),
    nn.InstanceNorm3d: (modules.InstanceNorm3d, "instance_norm"),
    nn.BatchNorm1d: (modules.BatchNorm1d, "batch_norm"),
    nn.BatchNorm2d: (modules.BatchNorm2d, "batch_norm"),
    nn.BatchNorm3d: (modules.BatchNorm3d, "batch_norm"),
    nn.GELU: (modules.GELU, "gelu"),
}
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _BatchNorm, _InstanceNorm)
_KINDS = ("norms", "gelus")
_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


@dataclass(frozen=True)
class Entry:
    """A layer that was looked at: its name in the model, the object, and the class that it had.

    ``text`` says what computes it now, or why it was left; ``now`` is the class that it has, None if it was left.
    """

    name: str
    module: nn.Module
    kind: type[nn.Module]
    text: str
    now: type[_Derived] | None

    # Pickle would not find the new class by its name.
    def __reduce__(self) -> Any:
        made_of = None if self.now is None else self.now._made_of
        return _entry, (self.name, self.module, self.kind, self.text, made_of)


def _entry(name: str, module: nn.Module, kind: type[nn.Module], text: str, made_of: _MadeOf | None) -> Entry:
    return Entry(name, module, kind, text, None if made_of is None else _derived(*made_of))


@dataclass(frozen=True, repr=False)
class Report:
    """What `replace_norms` did: the layers that it ``replaced``, and those that it ``left``, with the reasons.

    As text it is a table, a line for layers of one class and one fate.
    """

    replaced: tuple[Entry, ...]
    left: tuple[Entry, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many layers of each class were replaced."""
        return dict(collections.Counter(entry.kind.__name__ for entry in self.replaced))

    def undo(self) -> None:
        """Make the layers what they were. A RuntimeError where one has become something else since."""
        for entry in self.replaced:
            if type(entry.module) not in (entry.kind, entry.now):
                found = f"{entry.name or 'the model'} is {kind_of(entry.module)} by now"
                raise RuntimeError(f"{found}; undo first what was done to it after replace_norms")
            if "forward" in vars(entry.module):
                found = f"{entry.name or 'the model'} has got a forward of its own, which may call that of cunorm"
                raise RuntimeError(f"{found}; undo first what was done to it after replace_norms")
        for entry in self.replaced:
            vars(entry.module).pop(_FORMULA, None)
            entry.module.__class__ = entry.kind

    def __str__(self) -> str:
        lines = [f"replaced {len(self.replaced)} layers, left {len(self.left)}"]
        for entries, arrow in ((self.replaced, "->"), (self.left, "left:")):
            groups: dict[tuple[str, str], list[str]] = {}
            for entry in entries:
                groups.setdefault((entry.kind.__name__, entry.text), []).append(entry.name or "the model itself")
            for (kind, text), names in groups.items():
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                lines.append(f"{len(names):5} {kind} {arrow} {text} ({names[0]}{more})")
        return "\n".join(lines)

    __repr__ = __str__


def replace_norms(
    model: nn.Module,
    *,
    include: Choice | Sequence[Choice] | None = None,
    exclude: Choice | Sequence[Choice] = (),
    kinds: str | Sequence[str] = _KINDS,
    compiled: bool = False,
) -> Report:
    """Let cunorm compute the norm layers of a model, and its GELUs. The model is changed in place.

    The layers of torch.nn are known: they compute as those of this package that have their names. Other layers whose
    class is called a norm or a GELU (LlamaRMSNorm and its siblings, T5LayerNorm, the channels-first layer norms of
    ConvNeXt, NewGELUActivation, ...) are tried: a copy of the layer and the functions of cunorm run on random tensors
    on the CPU, of several shapes and dtypes, and only one with the same outputs and gradients takes its place. What was
    not tried, another number of dimensions say, goes on to the layer's own ``forward``.

    A layer stays the same object with another class, a subclass of the one it had. Parameters, buffers, hooks, mode,
    device and state dict stay, and so do optimizers and whatever else holds the layer or its parameters.

    Parameters
    ----------
    model : torch.nn.Module
        Any model, also a layer on its own. Replace before ``torch.compile``.
    include : str, class, or sequence of them, optional
        Only these layers: names in the model or names of classes, with ``*`` and ``?`` for wildcards; or classes, with
        their subclasses. The name in the model of what holds layers stands for all of them. A layer that is there
        several times goes by any of its names.
    exclude : str, class, or sequence of them
        Not these layers, likewise.
    kinds : {"norms", "gelus"}, or sequence of them
        What to replace.
    compiled : bool
        Whether cunorm computes the layers also where ``torch.compile`` or ``torch.export`` traces them. Else they go on
        there as they were: the compiler fuses them with what is around them, which it cannot do with cunorm's
        operators.

    Returns
    -------
    Report
        What was replaced, what was left and why; ``print`` shows it as a table, ``undo()`` takes everything back.

    Raises
    ------
    TypeError
        For a model that is no module, and choices that are neither names nor classes.
    ValueError
        For a name that no layer of the model has, and for other kinds.

    Notes
    -----
    Left are layers whose forward is not one of cunorm's functions, subclasses of batch and instance norms with a
    forward of their own, and layers that are synchronized (``SyncBatchNorm``), quantized, parametrized,
    compiled on their own, not initialized yet, or have parameters that are no plain tensors. A function that is called,
    such as ``torch.nn.functional.gelu``, is no layer: it is neither replaced nor in the report. Nothing is fused.

    Examples
    --------
    >>> import torch
    >>> from cunorm.adapters.torch import replace_norms
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.ReLU())
    >>> report = replace_norms(model)
    >>> report
    replaced 2 layers, left 0
        1 LayerNorm -> cunorm.layer_norm (1)
        1 GELU -> cunorm.gelu (2)
    >>> isinstance(model[1], torch.nn.LayerNorm), type(model[1]) is torch.nn.LayerNorm
    (True, False)
    >>> report.undo()
    >>> type(model[1]) is torch.nn.LayerNorm
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {kind_of(model)}; it must be a torch.nn.Module")
    kinds = [kinds] if isinstance(kinds, str) else list(kinds) if isinstance(kinds, Iterable) else kinds
    if not isinstance(kinds, list) or not all(kind in _KINDS for kind in kinds):
        raise ValueError(f"kinds is {kinds!r}; it must be {' or '.join(map(repr, _KINDS))}, or a sequence of them")
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    included = None if include is None else _choices("include", include, names)
    excluded = _choices("exclude", exclude, names)
    proved: dict[Any, Formula | str] = {}
    substitutes: list[tuple[str, nn.Module, _Substitute]] = []
    replaced: list[Entry] = []
    left: list[Entry] = []
    for module, own_names in names.items():
        name = own_names[0]
        if _kind(module) not in kinds:
            continue
        is_included = included is None or _is_one_of(own_names, module, included)
        if not is_included or _is_one_of(own_names, module, excluded):
            found: _Substitute | str = "excluded"
        else:
            found = _untouchable(module) or _substitute(module, proved, compiled)
        if isinstance(found, str):
            left.append(Entry(name, module, type(module), found, None))
        else:
            substitutes.append((name, module, found))
    # Nothing is changed before, so that what raises above leaves the model as it was.
    for name, module, substitute in substitutes:
        original = type(module)
        try:
            module.__class__ = substitute.kind
        except TypeError as error:
            left.append(Entry(name, module, original, f"its class cannot be changed: {error}", None))
            continue
        if substitute.formula is not None:
            vars(module)[_FORMULA] = substitute.formula
        else:
            modules.make_numbers_plain(module)
        replaced.append(Entry(name, module, original, substitute.text, substitute.kind))
    return Report(tuple(replaced), tuple(left))


def _kind(module: nn.Module) -> str | None:
    name = type(module).__name__.lower()
    if isinstance(module, nn.GELU) or "gelu" in name:
        return "gelus"
    return "norms" if isinstance(module, _NORMS) or "norm" in name else None


def _choices(option: str, given: Any, names: Mapping[nn.Module, Sequence[str]]) -> tuple[Choice, ...]:
    """The include or exclude of a user's call."""
    is_one = isinstance(given, (str, type, nn.Module)) or not isinstance(given, Iterable)
    choices = (given,) if is_one else tuple(given)
    for choice in choices:
        if isinstance(choice, str):
            if not any(_is_one_of(own_names, module, (choice,)) for module, own_names in names.items()):
                raise ValueError(f"{option} has {choice!r}, which is the name of no layer of the model and of no class")
        elif not (isinstance(choice, type) and issubclass(choice, nn.Module)):
            found, must = (f"{option} is", "be") if is_one else (f"{option} has", "have")
            raise TypeError(f"{found} {choice!r}; it must {must} names of layers, or classes of torch.nn.Module")
    return choices


def _is_one_of(names: Sequence[str], module: nn.Module, choices: Iterable[Choice]) -> bool:
    # Of a layer "a.b.c" those of what it is in, too: "a" and "a.b".
    parts = [name.split(".") for name in names]
    texts = [type(module).__name__, *(".".join(part[: i + 1]) for part in parts for i in range(len(part)))]
    return any(
        any(fnmatch.fnmatchcase(text, choice) for text in texts)
        if isinstance(choice, str)
        else isinstance(module, choice)
        for choice in choices
    )


def _untouchable(module: nn.Module) -> str | None:
    """Why a layer is left, whatever it computes; None if nothing speaks against it."""
    if isinstance(module, (_Derived, *(ours for ours, _ in _OURS.values()))):
        return "it is cunorm's already"
    if parametrize.is_parametrized(module):
        return "its parameters are parametrized"
    if "forward" in vars(module):
        return "something has set a forward on the object, which hides that of its class"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "it is compiled on its own"
    if isinstance(module, nn.SyncBatchNorm):
        return "it synchronizes its statistics between processes"
    if type(module).__module__.startswith("torch.ao."):
        return "it is quantized"
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is None:
            continue
        if torch.nn.parameter.is_lazy(tensor):
            return "it is not initialized yet"
        if type(tensor) not in (nn.Parameter, Tensor):
            return f"its {name} is {kind_of(tensor)}"
        if tensor.device.type not in ("cuda", "cpu", "meta"):
            return f"its {name} is on {tensor.device}"
        if tensor.dtype not in _DTYPES and name != "num_batches_tracked":
            return f"its {name} has dtype {tensor.dtype}"
    return None


@dataclass(frozen=True)
class _Substitute:
    """The class that a layer gets, and what that computes."""

    kind: type[_Derived]
    text: str
    formula: Formula | None = None


def _substitute(module: nn.Module, proved: dict[Any, Formula | str], compiled: bool) -> _Substitute | str:
    """What takes a layer's place; or why nothing does."""
    found = _forward_of(module, proved)
    if isinstance(found, str):
        return found
    ours, text, formula = found
    try:
        return _Substitute(_derived(ours, type(module), compiled), text, formula)
    except Exception as error:  # the class may ask for anything of its subclasses
        return f"its class cannot have a subclass: {error}"


def _forward_of(
    module: nn.Module, proved: dict[Any, Formula | str]
) -> tuple[type[nn.Module], str, Formula | None] | str:
    """The class whose forward a layer gets, the name of what it computes, and its formula; or why there is none."""
    for theirs, (ours, function) in _OURS.items():
        if isinstance(module, theirs) and _computes_as(type(module), theirs):
            for name in ("weight", "bias"):
                if hasattr(module, name) and name not in module._parameters:
                    return f"its {name} is no parameter, but set by a hook"
            if hasattr(module, "activation"):
                return "it has an activation, which our layers would apply"
            try:
                _check_numbers(module)
            except (TypeError, ValueError) as error:
                return f"its {error}"
            return ours, f"cunorm.{function}", None
    if isinstance(module, (_BatchNorm, _InstanceNorm)):
        return "its forward is its own, and it keeps statistics"
    if module._modules:
        return "it holds other layers, each looked at on its own"
    if module._buffers:
        return "it has buffers"
    formula = _proof(module, proved)
    return formula if isinstance(formula, str) else (_Proved, str(formula), formula)


def _check_numbers(module: nn.Module) -> None:
    """Raise an error for an eps and a momentum that torch.nn's layers take, and ours do not."""
    eps, momentum = getattr(module, "eps", None), getattr(module, "momentum", None)
    if eps is not None:
        check_eps(eps)
    if momentum is not None:
        check_momentum(momentum)


def _computes_as(kind: type[nn.Module], theirs: type[nn.Module]) -> bool:
    """Whether a subclass has left alone what computes."""
    names = ("forward", "_apply_instance_norm", "_handle_no_batch_input")
    return all(getattr(kind, name, None) is getattr(theirs, name, None) for name in names)


def _proof(module: nn.Module, proved: dict[Any, Formula | str]) -> Formula | str:
    """The formula of a layer; found once for layers that differ in nothing but the numbers of their parameters."""
    shapes = tuple((name, p if p is None else p.shape) for name, p in module._parameters.items())
    own = tuple((name, value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE)
    key = (type(module), shapes, own)
    try:
        found = proved.get(key)
    except TypeError:  # an attribute that cannot be hashed
        return _tried(module)
    if found is None:
        found = proved[key] = _tried(module)
    return found


def _tried(module: nn.Module) -> Formula | str:
    try:
        return prove(module)
    except Exception as error:  # of what is around the call: a FakeTensorMode, say
        return f"trying it failed: {type(error).__name__}"


_FORMULA = "_cunorm_formula"  # the attribute of a layer whose formula was found
_classes: dict[_MadeOf, type[_Derived]] = {}  # those that were made at run time


class _Derived(nn.Module):
    """What stands before a layer's class in the class that takes its place."""

    _made_of: _MadeOf

    # Pickle would not find the class by its name.
    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is not _classes.get(self._made_of):
            return super().__reduce_ex__(protocol)  # somebody's subclass, which is to stay that
        reduced: Any = super().__reduce_ex__(2)
        make, arguments, *rest = reduced
        if make is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return make, arguments, *rest  # the layer's own way
        return _rebuild, self._made_of, *rest[:1]


def _rebuild(ours: type[nn.Module], original: type[nn.Module], compiled: bool) -> nn.Module:
    kind = _derived(ours, original, compiled)
    return kind.__new__(kind)


def _derived(ours: type[nn.Module], original: type[nn.Module], compiled: bool) -> type[_Derived]:
    """The subclass of a layer's class that computes as ours does; where it is ``compiled``, too."""
    key = ours, original, compiled
    if key not in _classes:
        bases = (_Derived, ours) if issubclass(ours, original) else (_Derived, ours, original)
        attributes = {"_made_of": key, "forward": _forward(ours, original, compiled)}
        _classes[key] = type(f"Cunorm{original.__name__}", bases, attributes)
    return _classes[key]


def _forward(ours: type[nn.Module], original: type[nn.Module], compiled: bool) -> Any:
    """Our forward; but the layer's own for what our functions would refuse, and unless ``compiled`` in what is traced.

    They refuse tensors that are not just memory, and those of other dtypes and devices. A layer of torch.nn, which is a
    leaf of the graphs of torch.fx, stays one.
    """
    is_leaf = original.__module__.startswith("torch.nn.")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if args else next(iter(kwargs.values()), None)
        if _is_compiling() or is_tracing():
            is_ours = compiled
        else:
            is_ours = (
                type(x) in _PLAIN
                and x.dtype in _DTYPES
                and x.layout is _STRIDED
                and not x.is_nested
                and (x.is_cuda or x.is_cpu or x.is_meta)
            )
            if not is_ours and is_leaf and modules.is_traced_leaf(self, x):
                return modules.without_strided(self, x)
        return (ours if is_ours else original).forward(self, *args, **kwargs)

    return forward


_PLAIN = (Tensor, nn.Parameter)
_STRIDED = torch.strided
_is_compiling = torch.compiler.is_compiling


# Attributes that make no formula; and the forward may have been wrapped.
_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "forward", "__class__"))


class _Proved(nn.Module):
    """The forward of a layer whose formula was found, as long as nothing that made the formula has changed."""

    _made_of: _MadeOf

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given, formula = (*args, *kwargs.values()), vars(self).get(_FORMULA)
        if len(given) == 1 and formula is not None:
            y = formula(self, given[0])
            if y is not None:
                return y
        return super().forward(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        # Frameworks set attributes of their own, which the layer's forward does not ask for.
        if name not in _OF_EVERY_MODULE and (hasattr(self, name) or name in _names_in_forward(self._made_of)):
            _forget_formula(self, name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        _forget_formula(self, name)
        super().__delattr__(name)


@functools.cache
def _names_in_forward(made_of: _MadeOf) -> frozenset[str]:
    """The names and texts in the forward of the layer that a class was made of, and in the methods that it names.

    Each attribute that it may ask for is among them, unless its name is put together or comes from elsewhere.
    """
    _, original, _ = made_of
    classes = [each for each in original.__mro__ if issubclass(each, nn.Module) and each is not nn.Module]
    names = ["forward"]
    seen: set[str] = set()
    for name in names:  # which grows meanwhile
        if name in seen:
            continue
        seen.add(name)
        codes = [getattr(inspect.unwrap(vars(each)[name]), "__code__", None) for each in classes if name in vars(each)]
        for code in codes:  # and so does this
            if code is not None:
                names += [*code.co_names, *(item for item in code.co_consts if isinstance(item, str))]
                codes += [item for item in code.co_consts if isinstance(item, types.CodeType)]
    return frozenset(seen)


def _forget_formula(module: nn.Module, name: str) -> None:
    formula = vars(module).get(_FORMULA)
    # Its parameters are none of what made the formula, which looks for them at each call: FSDP deletes them, and sets
    # tensors in their place.
    if formula is not None and name not in (formula.weight, formula.bias):
        del vars(module)[_FORMULA]

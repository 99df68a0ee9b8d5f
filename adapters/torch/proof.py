"""Which function of cunorm a layer computes that a model library wrote itself: found by trying, never by its name.

The layer and every function that it could be are run on random tensors on the CPU. A function counts when outputs and
gradients agree, for all shapes that the layer takes. For which dtypes, and for which orders of the axes in memory, is
tried besides.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import itertools
import operator
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import cunorm
from cunorm.adapters.torch.modules import gelu, memory_order, parameter_of

__all__ = ["Formula", "prove"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SINGLE = torch.finfo(torch.float32).eps
# Where no attribute of a layer says its eps: those that libraries write into their source.
_USUAL_EPS = (1e-5, 1e-6, _SINGLE)
# Of what is larger than anything that a layer might clip at, as float16 is at 65,504; its cube is still a float32.
_LARGE = 1e8
# Relative errors in the norm, as multiples of the machine epsilon, float32's at the least: layers sum in float32 and
# round on the way, in sixteen bits at every operation. Another formula is further off: the unbiased variance of 8192
# numbers by 500 epsilons, the tanh approximation of GELU by 1000.
_OUTPUT_TOLERANCE, _GRADIENT_TOLERANCE = 16, 64
# Numbers of a parameter, at most. Trying takes seconds at this size, and hundreds of times a parameter's memory: more
# have linear layers and embeddings that normalize and are called norms for it.
_MOST_NUMBERS = 2**16


@dataclass(frozen=True)
class Formula:
    """A function of cunorm with the options that make it a layer.

    ``weight`` and ``bias`` are the names of the layer's parameters. ``place`` is where it has its channels: last;
    first, behind the samples; or moved: likewise, but its result always lies in memory with the channels last. Where it
    ``keeps`` the order of the axes in memory, the result has that of the input, else it is contiguous.

    ``orders`` of the input's axes in memory, and ``dtypes`` of the input and the parameters with that of the result,
    are what was tried.
    """

    op: str
    options: Mapping[str, Any]
    weight: str | None = None
    bias: str | None = None
    place: str = "last"
    keeps: bool = False
    orders: Set[tuple[int, ...]] = frozenset()
    dtypes: Mapping[tuple[torch.dtype, ...], torch.dtype] = field(default_factory=dict)
    width: int | None = None  # of the last axis, where the layer takes no other and has no parameter that says so

    def __str__(self) -> str:
        shown = {name: value for name, value in self.options.items() if name in ("weight_offset", "approximate")}
        shown |= {} if self.place == "last" else {"axis": 1}
        return ", ".join((f"cunorm.{self.op}", *(f"{name}={value!r}" for name, value in shown.items())))

    def parameters(self, module: nn.Module) -> dict[str, Tensor]:
        found = {}
        if self.weight is not None:
            found["weight"] = parameter_of(module, self.weight)
        if self.bias is not None:
            found["bias"] = parameter_of(module, self.bias)
        return found

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """The result of the layer; None for orders and dtypes that were not tried, or other things in the layer."""
        if module._buffers or module._modules:
            return None
        for name, value in module._parameters.items():
            if (value is None) is (name in (self.weight, self.bias)):
                return None
        try:
            parameters = self.parameters(module)
            dtype = self.dtypes.get((x.dtype, *[parameter.dtype for parameter in parameters.values()]))
        except AttributeError:  # one is gone, or is no tensor: the layer says what it makes of that
            return None
        if dtype is None or memory_order(x) not in self.orders or self.width not in (None, x.shape[-1]):
            return None
        last = self.place == "last" and self.op != "group_norm"
        for parameter in parameters.values():  # which the layer may broadcast, or refuse
            if parameter.shape != (x.shape[-parameter.dim() :] if last else x.shape[1:2]):
                return None
        if x.dtype is dtype:
            return self.compute(x, parameters)
        if torch.promote_types(x.dtype, dtype) == dtype:  # the result would not be as exact if it were cast
            return self.compute(x.to(dtype), parameters)
        return self.compute(x, parameters).to(dtype)

    def compute(self, x: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        if self.op == "gelu":
            return gelu(x, **self.options)
        function = getattr(cunorm, self.op)
        y: Tensor
        if self.place == "moved":
            y = function(x.movedim(1, -1), **parameters, **self.options)
            return y.movedim(-1, 1)
        if not self.keeps or x.is_contiguous():
            y = function(x, **parameters, **self.options)
            return y
        own, order, axis = tuple(range(x.dim())), memory_order(x), self.options["axis"]
        axes = tuple([order[item] for item in (axis if isinstance(axis, tuple) else (axis,))])
        y = function(x.movedim(own, order), **parameters, **{**self.options, "axis": axes})
        return y.movedim(order, own)


def prove(module: nn.Module) -> Formula | str:
    """The formula of a layer without buffers and children; or why there is none."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    biases = [name for name in names if "bias" in name or "beta" in name]
    if len(names) > 2 or len(biases) > 1 or len(names) - len(biases) > 1:
        return f"it has other parameters than a weight and a bias: {', '.join(names)}"
    weight = next((name for name in names if name not in biases), None)
    bias = next(iter(biases), None)
    for name in names:
        if (count := getattr(module, name).numel()) > _MOST_NUMBERS:
            return f"its {name} has {count:,} numbers, and no more than {_MOST_NUMBERS:,} are tried"
    if any(isinstance(item, Tensor) and not isinstance(item, nn.Parameter) for item in _held(_attributes(module))):
        return "it holds tensors that are no parameters"
    with (
        # What surrounds the call is none of the layer's: its random numbers, its device, its modes.
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        shapes = list(_shapes(module, weight))
        tried = [trial for trial in (_Trial(module, shape) for shape in shapes) if trial.results]
        if not tried:
            return "its forward takes no floating-point tensor alone"
        if any(trial.has_written for trial in tried):
            return "its forward writes attributes of the layer, or into what they hold"
        for formula in _formulas(module, weight, bias):
            if all(trial.agrees(formula) for trial in tried):
                break
        else:
            return "no function of cunorm computes the same"
        # Which dtype the result has, of which dtypes, is the layer's own: so that is tried too.
        shape = tried[0].x.shape
        dtypes = {}
        for x_dtype, other in itertools.product(_DTYPES, _DTYPES if names else _DTYPES[:1]):
            trial = _Trial(module, shape, x_dtype, other)
            if trial.results:
                key, found = (x_dtype, *[other] * len(names)), trial.results[0][0].dtype
                if trial.agrees(dataclasses.replace(formula, orders={trial.order}, dtypes={key: found})):
                    dtypes[key] = found
        width = None
        if not names and len(_Trial(module, (*shape[:-1], shape[-1] + 8)).results) < 2:
            width = shape[-1]
        formula = _with_orders(module, formula, shapes)
    orders = formula.orders | {trial.order for trial in tried}
    return dataclasses.replace(formula, orders=orders, dtypes=dtypes, width=width)


def _with_orders(module: nn.Module, formula: Formula, shapes: Iterable[tuple[int, ...]]) -> Formula:
    """The formula with all orders but the input's own for which it gives the layer's results, in memory too."""
    formulas = [formula]
    if "axis" in formula.options:
        formulas.append(dataclasses.replace(formula, keeps=True))
    taken: set[tuple[int, ...]] = set()
    wrong: list[set[tuple[int, ...]]] = [set() for _ in formulas]
    for shape in shapes:
        # An axis of one number may lie anywhere.
        for order in _orders(len(shape)) if 1 not in shape else ():
            trial = _Trial(module, shape, order=order)
            if trial.results:
                taken.add(order)
                for one, others in zip(formulas, wrong):
                    if not trial.agrees(one):
                        others.add(order)
    best, others = min(zip(formulas, wrong), key=lambda pair: len(pair[1]))
    return dataclasses.replace(best, orders=taken - others)


def _formulas(module: nn.Module, weight: str | None, bias: str | None) -> Iterator[Formula]:
    """All that the layer could be, as far as its attributes do not say otherwise."""
    if "gelu" in type(module).__name__.lower():
        for approximate in ("none", "tanh"):
            yield Formula("gelu", {"approximate": approximate})
        return
    numbers = [float(value) for value in vars(module).values() if isinstance(value, float) and 0 <= value < 0.1]
    rank = getattr(module, weight).dim() if weight else getattr(module, bias).dim() if bias else 1
    axis = -1 if rank == 1 else tuple(range(-rank, 0))
    groups = getattr(module, "num_groups", None)
    for eps in dict.fromkeys((*numbers, *_USUAL_EPS)):
        if isinstance(groups, int):
            yield Formula("group_norm", {"num_groups": groups, "eps": eps}, weight, bias)
        for op, place in itertools.product(("rms_norm", "layer_norm"), ("last", "first", "moved")):
            options: dict[str, Any] = {"eps": eps}
            if place != "moved":
                options["axis"] = axis if place == "last" else 1
            yield Formula(op, options, weight, bias, place)
            if op == "rms_norm" and weight:
                yield Formula(op, options | {"weight_offset": 1.0}, weight, bias, place)


def _shapes(module: nn.Module, weight: str | None) -> Iterator[tuple[int, ...]]:
    """Shapes of inputs with the channels last, and with them behind the samples. A layer takes some of them."""
    if weight:
        width = tuple(getattr(module, weight).shape)
        # Where the first axes of a weight have one number, the layer may take others, along which it broadcasts.
        first = next((axis for axis, size in enumerate(width) if size > 1), len(width) - 1)
        widths = list(dict.fromkeys((width, width[first:])))
    else:
        sizes = [value if isinstance(value, tuple) else (value,) for value in vars(module).values()]
        given = [size for size in sizes if size and all(type(item) is int and 1 < item <= 2**16 for item in size)]
        widths = list(dict.fromkeys((*given, (24,))))
    for width in widths:
        for samples in ((6,), (2, 3), (2, 3, 2), (2, 1, 3, 2)):
            yield (*samples, *width)
        if len(width) == 1:
            for positions in ((7,), (5, 2), (3, 2, 2)):
                yield (3, *width, *positions)


def _orders(dimensions: int) -> set[tuple[int, ...]]:
    """In which orders axes may lie in memory, besides their own: of five, with the channels on their other side."""
    own = tuple(range(dimensions))
    if dimensions > 4:
        return {(0, *own[2:], 1), (0, own[-1], *own[1:-1])}
    return {*itertools.permutations(own)} - {own}


class _Trial:
    """A layer run on random numbers of a shape: outputs, and the gradients of the first.

    ``results`` has a list of them for training and one for evaluation, but none of what raises.

    The samples are of several sizes: small ones, where eps counts, or for GELU large ones. Of float32 numbers there are
    outputs besides of what a layer may treat in a way of its own: zeros, very small and very large numbers, one that is
    much larger than all others, and NaN; and parameters so large that results are which a layer might clip. These are
    contiguous; the others have their axes in memory in ``order``.
    """

    def __init__(
        self,
        module: nn.Module,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        parameter_dtype: torch.dtype = torch.float32,
        order: tuple[int, ...] | None = None,
    ) -> None:
        # Every process has numbers of its own: a layer that sums over all would else seem to do without the others.
        is_one_of_several = torch.distributed.is_available() and torch.distributed.is_initialized()
        generator = torch.Generator().manual_seed(torch.distributed.get_rank() if is_one_of_several else 0)

        def random(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32)

        sizes = [1.0]
        single = dtype is parameter_dtype is torch.float32
        if single:
            sizes = [1.0, 4.0, 30.0] if "gelu" in type(module).__name__.lower() else [1.0, 1e-2, 1e-3]
        scale = torch.tensor((sizes * shape[0])[: shape[0]], dtype=torch.float32).view(-1, *[1] * (len(shape) - 1))
        numbers = random(shape) * 2 + 0.5
        own = tuple(range(len(shape)))
        self.order = order or own
        laid = (numbers * scale).to(dtype).movedim(own, self.order).contiguous().movedim(self.order, own)
        self.x = laid.requires_grad_()
        self.dy = random(shape) * scale
        self.others = [torch.zeros_like(self.x)]
        if single and self.order == own:
            self.others += [numbers * size for size in (1e-10, 1e-7, 1e-5, 1e3, _LARGE)]
            for one in (1e3, float("nan")):
                other = numbers.clone()
                other.view(-1)[other.numel() // 2] = one
                self.others.append(other)
        # The layer itself is not touched: another object of its class, with parameters and containers of its own.
        trial = self.copy = object.__new__(type(module))
        shared = {id(item): item for item in _held(_attributes(module)) if not _is_copied(item)}
        trial.__dict__ = copy.deepcopy(_attributes(module), shared) | {"_parameters": {}}
        for name, parameter in module._parameters.items():
            value = None if parameter is None else nn.Parameter((random(parameter.shape) / 2 + 1).to(parameter_dtype))
            trial._parameters[name] = value
        self.leaves = [self.x, *(parameter for parameter in trial._parameters.values() if parameter is not None)]
        self.enlarged = self.leaves[1:] if len(self.others) > 1 else []
        self.results: list[list[Tensor]] = []
        self.has_written = False
        for training in (True, False):
            vars(trial)["training"] = training
            before = _held(vars(trial))
            with contextlib.suppress(Exception):  # of any kind: it may have been made for other tensors
                self.results.append(self._run(trial.forward))
            after = _held(vars(trial))
            self.has_written |= len(after) != len(before) or any(map(operator.is_not, after, before))

    def _run(self, function: Any) -> list[Tensor]:
        y = function(self.x)
        if not isinstance(y, Tensor):
            raise TypeError("the result is no tensor")
        gradients = torch.autograd.grad(y, self.leaves, self.dy.to(y.dtype))
        outputs = [y.detach(), *gradients, *(function(other).detach() for other in self.others)]
        if self.enlarged:
            with _multiplied(self.enlarged, _LARGE):
                outputs.append(function(self.x).detach())
        return outputs

    def agrees(self, formula: Formula) -> bool:
        """Whether the formula gives the layer's results, in training and in evaluation."""
        if len(self.results) < 2:
            return False
        try:
            if formula.dtypes:
                ours = self._run(lambda x: formula(self.copy, x))
            else:
                ours = self._run(lambda x: formula.compute(x, formula.parameters(self.copy)))
        except (ValueError, TypeError, RuntimeError):
            return False  # it takes no such shape
        return all(self._are_same(ours, theirs) for theirs in self.results)

    def _are_same(self, ours: list[Tensor], theirs: list[Tensor]) -> bool:
        """Whether results are the same in dtype, strides and, within the tolerance, numbers."""
        epsilon = max(_SINGLE, *(torch.finfo(leaf.dtype).eps for leaf in self.leaves))
        if ours[0].stride() != theirs[0].stride():
            return False
        for i, (one, other) in enumerate(zip(ours, theirs)):
            tolerance = _GRADIENT_TOLERANCE if 0 < i <= len(self.leaves) else _OUTPUT_TOLERANCE
            if one.shape != other.shape or one.dtype != other.dtype:
                return False
            is_nan = other.isnan()
            if not torch.equal(one.isnan(), is_nan):
                return False
            one, other = one.double().masked_fill(is_nan, 0), other.double().masked_fill(is_nan, 0)
            if not (one - other).norm() <= tolerance * epsilon * other.norm():
                return False
        return True


@contextlib.contextmanager
def _multiplied(parameters: Sequence[Tensor], factor: float) -> Iterator[None]:
    """Parameters are larger by a factor meanwhile."""
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(factor)
        yield
    finally:
        with torch.no_grad():
            for parameter, own in zip(parameters, before):
                parameter.copy_(own)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name != "_parameters"}


def _is_copied(item: Any) -> bool:
    """Whether a layer that is tried has an object of its own of this, so that what is written into it is noticed.

    That is containers and plain objects. What can be called, a function or another layer, is not looked into.
    """
    return isinstance(item, (list, tuple, dict, set, collections.deque)) or (
        hasattr(item, "__dict__") and not callable(item) and not isinstance(item, (Tensor, types.ModuleType))
    )


def _held(attributes: dict[str, Any]) -> list[Any]:
    """All that is within the attributes of a layer, in an order: while nothing is written, the same objects."""
    found: list[Any] = [attributes]
    seen = set()
    for item in found:  # which grows meanwhile
        if id(item) in seen or not _is_copied(item):
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            found += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, collections.deque)):
            found += item
        if hasattr(item, "__dict__"):
            found += [*vars(item).keys(), *vars(item).values()]
    return found

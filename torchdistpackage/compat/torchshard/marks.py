"""torchshard's mark `parallel_dim`: the dim along which a tensor is split over the group.

A mark is -1 or 1 (the last dim of an activation, the outputs of a weight), 0 (the inputs of a
weight, the batch) or None. An activation whose last dim is split is a `SplitTensor`: its mark
follows the operations that rules.py lists. The mark of a parameter is a plain attribute, next to
`order_type`: 0 for a weight (out, in), 1 for (in, out), as embeddings have it.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.random import differ
from torchdistpackage.compat.torchshard import rules
from torchdistpackage.compat.torchshard.cuts import (
    Cut,
    Touches,
    argument,
    check_tensors,
    cut_of,
    refusal,
    tensors,
)
from torchdistpackage.compat.torchshard.model_groups import (
    get_group,
    get_group_size,
    get_rank,
)
from torchdistpackage.errors import LayoutError
from torchdistpackage.lazy import resolve

MARK, ORDER = "parallel_dim", "order_type"
LAST = (-1, 1)
"""Marks that mean the last dim of an activation."""


class SplitTensor(Tensor):
    """This rank's slice of an activation; it refuses operations that it cannot follow, by name."""

    @property
    def parallel_dim(self) -> Any:
        return self.__dict__["_mark"]

    @parallel_dim.setter
    def parallel_dim(self, value: object) -> None:
        set_attribute(self, value)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = rules.name_of(func)
        if name in REPLACEMENTS and cut_of(argument(args, kwargs, 0, "input")):
            return resolve(REPLACEMENTS[name])(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            # a dispatch mode calls overloads, within a call that was followed already
            overload = isinstance(func, torch._ops.OpOverload)
            if overload or name in rules.FREE or not _split(args, kwargs):
                return func(*args, **kwargs)
            if name == "setitem":
                return _set_items(func, args)
            rule = rules.RULES.get(name)
            if name in ALL_OR_ANY:
                return _of_all_ranks(func, name, args, kwargs)
            if name in EXTREMES and not kwargs and len(args) == 1 and not _needs_grad(args[0]):
                return _extreme(func, name, args[0])
            if rule is None or getattr(func, "__name__", "") in rules.NUMBERS:
                raise refusal(name, args, kwargs)
            with _own_draws(args, kwargs) if name in rules.RANDOM else nullcontext():
                out = func(*args, **kwargs)
            try:
                cut = rule(args, kwargs, out)
            except Touches:
                raise refusal(name, args, kwargs) from None
            if cut is not None:
                cut = replace(cut, by_hand=_by_hand(args, kwargs))
                if out is None and name == "data":  # `x.data = part`
                    out = args[0]
                for x in tensors(out if isinstance(out, list | tuple) else [out]):
                    if x is argument(args, kwargs, 0, "input") and cut_of(x) is None:
                        _mark_memory(x, cut, name, args, kwargs)
                    follow(x, cut)
            return out

    def __reduce_ex__(self, proto: Any) -> Any:
        return unmarked(self).__reduce_ex__(proto)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        # torch copies leaves only, and a view is none: copy the values of a leaf
        plain = unmarked(self.detach() if self.is_leaf else self)
        twin = copy.deepcopy(plain, memo).requires_grad_(self.requires_grad)
        attributes = self.__dict__
        mark(twin, 0, value=attributes["_mark"]).__dict__["_cut"] = attributes["_cut"]
        return twin


class SplitFakeTensor(SplitTensor, FakeTensor):
    """A `SplitTensor` without values, with which torch.export traces a model."""


REPLACEMENTS = {
    "cross_entropy": "torchdistpackage.compat.torchshard.functional:torch_cross_entropy",
}
"""Functions of torch that are replaced for a split `input`, by name.

They are import paths because their modules import this one, and a program may call torch's function
before it has used any of them."""


ALL_OR_ANY = {
    "all": primitives.MIN,
    "any": primitives.MAX,
    "equal": primitives.MIN,
    "allclose": primitives.MIN,
}
"""Functions whose result over all ranks is true if it is true on all ranks, or on any."""

EXTREMES = {
    "max": primitives.MAX,
    "amax": primitives.MAX,
    "min": primitives.MIN,
    "amin": primitives.MIN,
}
"""Functions of one tensor, called without a dim: the number of the whole is that of all ranks'."""


def _needs_grad(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _extreme(func: Callable[..., Any], name: str, x: Tensor) -> Tensor:
    """Return the largest or smallest number of all slices; all ranks of the group must call."""
    if x.numel():
        number = func(x)
    else:  # an uneven split leaves the last ranks nothing
        kind = torch.finfo(x.dtype) if x.dtype.is_floating_point else torch.iinfo(x.dtype)
        number = unmarked(x).new_full((), kind.min if name.endswith("max") else kind.max)
    return primitives.all_reduce(number, get_group(), EXTREMES[name])


def _split(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return any(cut_of(x) is not None for x in tensors([*args, *kwargs.values()]))


def _by_hand(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether only marks that the user set show that the result is a slice."""
    cuts = map(cut_of, tensors([*args, *kwargs.values()]))
    return all(cut.by_hand for cut in cuts if cut is not None)


def _of_all_ranks(
    func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return the truth value over all ranks; all ranks of the group must call."""
    out = func(*args, **kwargs)
    rule = rules.RULES.get(name)
    if rule is not None:
        with suppress(Touches):
            if (cut := rule(args, kwargs, out)) is not None:
                follow(out, cut)
            return out
    x = tensors([*args, *kwargs.values()])[0]
    # backends reduce no bools, so use uint8
    flags = torch.as_tensor(out, device=x.device).to(torch.uint8)
    flags = primitives.all_reduce(flags, get_group(), ALL_OR_ANY[name]).to(torch.bool)
    return flags if isinstance(out, Tensor) else bool(flags)


def _set_items(func: Callable[..., Any], args: Sequence[Any]) -> None:
    """Run `x[index] = value`, where x or value is split; x gets the mark of value.

    Raises:
        LayoutError: the index selects along the split dim, or both are split in different ways.
    """
    x, index, value = args
    cut, value_cut = cut_of(x), cut_of(value)
    if value_cut is not None and cut is None:
        cut = _cut_for(x, index, value, value_cut)
    elif cut is not None:
        try:
            indexed_cut = rules.kept_at(x.dim(), cut, index)
        except Touches:
            raise refusal("setitem", args, {}) from None
        if value_cut not in (None, indexed_cut):
            raise refusal("setitem", args, {})
    func(*args)
    if cut is not None and cut_of(x) is None:
        _mark_memory(x, cut, "setitem", args, {})
        follow(x, replace(cut, by_hand=_by_hand(args, {})))


def _cut_for(x: Tensor, index: Any, value: Tensor, value_cut: Cut) -> Cut | None:
    """Return the cut that an unmarked `x` gets from the slice `value` at `index`.

    None: `x` stays unmarked, as it has the full length and takes this rank's slice at its position.
    """
    behind = value_cut.dim - value.dim()
    num_dims = x[index].dim()
    for dim in range(x.dim()):
        with suppress(Touches):
            indexed_cut = rules.kept_at(x.dim(), Cut(dim, value_cut.length), index)
            if indexed_cut.dim - num_dims == behind and x.shape[dim] == value.shape[value_cut.dim]:
                return Cut(dim, value_cut.length)
    if value_cut.length in x.shape and value_cut.length != value.shape[value_cut.dim]:
        return None
    raise refusal("setitem", (x, index, value), {})


def _mark_memory(
    x: Tensor, cut: Cut, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Mark the base of the view `x` too, as writing to `x` wrote to it."""
    base = x._base
    if base is None or cut_of(base) is not None or isinstance(base, nn.Parameter):
        return
    dims = [
        dim
        for dim in range(base.dim())
        if (base.stride(dim), base.shape[dim]) == (x.stride(cut.dim), x.shape[cut.dim])
    ]
    if len(dims) != 1:
        raise refusal(name, args, kwargs)
    follow(base, replace(cut, dim=dims[0]))


def _own_draws(args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[None]:
    device = tensors([*args, *kwargs.values()])[0].device
    return differ(get_rank(), device)


class SplitParameter(nn.Parameter):
    """A parameter of a user's own layer that keeps its mark when it is copied or pickled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            twin = super().__deepcopy__(memo)
            set_attribute(twin, getattr(self, MARK, None), getattr(self, ORDER, 0))
            memo[id(self)] = twin
        return memo[id(self)]

    def __reduce_ex__(self, proto: Any) -> Any:
        plain = nn.Parameter(self.data, self.requires_grad)
        return plain.__reduce_ex__(proto)


marked_parameters: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
"""Marked parameters by id; `shard_init_helper_` finds the parameter of a `.data` here."""


def set_attribute(tensor: Tensor, value: object = None, order_type: int = 0) -> None:
    """Mark `tensor` itself as split along `value`; None: it is not split.

    Raises:
        ValueError: `tensor` is not a tensor, `value` no dim of it (of a parameter: none of 1, -1,
            0), nor None or "None", or `order_type` is neither 0 nor 1. Then nothing is marked.
    """
    _check_mark(tensor, value, order_type)
    if isinstance(tensor, nn.Parameter):
        if type(tensor) is nn.Parameter and getattr(tensor, MARK, None) is None:
            tensor.__class__ = SplitParameter
        note(tensor, value, order_type)
    elif value in LAST and tensor.dim():
        last = tensor.dim() - 1
        cut = cut_of(tensor)
        if cut is not None and cut.dim == last:
            tensor.__dict__["_mark"] = (
                value  # keep the cut: it knows the full length, even of uneven slices
            )
        else:
            mark(tensor, last, value=value, by_hand=True)
    else:
        if isinstance(tensor, SplitTensor):
            tensor.__class__ = FakeTensor if isinstance(tensor, FakeTensor) else Tensor
            del tensor.__dict__["_cut"], tensor.__dict__["_mark"]
        setattr(tensor, MARK, value)
        setattr(tensor, ORDER, order_type)


def _check_mark(tensor: Tensor, value: object, order_type: object) -> None:
    check_tensors("a mark 'parallel_dim'", tensor=tensor)
    valid_dims = (0, *LAST)
    if not isinstance(tensor, nn.Parameter):
        valid_dims = (*valid_dims, *range(-tensor.dim(), tensor.dim()))
    wrong: list[str] = []
    if (
        value is not None
        and value != "None"
        and (type(value) is not int or value not in valid_dims)
    ):
        wrong.append(
            f"the mark {value!r} does not fit a tensor of shape {tuple(tensor.shape)}; use None or "
            f"one of {', '.join(map(str, sorted({*valid_dims})))}"
        )
    if type(order_type) is not int or order_type not in (0, 1):
        wrong.append(f"order_type {order_type!r}; use 0 for a weight (out, in), 1 for (in, out)")
    if wrong:
        raise ValueError("; ".join(wrong))


def note(parameter: nn.Parameter, value: object, order_type: int = 0) -> None:
    """Set both attributes of a parameter without changing its class."""
    setattr(parameter, MARK, value)
    setattr(parameter, ORDER, order_type)
    marked_parameters[id(parameter)] = parameter


def mark(
    x: Tensor, dim: int, length: int | None = None, value: object = -1, by_hand: bool = False
) -> Tensor:
    """Mark `x` as split along `dim`, and return it.

    length: of `dim` over all ranks; by default slices are equal.
    """
    if length is None:
        length = x.shape[dim] * get_group_size()
    if type(x) is Tensor:
        x.__class__ = SplitTensor
    elif type(x) is FakeTensor:
        x.__class__ = SplitFakeTensor
    if isinstance(x, SplitTensor):
        x.__dict__.update(_cut=Cut(dim, length, by_hand=by_hand), _mark=value)
    else:
        setattr(x, MARK, value)
    return x


def follow(x: Tensor, cut: Cut) -> None:
    """Mark the result of an operation with its cut."""
    mark(x, cut.dim)
    if isinstance(x, SplitTensor):
        x.__dict__["_cut"] = cut


def refuse_strict_export(layer: nn.Module) -> None:
    """Refuse a strict export: it runs dynamo, whose graphs lose the mark of a tensor.

    Raises:
        LayoutError: torch.export runs dynamo.
    """
    if torch.compiler.is_exporting() and torch.compiler.is_dynamo_compiling():
        raise LayoutError(
            f"torch.export.export(strict=True) cannot follow which tensors {type(layer).__name__} "
            f"has split; leave strict out, or set it to False"
        )


def unmarked(x: Tensor) -> Tensor:
    """Return a plain tensor of the same values; autograd takes it for a view of `x`."""
    if not isinstance(x, SplitTensor):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.view(x.shape)


def register_parallel_attribute(param: Tensor, value: object = None, order_type: int = 0) -> None:
    """Mark `param` itself; see `set_attribute`."""
    set_attribute(param, value, order_type)


def register_parallel_dim(tensor: Tensor, value: object = None) -> None:
    """Mark `tensor` itself, with order 0."""
    set_attribute(tensor, value)


def get_parallel_dim(tensor: Tensor) -> Any:
    """Return the mark of a tensor, or None."""
    return getattr(tensor, MARK, None)


def weight_dim(parameter: Tensor) -> int | None:
    """Return the split dim of a marked parameter, or None."""
    value = getattr(parameter, MARK, None)
    num_dims = len(parameter.shape)
    if value not in (0, *LAST) or isinstance(value, bool) or not num_dims:
        return None
    first = value in LAST
    if getattr(parameter, ORDER, 0) == 1:
        first = not first
    if num_dims == 1:
        return 0 if first else None
    return 0 if first else 1

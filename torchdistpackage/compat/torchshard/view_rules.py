"""Where the split dim of an activation is after a view, an index, or another order of its dims."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.compat.torchshard.cuts import (
    Args,
    Cut,
    Kwargs,
    Rule,
    Touches,
    argument,
    cut_of,
    dims_of,
    first_of,
)


def reshaped(by_sizes: bool) -> Rule:
    """A view by another shape, where the split dim is the outermost of those it is joined with.

    by_sizes: the sizes are arguments, which say by -1 what depends on the number of ranks.
    """

    def rule(args: Args, kwargs: Kwargs, out: Any) -> Cut:
        x, cut = args[0], cut_of(args[0])
        if cut is None:
            raise Touches
        before, shape = math.prod(x.shape[: cut.dim]), tuple(out.shape)
        places = [j for j in range(len(shape)) if math.prod(shape[:j]) == before]
        asked = _asked(places, x, cut, args, shape) if by_sizes else []
        for j in [*asked, *reversed(places)]:
            below = math.prod(shape[j + 1 :])
            length, rest = divmod(cut.length * math.prod(x.shape[cut.dim + 1 :]), max(below, 1))
            if not rest:
                return Cut(j, length, loose=j + 1 in places and shape[j] == 1)
        raise Touches

    return rule


def _asked(places: list[int], x: Tensor, cut: Cut, args: Args, shape: tuple[int, ...]) -> list[int]:
    """Places, all but the last of them 1 long, where the split dim may be, best first.

    Where it was, or where -1 is; else in front of the last: (N, S, 1 head, 24) by numbers.
    """
    sizes = args[1:]
    if sizes and isinstance(sizes[-1], list | tuple):  # in one argument, of unflatten behind a dim
        sizes = [*[0] * (args[1] % x.dim() if len(args) == 3 else 0), *sizes[-1]]
    asked = [j for j, size in enumerate(sizes) if type(size) is int and size == -1]
    if cut.dim in places and shape[: cut.dim + 1] == tuple(x.shape[: cut.dim + 1]):
        asked.insert(0, cut.dim)
    if len(places) > 1 and cut.dim:
        asked.append(places[-2])
    return [j for j in asked if j in places]


def moved(order: Callable[[Tensor, Args, Kwargs], Sequence[int]]) -> Rule:
    def rule(args: Args, kwargs: Kwargs, out: Any) -> Cut:
        x, cut = first_of(args, kwargs)
        places = [d % x.dim() for d in order(x, args, kwargs)]
        return Cut(places.index(cut.dim), cut.length)

    return rule


def swapped(x: Tensor, first: int, second: int) -> list[int]:
    order = list(range(x.dim()))
    order[first], order[second] = order[second], order[first]
    return order


def swapped_arguments(x: Tensor, args: Args, kwargs: Kwargs) -> list[int]:
    names = ("dim0", "dim1")
    return swapped(x, *(argument(args, kwargs, at + 1, name) for at, name in enumerate(names)))


def permutation(x: Tensor, args: Args, kwargs: Kwargs) -> Sequence[int]:
    dims = args[1:] or (kwargs["dims"],)
    return dims[0] if isinstance(dims[0], list | tuple) else dims


def unsqueeze(args: Args, kwargs: Kwargs, out: Any) -> Cut:
    _, cut = first_of(args, kwargs)
    dim = argument(args, kwargs, 1, "dim") % out.dim()
    return Cut(cut.dim + (dim <= cut.dim), cut.length)


def squeeze(args: Args, kwargs: Kwargs, out: Any) -> Cut:
    x, cut = first_of(args, kwargs)
    dim = argument(args, kwargs, 1, "dim")
    gone = {d for d in (range(x.dim()) if dim is None else dims_of(x, dim)) if x.shape[d] == 1}
    if cut.dim in gone:
        raise Touches
    return Cut(cut.dim - sum(d < cut.dim for d in gone), cut.length)


def expand(args: Args, kwargs: Kwargs, out: Any) -> Cut:
    x, cut = args[0], cut_of(args[0])
    if cut is None or out.shape[(dim := cut.dim - x.dim())] != x.shape[dim]:
        raise Touches
    return Cut(dim + out.dim(), cut.length)


def one_less(args: Args, kwargs: Kwargs, out: Any) -> Cut:
    """`select` and `unbind`: one dim goes."""
    x, cut = first_of(args, kwargs)
    (dim,) = dims_of(x, argument(args, kwargs, 1, "dim", 0))
    if dim == cut.dim:
        raise Touches
    return Cut(cut.dim - (dim < cut.dim), cut.length)


def indexed(args: Args, kwargs: Kwargs, out: Any) -> Cut:
    """`x[...]` with whole numbers, slices, None and ..., or one tensor in front."""
    x, cut = args[0], cut_of(args[0])
    index = args[1]
    if cut is None:
        raise Touches
    if isinstance(index, Tensor):
        covered = index.dim() if index.dtype in (torch.bool, torch.uint8) else 1
        if cut.dim < covered or cut_of(index) is not None:
            raise Touches
        made = 1 if index.dtype in (torch.bool, torch.uint8) else index.dim()
        return Cut(cut.dim - covered + made, cut.length)
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(i is None or i is Ellipsis or type(i) in (int, slice) for i in items):
        raise Touches
    used = sum(i is not None and i is not Ellipsis for i in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    at, made = 0, 0
    for item in items:
        if item is None:
            made += 1
            continue
        for _ in range(x.dim() - used if item is Ellipsis else 1):
            kept = item is Ellipsis or item == slice(None)
            if at == cut.dim:
                if not kept:
                    raise Touches
                return Cut(made, cut.length)
            made += kept or isinstance(item, slice)
            at += 1
    raise Touches

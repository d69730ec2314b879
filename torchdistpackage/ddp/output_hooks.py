"""Hooks on whatever a forward returns, so that somebody is told when a backward reaches it.

One rule: what is found is replaced only where it must be, in copies of the containers that hold it,
and nothing is left behind on tensors and containers that live longer than the forward.
"""

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from operator import is_, setitem
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.distributions import Distribution

BackwardStartHook = Callable[[Tensor], None]


def on_backward_start(outputs: object, hook: BackwardStartHook) -> object:
    """The same outputs; `hook(gradient)` runs when a backward comes to one of their tensors.

    outputs: as `map_tensors` has them. Where no tensor requires a gradient, each is replaced by
    one that does, though nothing behind it gets any; otherwise those stay as they are.
    """
    place = _hooked if any(x.requires_grad for x in tensors_in(outputs)) else _anchored
    return map_tensors(outputs, partial(place, hook))


def tensors_in(outputs: object) -> list[Tensor]:
    """All that `map_tensors` finds."""
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    map_tensors(outputs, note)
    return found


def _hooked(hook: BackwardStartHook, output: Tensor) -> Tensor:
    if output.requires_grad:
        # a parameter that is returned is there in the next forward too, its hooks would add up
        output = output.view_as(output) if output.is_leaf else output
        output.register_hook(hook)
    return output


def _anchored(hook: BackwardStartHook, output: Tensor) -> Tensor:
    if output.is_floating_point() or output.is_complex():
        output = _GraphAnchor.apply(output, torch.empty(0, requires_grad=True))
        output.register_hook(hook)
    return output


class _GraphAnchor(torch.autograd.Function):
    """Identity that puts a tensor into the graph though nothing in it wants a gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, anchor: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, None


def map_tensors(value, apply: Callable[[Tensor], Tensor]):
    """`apply` on every tensor inside tuples, lists, dicts, dataclasses, SimpleNamespace and
    torch.distributions, in any nest; other values as they are.

    A container in which `apply` replaces a tensor becomes a copy of its own class with the new
    one: the caller's may be its cache. One in which nothing is replaced is returned itself.
    """
    if isinstance(value, Tensor):
        return apply(value)
    if isinstance(value, tuple | list):
        mapped = [map_tensors(item, apply) for item in value]
        if all(map(is_, mapped, value)):
            return value
        if isinstance(value, list):
            new = copy(value)
            new[:] = mapped
            return new
        make = type(value)._make if hasattr(value, "_make") else type(value)
        return make(mapped)
    if isinstance(value, dict):
        return _replaced(value, value.items(), apply, setitem)
    if is_dataclass(value) and not isinstance(value, type):
        items = ((f.name, getattr(value, f.name)) for f in fields(value) if hasattr(value, f.name))
        return _replaced(value, items, apply, object.__setattr__)
    if isinstance(value, SimpleNamespace | Distribution):
        return _replaced(value, vars(value).items(), apply, object.__setattr__)
    return value


def _replaced(value, items: Iterable, apply: Callable[[Tensor], Tensor], put: Callable):
    """`value`, or its copy in which `put` has set those items that `apply` replaced."""
    changed = [(k, new) for k, item in items if (new := map_tensors(item, apply)) is not item]
    if changed:
        value = copy(value)
    for key, new in changed:
        put(value, key, new)
    return value

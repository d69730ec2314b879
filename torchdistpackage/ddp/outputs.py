"""Hooks on whatever a forward returns, so that somebody is told when a backward reaches it.

One rule: what is found is replaced only where it must be, and nothing is left behind on tensors
that live longer than the forward.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.distributions import Distribution

Hook = Callable[[Tensor], None]


def hook_outputs(outputs: object, hook: Hook) -> object:
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


def _hooked(hook: Hook, output: Tensor) -> Tensor:
    if output.requires_grad:
        # a parameter that is returned is there in the next forward too, its hooks would add up
        output = output.view_as(output) if output.is_leaf else output
        output.register_hook(hook)
    return output


def _anchored(hook: Hook, output: Tensor) -> Tensor:
    if output.is_floating_point() or output.is_complex():
        output = _Anchor.apply(output, torch.empty(0, requires_grad=True))
        output.register_hook(hook)
    return output


class _Anchor(torch.autograd.Function):
    """Identity that puts a tensor into the graph though nothing in it wants a gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, anchor: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, None


def map_tensors(value, apply: Callable[[Tensor], Tensor]):
    """`apply` on every tensor inside tuples, lists, dicts, dataclasses, SimpleNamespace and
    torch.distributions, in any nest; other values as they are."""
    if isinstance(value, Tensor):
        return apply(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(v, apply) for v in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(v, apply) for v in value)
    if isinstance(value, dict):
        _map_items(value, apply)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            item = getattr(value, field.name)
            if (mapped := map_tensors(item, apply)) is not item:
                object.__setattr__(value, field.name, mapped)
    elif isinstance(value, SimpleNamespace | Distribution):
        _map_items(vars(value), apply)
    return value


def _map_items(items: dict, apply: Callable[[Tensor], Tensor]) -> None:
    for key, item in items.items():
        items[key] = map_tensors(item, apply)

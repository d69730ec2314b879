"""Hooks on whatever a forward returns, so that somebody is told when a backward reaches it."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial

import torch
from torch import Tensor

Hook = Callable[[Tensor], None]


def hook_outputs(outputs: object, hook: Hook) -> object:
    """The same outputs; `hook(gradient)` runs when a backward comes to one of their tensors.

    outputs: a tensor, or tuples, lists, dicts and dataclasses of them; other values pass. A
    tensor that does not require a gradient is replaced by one that does, though nothing behind it
    gets any.
    """
    return map_tensors(outputs, partial(_hooked, hook))


def _hooked(hook: Hook, output: Tensor) -> Tensor:
    if not output.is_floating_point() and not output.is_complex():
        return output
    if not output.requires_grad:
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
    """`apply` on every tensor inside tuples, lists and dicts; other values as they are."""
    if isinstance(value, Tensor):
        return apply(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(v, apply) for v in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(v, apply) for v in value)
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = map_tensors(item, apply)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            item = getattr(value, field.name)
            if (mapped := map_tensors(item, apply)) is not item:
                object.__setattr__(value, field.name, mapped)
    return value

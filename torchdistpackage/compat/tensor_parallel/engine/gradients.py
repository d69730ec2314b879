"""Gradients of what several ranks hold, joined in hooks.

Every shard that works on from a replicated tensor leaves a partial gradient on what it holds
(actions.py). These functions make of the partial gradients, in the backward itself, the gradient
that the unsplit module would have, on every shard that holds the parameter.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.compat.tensor_parallel.engine.actions import StateAction, Whole


def needs_joining(action: StateAction, full_gradients: bool) -> bool:
    """Return whether the gradient that autograd leaves on a part still needs joining."""
    if type(action) is Whole:
        return not full_gradients
    return action.is_shared or type(action).local_gradient is not StateAction.local_gradient


class GradientHooks:
    """Hooks on the parameters of the shard of this process that join gradients over `group`.

    A hook stays with its parameter, and parameters may be replaced or unfrozen, so `ensure` is
    called before each forward.
    """

    def __init__(self, group: Group):
        self.group = group
        self._hooked: dict[int, nn.Parameter] = {}

    def ensure(self, parameters: Iterable[tuple[nn.Parameter, StateAction]]) -> None:
        """Hook those that need it and have no hook yet."""
        for parameter, action in parameters:
            if parameter.requires_grad and self._hooked.get(id(parameter)) is not parameter:
                self._hooked[id(parameter)] = parameter
                parameter.register_hook(self._hook(action))

    def _hook(self, action: StateAction) -> Callable[[Tensor], Tensor]:
        group, rank = self.group, self.group.rank()

        def hook(grad: Tensor) -> Tensor:
            if not action.is_shared:
                return action.local_gradient(grad, rank)
            total = collectives.all_reduce(action.spread(grad, rank).clone(), group)
            return action.collect(total, rank)

        return hook

    def __deepcopy__(self, memo: dict[int, object]) -> "GradientHooks":
        return GradientHooks(self.group)  # copies of parameters have no hooks


class FromFirst(torch.autograd.Function):
    """An output that all ranks hold equally. In its backward rank 0 passes its gradient on, and the
    others pass zeros.

    The sum over ranks, wherever the backward takes it, then has the gradient once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_first: bool) -> Tensor:
        ctx.is_first = is_first
        return own_of_caller(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad if ctx.is_first else torch.zeros_like(grad), None


def own_of_caller(x: Tensor) -> Tensor:
    """Return an output for the forward of a Function to return, which the caller may change in
    place.

    It has the memory of `x`, and with it its version, by which autograd sees changes of what a
    backward needs. A leaf or a view has memory that others read under other names: it is copied.
    """
    return x.clone() if x.is_leaf or x._is_view() else x.detach()

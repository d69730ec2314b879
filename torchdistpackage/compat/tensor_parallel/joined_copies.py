"""Gradients of what several shards in threads hold, joined in the graph.

Of ranks they are joined in hooks (engine/gradients.py), as each has a graph of its own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.compat.tensor_parallel.engine.actions import StateAction
from torchdistpackage.compat.tensor_parallel.rendezvous import sums


class JoinedCopies(torch.autograd.Function):
    """The copies of one parameter that the shards of this process hold, each for its shard."""

    @staticmethod
    def forward(ctx: Any, action: StateAction, *copies: Tensor) -> tuple[Tensor, ...]:
        ctx.action = action
        return tuple(copy.view_as(copy) for copy in copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *joined(ctx.action, grads))


def joined(action: StateAction, grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient for each rank, from the partial ones of all."""
    if not action.is_shared:
        return [action.local_gradient(grad, rank) for rank, grad in enumerate(grads)]
    totals = sums(*(action.spread(grad, rank) for rank, grad in enumerate(grads)))
    return [action.collect(total, rank) for rank, total in enumerate(totals)]

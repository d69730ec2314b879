"""easy-model-parallel's `to_rank_fn` and the nodes that stand in the graphs of other ranks.

One rule: each call is made by all ranks, and so is the backward through it. In a placed program
(`parallel.placed`) transfers are in one order on all ranks; here they are in that of autograd.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Module

from torchdistpackage.comm.creation import is_joined, world
from torchdistpackage.compat.emp.messages import check_rank, receive_tensor, send_tensor

log = logging.getLogger(__name__)


class EmptyFunction(Function):
    """A zero that stands for what another rank computed; its gradients are zeros."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in inputs]
        return torch.zeros([])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return tuple(torch.zeros(s, dtype=dtype, device=at) for s, dtype, at in ctx.like)


def empty_fn(*args: Any) -> Tensor:
    """A zero in whose graph these tensors are."""
    return EmptyFunction.apply(*args)  # type: ignore[return-value]


class EmptyModule(Module):
    """Stands for a module on ranks that do not hold it."""

    def get_grad_tensors(self, args: Any) -> list[Tensor]:
        """The tensors in nested arguments that want a gradient."""
        return list(self._iter_grad_tensors(args))

    def _iter_grad_tensors(self, x: Any) -> Iterator[Tensor]:
        if isinstance(x, Tensor):
            if x.requires_grad:
                yield x
        elif isinstance(x, list | tuple | dict):
            for part in x.values() if isinstance(x, dict) else x:
                yield from self._iter_grad_tensors(part)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """A zero in whose graph the arguments are."""
        return empty_fn(*self.get_grad_tensors((args, kwargs)))


class ToRankFunction(Function):
    """See `to_rank_fn`."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, src_rank: int, dst_rank: int, tag: int, dummy: Tensor
    ) -> Tensor:
        rank = world().rank() if is_joined() else 0
        ctx.like = (input.shape, input.dtype, input.device)
        ctx.source, ctx.target, ctx.tag, ctx.rank = src_rank, dst_rank, tag, rank
        if src_rank == dst_rank:
            return input.clone()
        if rank == src_rank:
            send_tensor(input, dst_rank, tag=tag)
        elif rank == dst_rank:
            return receive_tensor(src_rank, tag=tag)
        return torch.zeros([])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (gradient,) = grad_outputs
        shape, dtype, device = ctx.like
        if ctx.source == ctx.target:
            return gradient, None, None, None, None
        found = torch.zeros(shape, dtype=dtype, device=device)
        if ctx.rank == ctx.source:
            log.debug("receiving a gradient %s from rank %d", tuple(shape), ctx.target)
            found = receive_tensor(ctx.target, tag=ctx.tag).to(device)
        elif ctx.rank == ctx.target:
            log.debug("sending a gradient %s to rank %d", tuple(gradient.shape), ctx.source)
            send_tensor(gradient, ctx.source, tag=ctx.tag)
        return found, None, None, None, None


def to_rank_fn(input: Tensor, src_rank: int, tgt_rank: int, tag: int = 0) -> Tensor:
    """`input` of rank `src_rank` on rank `tgt_rank`, elsewhere a zero; all ranks call it.

    In the backward the gradient goes back. A dtype without gradients goes one way.

    Raises:
        PlacementError: on all ranks: one of both is no rank of the world.
    """
    for rank in (src_rank, tgt_rank):
        check_rank("to_rank_fn", rank)
    dummy = torch.empty([], requires_grad=input.is_floating_point() or input.is_complex())
    return ToRankFunction.apply(input, src_rank, tgt_rank, tag, dummy)  # type: ignore[return-value]

"""Collectives that autograd can see, each beside its transpose.

forward          backward         where
copy             all-reduce       replicated input of a column-split product
reduce           identity         partial output of a row-split product
all_gather       reduce-scatter   sequence-split input of a column-split product
reduce_scatter   all-gather       sequence-split output of a row-split product
split            all-gather       replicated tensor of which each rank goes on with its part
join             slice            parts to a whole that every rank then uses alike
all_to_all       all_to_all       heads split <-> sequence split

None works in place on what autograd holds, none reads global state: the group is an argument.
`all_gather` sums the gradients of all ranks, which each saw the whole in a part of the
work of their own; `join` takes mine, because all ranks go on with the same work.
"""

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import LayoutError


def copy(x: Tensor, group: Group) -> Tensor:
    """x itself; its gradient is summed over the group."""
    return x if group.size() == 1 else _Copy.apply(x, group)


def reduce(x: Tensor, group: Group) -> Tensor:
    """Sum of x over the group; the gradient passes unchanged."""
    return x if group.size() == 1 else _Reduce.apply(x, group)


def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Join the shards of the group along `dim`; gradients are summed and scattered back.

    x (..., n, ...) -> (..., n * size, ...), in group order.
    """
    return x if group.size() == 1 else _AllGather.apply(x, dim, group)


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """My part, along `dim`, of the sum over the group; gradients are gathered.

    x (..., n * size, ...) -> (..., n, ...).

    Raises:
        LayoutError: the dim is not a multiple of the group's size.
    """
    return x if group.size() == 1 else _ReduceScatter.apply(x, dim, group)


def split(x: Tensor, dim: int, group: Group) -> Tensor:
    """My part of x along `dim`; gradients are gathered.

    x (..., n * size, ...), equal on all ranks -> (..., n, ...).

    Raises:
        LayoutError: the dim is not a multiple of the group's size.
    """
    return x if group.size() == 1 else _Split.apply(x, dim, group)


def join(x: Tensor, dim: int, group: Group) -> Tensor:
    """Join the shards along `dim`; the gradient of my part passes back. Transpose of `split`."""
    return x if group.size() == 1 else _Join.apply(x, dim, group)


def all_to_all(x: Tensor, split_dim: int, join_dim: int, group: Group) -> Tensor:
    """Cut `split_dim` among the ranks and join `join_dim`; the transpose swaps the two.

    x (..., a * size, ..., b, ...) -> (..., a, ..., b * size, ...).

    Raises:
        LayoutError: `split_dim` is not a multiple of the group's size.
    """
    return x if group.size() == 1 else _AllToAll.apply(x, split_dim, join_dim, group)


def _gather(x: Tensor, dim: int, group: Group) -> Tensor:
    if dim == 0:
        return primitives.all_gather(x, group)
    gathered = primitives.all_gather(x.movedim(dim, 0), group)
    return gathered.movedim(0, dim).contiguous()


def _scatter_sum(x: Tensor, dim: int, group: Group) -> Tensor:
    _check(x, dim, group)
    if dim == 0:
        return primitives.reduce_scatter(x, group)
    return primitives.reduce_scatter(x.movedim(dim, 0), group).movedim(0, dim).contiguous()


def _part(x: Tensor, dim: int, group: Group) -> Tensor:
    _check(x, dim, group)
    length = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * length, length).contiguous()


def _exchange(x: Tensor, split_dim: int, join_dim: int, group: Group) -> Tensor:
    _check(x, split_dim, group)
    stacked = torch.stack(x.chunk(group.size(), split_dim))
    received = primitives.all_to_all(stacked, group)
    return torch.cat(received.unbind(0), join_dim)


def _check(x: Tensor, dim: int, group: Group) -> None:
    if x.shape[dim] % group.size():
        raise LayoutError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} has {x.shape[dim]} elements, which "
            f"{group.size()} ranks cannot share evenly; use a multiple of {group.size()}"
        )


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # the incoming gradient may be shared or expanded: reduce a copy
        return primitives.all_reduce(
            grad.clone(memory_format=torch.contiguous_format), ctx.group
        ), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        return primitives.all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _scatter_sum(grad, ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _scatter_sum(x, dim, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _gather(grad, ctx.dim, ctx.group), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _part(x, dim, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _gather(grad, ctx.dim, ctx.group), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _part(grad, ctx.dim, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, split_dim: int, join_dim: int, group: Group) -> Tensor:
        ctx.dims, ctx.group = (split_dim, join_dim), group
        return _exchange(x, split_dim, join_dim, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        split_dim, join_dim = ctx.dims
        return _exchange(grad, join_dim, split_dim, ctx.group), None, None, None

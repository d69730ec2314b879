"""Copies of tensors that ranks hold alike, whose gradients a backward sums over a group.

Of heads that several ranks of a group share each of these has a part of the gradient. The sum runs
over the group that cuts the parameter, every rank putting its part where its heads are in the
whole: that needs no group of its own.

Replicated tensors that are copied together are summed in one message. Between a tensor and its copy
stand two nodes of autograd. The inner one keeps the gradient when it comes. The outer one has the
lowest sequence number, by which autograd runs it after all else that is ready: the first outer node
sums what all inner ones have kept, the others find their part there. All ranks run the same nodes
in the same order, so they keep, and send, alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.autograd import LinearMap, Reduce, apply
from torchdistpackage.comm.creation import PerGroup
from torchdistpackage.comm.primitives import Group
from torchdistpackage.layout.layout import HeadSplit, Layout


def copy_to_sharing(parameter: Tensor, layout: Layout, group: Group) -> Tensor:
    """The parameter itself; its gradient is summed over the ranks that share its heads."""
    heads = layout.heads
    if heads is None or group.size() <= heads.groups:
        return parameter
    return apply(_CopyToSharing(group, heads), parameter)


@dataclass(frozen=True, slots=True)
class _CopyToSharing:
    """Of the ranks that share: replicated to own."""

    group: Group
    heads: HeadSplit

    def __call__(self, x: Tensor) -> Tensor:
        return x.view_as(x)

    def transposed(self) -> LinearMap:
        return _SumOverSharing(self.group, self.heads)


@dataclass(frozen=True, slots=True)
class _SumOverSharing:
    """Of the ranks that share: own to replicated, their sum."""

    group: Group
    heads: HeadSplit

    def __call__(self, x: Tensor) -> Tensor:
        size = self.group.size()
        starts = sorted({self.heads.sharing_indices(size, i).start for i in range(size)})
        mine = starts.index(self.heads.sharing_indices(size, self.group.rank()).start)
        whole = x.new_zeros((len(starts), *x.shape))
        whole[mine] = x
        # a view would keep the others alive
        return primitives.all_reduce(whole, self.group)[mine].clone()

    def transposed(self) -> LinearMap:
        return _CopyToSharing(self.group, self.heads)


def copy_together(xs: Sequence[Tensor], group: Group) -> Sequence[Tensor]:
    """The tensors themselves, of one dim and one dtype; their gradients are summed over the group,
    with those of other such copies where they come in one backward."""
    if group.size() == 1 or not torch.is_grad_enabled():
        return xs
    kept = _Kept(group)
    outer = _Deliver.apply(kept, *xs)
    if (node := outer[0].grad_fn) is None:
        return xs
    if (put_last := getattr(node, "_set_sequence_nr", None)) is not None:
        put_last(0)
    return _Keep.apply(kept, *outer)


class _Kept:
    """Gradients of one copy in one backward.

    parts: as they came. total: their sums over the group, once there.
    """

    __slots__ = ("__weakref__", "group", "parts", "total")

    def __init__(self, group: Group):
        self.group = group
        self.parts: Sequence[Tensor] = ()
        self.total: Sequence[Tensor] = ()


_waiting: PerGroup[list[ref[_Kept]]] = PerGroup()
"""Of graphs that are alive: a backward that failed leaves no more than these. By group, as ranks
may be threads of one process."""


def _sum_all_like(this: _Kept) -> None:
    """The sums of what waits for the group of `this`, in its dtype."""
    together: list[_Kept] = []
    others: list[ref[_Kept]] = []
    for found in _waiting.pop(this.group):
        kept = found()
        if kept is None or not kept.parts:
            continue
        if kept.parts[0].dtype is this.parts[0].dtype:
            together.append(kept)
        else:
            others.append(found)
    _waiting[this.group] = others
    parts = [part for kept in together for part in kept.parts]
    flat = primitives.all_reduce(torch.cat(parts), this.group)
    sums = iter(flat.split_with_sizes([len(part) for part in parts]))
    for kept in together:
        kept.total, kept.parts = [next(sums) for _ in kept.parts], ()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: _Kept, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.kept = kept
        return xs


class _Keep(_Copy):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        if torch.is_grad_enabled():
            whole = apply(Reduce(ctx.kept.group), torch.cat(grads))
            return None, *whole.split_with_sizes([len(grad) for grad in grads])
        if not ctx.kept.parts:  # else it waits already, since a backward that failed
            _waiting.setdefault(ctx.kept.group, []).append(ref(ctx.kept))
        ctx.kept.parts, ctx.kept.total = grads, ()
        return None, *grads


class _Deliver(_Copy):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        kept: _Kept = ctx.kept
        if torch.is_grad_enabled():
            return None, *grads
        if kept.parts:
            _sum_all_like(kept)
        total, kept.total = kept.total, ()
        return None, *total

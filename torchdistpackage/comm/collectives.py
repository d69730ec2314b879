"""Collectives that autograd can see, each beside its transpose.

forward          backward         where
copy             reduce           replicated input of a column-split product
reduce           copy             partial output of a row-split product
scatter          gather           replicated tensor of which each rank goes on with its part
gather           scatter          parts to a whole that every rank then uses alike
all_gather       reduce_scatter   sequence-split input of a column-split product
reduce_scatter   all_gather       sequence-split output of a row-split product
all_to_all       all_to_all       heads split <-> sequence split; tokens to their experts and back
broadcast        sum to source    what one rank made, for all to go on with

A group is a process group or the name of one of tpc's axes. `sizes` are lengths along the dim, one
for each rank of the group and the same on all ranks; without it all are equal. No collective
writes to its input, which a group of one gives back.

`all_gather` sums the gradients of all ranks, which each saw the whole in a part of the
work of their own; `gather` takes mine, because all ranks go on with the same work.

All members call the same operations in the same order, in the backward too: a tensor needs a
gradient on all of them or on none, and what comes out is part of every rank's loss.
"""

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.arguments import (
    Sizes,
    as_dim,
    as_group,
    lengths_of_parts,
    lengths_to_join,
    lengths_to_swap,
)
from torchdistpackage.comm.autograd import (
    AllGather,
    AllToAll,
    Broadcast,
    Gather,
    IdentityForward,
    Reduce,
    ReduceScatter,
    Scatter,
    apply,
)
from torchdistpackage.comm.primitives import Group


def copy(x: Tensor, group: Group | str) -> Tensor:
    """x itself; its gradient is summed over the group.

    Raises:
        CommError: it is not a group that this rank is in.
    """
    return apply(IdentityForward(as_group(group)), x)


def reduce(x: Tensor, group: Group | str) -> Tensor:
    """Sum of x over the group; the gradient passes unchanged.

    Of booleans: whether any is true.

    Raises:
        CommError: it is not a group that this rank is in, or x cannot be summed.
    """
    return apply(Reduce(as_group(group)), x)


def scatter(x: Tensor, dim: int, group: Group | str, sizes: Sizes | None = None) -> Tensor:
    """My part of x along `dim`; gradients are gathered.

    x (..., n, ...), equal on all ranks -> (..., sizes[rank], ...), or n / size without `sizes`.
    Nothing is sent before the backward.

    Raises:
        CommError: it is not a group that this rank is in.
        LayoutError: there is no such dim, or the parts do not add up to it.
    """
    group, dim = as_group(group), as_dim(x, dim)
    return apply(Scatter(group, dim, lengths_of_parts(x, dim, sizes, group)), x)


def gather(x: Tensor, dim: int, group: Group | str, sizes: Sizes | None = None) -> Tensor:
    """Join the parts along `dim`; the gradient of my part passes back. Transpose of `scatter`.

    x (..., sizes[rank], ...) -> (..., sum of sizes, ...), in group order.

    Raises:
        CommError: it is not a group that this rank is in.
        LayoutError: there is no such dim, or x is not as long as `sizes` says.
    """
    group, dim = as_group(group), as_dim(x, dim)
    return apply(Gather(group, dim, lengths_to_join(x, dim, sizes, group)), x)


def all_gather(x: Tensor, dim: int, group: Group | str, sizes: Sizes | None = None) -> Tensor:
    """Join the parts along `dim`; gradients are summed and scattered back.

    x (..., sizes[rank], ...) -> (..., sum of sizes, ...), in group order.

    Raises:
        CommError: it is not a group that this rank is in.
        LayoutError: there is no such dim, or x is not as long as `sizes` says.
    """
    group, dim = as_group(group), as_dim(x, dim)
    return apply(AllGather(group, dim, lengths_to_join(x, dim, sizes, group)), x)


def reduce_scatter(x: Tensor, dim: int, group: Group | str, sizes: Sizes | None = None) -> Tensor:
    """My part, along `dim`, of the sum over the group; gradients are gathered.

    x (..., n, ...) -> (..., sizes[rank], ...), or n / size without `sizes`.

    Raises:
        CommError: it is not a group that this rank is in, or x cannot be summed.
        LayoutError: there is no such dim, or the parts do not add up to it.
    """
    group, dim = as_group(group), as_dim(x, dim)
    return apply(ReduceScatter(group, dim, lengths_of_parts(x, dim, sizes, group)), x)


def all_to_all(
    x: Tensor,
    split_dim: int,
    join_dim: int,
    group: Group | str,
    split_sizes: Sizes | None = None,
    join_sizes: Sizes | None = None,
) -> Tensor:
    """Cut `split_dim` among the ranks and join `join_dim`; the transpose swaps the two.

    x (..., a, ..., b, ...) -> (..., a / size, ..., b * size, ...)
    split_sizes: lengths of the parts of a, of which I get split_sizes[rank]
    join_sizes: the b of all ranks, mine join_sizes[rank]; I get their sum

    Where the two are one dim, each rank has sizes of its own, both or none: what it sends to each
    rank and what it gets from each.

    Raises:
        CommError: it is not a group that this rank is in.
        LayoutError: there is no such dim, or sizes do not fit it or are missing.
    """
    group = as_group(group)
    split_dim, join_dim = as_dim(x, split_dim), as_dim(x, join_dim)
    if split_dim == join_dim:
        sent, joined = lengths_to_swap(x, split_dim, split_sizes, join_sizes, group)
    else:
        sent = lengths_of_parts(x, split_dim, split_sizes, group, "split_sizes")
        joined = lengths_to_join(x, join_dim, join_sizes, group, "join_sizes")
    return apply(AllToAll(group, split_dim, join_dim, sent, joined), x)


def broadcast(x: Tensor, group: Group | str, source: int | None = None) -> Tensor:
    """x of global rank `source` (default: the group's first); gradients are summed there.

    The other ranks pass a tensor of that shape and dtype, whose numbers do not matter; their
    gradients are zero.

    Raises:
        CommError: it is not a group that this rank is in, or `source` is not in it.
    """
    group = as_group(group)
    return apply(Broadcast(group, primitives.source_in(group, source)), x)


def exchange_sizes(x: Tensor, dim: int, group: Group | str) -> tuple[int, ...]:
    """Lengths along `dim` on all ranks of the group, in its order: `sizes` for the functions above.

    The numbers come back to the host, so on CUDA this waits for the device.

    Raises:
        CommError: it is not a group that this rank is in.
        LayoutError: there is no such dim.
    """
    group, length = as_group(group), x.shape[as_dim(x, dim)]
    mine = torch.tensor([length], device=x.device)
    return tuple(primitives.all_gather(mine, group).tolist())

"""Collectives with autograd, each with its transpose.

forward backward where copy reduce replicated input of a column-split matmul reduce copy partial
output of a row-split matmul scatter gather replicated tensor of which each rank uses its slice
gather scatter slices to a full tensor that every rank then uses alike all_gather reduce_scatter
sequence-split input of a column-split matmul reduce_scatter all_gather sequence-split output of a
row-split matmul all_to_all all_to_all heads split <-> sequence split; tokens to their experts and
back broadcast sum to source one rank's tensor, for all ranks to use

A group is a process group or the name of one of tpc's axes. `sizes` are lengths along the dim, one
for each rank of the group and the same on all ranks; without it all are equal. No collective writes
to its input; with a group of one it returns the input. All raise CommError if this rank is not in
the group, and LayoutError if the tensor has no such dim or `sizes` do not fit it.

`all_gather` sums the gradients of all ranks, because each rank used the full tensor in its own
work. `gather` takes this rank's gradient, because all ranks continue with the same work.

All members call the same operations in the same order, in the backward too: a tensor needs a
gradient on all of them or on none, and the result is part of every rank's loss.

The functions below the line are those of primitives.py and p2p.py, which autograd does not see, for
groups and names of axes.
"""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm import p2p, primitives
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
from torchdistpackage.comm.primitives import Group, Sizes, check_sizes, sizes_of_ranks
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError, LaunchError, LayoutError, TopologyError

Given, Result = ParamSpec("Given"), TypeVar("Result")


def copy(x: Tensor, group: Group | str) -> Tensor:
    """Return x; its gradient is summed over the group."""
    return apply(IdentityForward(as_group(group)), x)


def reduce(x: Tensor, group: Group | str) -> Tensor:
    """Return the sum of x over the group; the gradient passes unchanged.

    For booleans the result is true if any is true.

    Raises:
        CommError: x cannot be summed.
    """
    return apply(Reduce(as_group(group)), x)


def scatter(x: Tensor, dim: int, group: Group | str, sizes: Sizes | None = None) -> Tensor:
    """Return this rank's slice of x along `dim`; gradients are gathered.

    x (..., n, ...), equal on all ranks -> (..., sizes[rank], ...), or n / size without `sizes`.
    The forward sends nothing.
    """
    group, dim = as_group(group), as_dim(x, dim)
    return apply(Scatter(group, dim, check_sizes(x, dim, sizes, group, cut=True)), x)


def gather(x: Tensor, dim: int, group: Group | str, sizes: Sizes | None = None) -> Tensor:
    """Join all ranks' slices along `dim`; only this slice's gradient passes back.

    x (..., sizes[rank], ...) -> (..., sum of sizes, ...), in group order.
    """
    group, dim = as_group(group), as_dim(x, dim)
    return apply(Gather(group, dim, check_sizes(x, dim, sizes, group, cut=False)), x)


def all_gather(x: Tensor, dim: int, group: Group | str, sizes: Sizes | None = None) -> Tensor:
    """Join all ranks' slices along `dim`; gradients are summed and scattered back.

    x (..., sizes[rank], ...) -> (..., sum of sizes, ...), in group order.
    """
    group, dim = as_group(group), as_dim(x, dim)
    return apply(AllGather(group, dim, check_sizes(x, dim, sizes, group, cut=False)), x)


def reduce_scatter(x: Tensor, dim: int, group: Group | str, sizes: Sizes | None = None) -> Tensor:
    """Return this rank's slice, along `dim`, of the sum over the group; gradients are gathered.

    x (..., n, ...) -> (..., sizes[rank], ...), or n / size without `sizes`.

    Raises:
        CommError: x cannot be summed.
    """
    group, dim = as_group(group), as_dim(x, dim)
    return apply(ReduceScatter(group, dim, check_sizes(x, dim, sizes, group, cut=True)), x)


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
    split_sizes: lengths of the slices of a; this rank gets split_sizes[rank]
    join_sizes: lengths b of all ranks, this rank's is join_sizes[rank]; it gets their sum

    If the two are the same dim, each rank passes its own sizes, both or none: what it sends to each
    rank and what it receives from each.
    """
    group = as_group(group)
    split_dim, join_dim = as_dim(x, split_dim), as_dim(x, join_dim)
    if split_dim == join_dim:
        sent, joined = lengths_to_swap(x, split_dim, split_sizes, join_sizes, group)
    else:
        sent = check_sizes(x, split_dim, split_sizes, group, cut=True, name="split_sizes")
        joined = check_sizes(x, join_dim, join_sizes, group, cut=False, name="join_sizes")
    return apply(AllToAll(group, split_dim, join_dim, sent, joined), x)


def broadcast(x: Tensor, group: Group | str, source: int | None = None) -> Tensor:
    """Return x of global rank `source` (default: the group's first); gradients are summed there.

    The other ranks pass a tensor of that shape and dtype with any values; their gradients are zero.

    Raises:
        CommError: `source` is not in the group.
    """
    group = as_group(group)
    return apply(Broadcast(group, primitives.source_in(group, source)), x)


def exchange_sizes(x: Tensor, dim: int, group: Group | str) -> tuple[int, ...]:
    """Return the lengths along `dim` on all ranks of the group: `sizes` for the functions above.

    The host reads the numbers, so on CUDA this waits for the device.
    """
    group, length = as_group(group), x.shape[as_dim(x, dim)]
    own_length = torch.tensor([length], device=x.device)
    return tuple(primitives.all_gather(own_length, group).tolist())


# -- not seen by autograd ------------------------------------------------------------------


def by_name(
    operation: Callable[Given, Result], name: str = "", **fixed: bool
) -> Callable[Given, Result]:
    """Return `operation` with `fixed` arguments, which also accepts a name for `group`.

    name: name of the returned function.
    """
    signature = inspect.signature(operation)
    position = list(signature.parameters).index("group")
    may_be_none = signature.parameters["group"].default is None

    def resolved(group):
        return None if group is None and may_be_none else as_group(group)

    @functools.wraps(operation)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if "group" in kwargs:
            kwargs["group"] = resolved(kwargs["group"])
        elif len(args) > position:
            args = (*args[:position], resolved(args[position]), *args[position + 1 :])
        return operation(*args, **kwargs, **fixed)

    call.__name__ = name or operation.__name__
    return call


all_reduce = by_name(primitives.all_reduce)
start_all_reduce = by_name(primitives.start_all_reduce)
start_all_gather = by_name(primitives.all_gather, "start_all_gather", async_op=True)
start_reduce_scatter = by_name(primitives.reduce_scatter, "start_reduce_scatter", async_op=True)
start_all_to_all = by_name(primitives.all_to_all, "start_all_to_all", async_op=True)
start_broadcast = by_name(primitives.broadcast, "start_broadcast", async_op=True)

send = by_name(p2p.send)
receive = by_name(p2p.receive)
start_send = by_name(p2p.start_send)
start_receive = by_name(p2p.start_receive)

ranks_of = by_name(primitives.ranks_of)
barrier = by_name(primitives.barrier)
gather_objects = by_name(primitives.gather_objects)
broadcast_object = by_name(primitives.broadcast_object)


# -- arguments, checked before anything is sent --------------------------------------------
#
# A rank refuses bad arguments at once. Arguments that are equal on all ranks are refused by all of
# them, so no rank is left waiting.


def as_group(group: Group | str) -> Group:
    """Return the group itself, or this rank's group of a tpc axis or mode such as "data" or
    "model".

    An axis that tpc's topology leaves out has one rank a group.

    Raises:
        CommError: this rank is not in the group, the name is unknown, or it is not a group at all.
    """
    if isinstance(group, Group):
        return group
    if isinstance(group, str):
        return _named(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise CommError(
            "this rank is not a member of the group that torch.distributed.new_group() returned; "
            "call this only on members"
        )
    raise CommError(
        f"a group was expected, not {group!r}; pass a process group, or the name of one of tpc's "
        f'axes such as "data"'
    )


def _named(name: str) -> Group:
    """Return this rank's group of a tpc axis or mode."""
    if not tpc.is_set:
        raise CommError(
            f"there is no group {name!r}: tpc is not set up; call "
            f"tpc.setup_process_groups([...]) first, or pass a process group"
        )
    try:
        return tpc.get_group(name)
    except (LaunchError, TopologyError) as error:
        raise CommError(str(error)) from error


def as_dim(x: Tensor, dim: int) -> int:
    """Return `dim` counted from the front.

    Raises:
        LayoutError: `x` has no such dim.
    """
    num_dims = x.dim()
    if not isinstance(dim, int) or not -num_dims <= dim < num_dims:
        advice = f"use {-num_dims} to {num_dims - 1}" if num_dims else "unsqueeze it first"
        raise LayoutError(
            f"there is no dim {dim!r} in a tensor of shape {tuple(x.shape)}, which has {num_dims} "
            f"dims; {advice}"
        )
    return dim % num_dims


def lengths_to_swap(
    x: Tensor, dim: int, split_sizes: Sizes | None, join_sizes: Sizes | None, group: Group
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the lengths sent to and received from each rank, along one dim of `x`.

    Raises:
        LayoutError: one argument is missing, the sizes do not fit `x`, or they disagree about the
            part that stays on this rank.
    """
    sent = check_sizes(x, dim, split_sizes, group, cut=True, name="split_sizes")
    if sent is None and join_sizes is None:
        return None, None
    if sent is None or join_sizes is None:
        raise LayoutError(
            f"split_sizes={split_sizes} and join_sizes={join_sizes} along the one dim {dim}: pass "
            f"both, what goes to each rank and what comes from each, or neither"
        )
    received, rank = sizes_of_ranks(join_sizes, group, "join_sizes"), group.rank()
    if sent[rank] != received[rank]:
        raise LayoutError(
            f"split_sizes={sent} keep {sent[rank]} elements for this rank, number {rank} of its "
            f"group, but join_sizes={received} expect {received[rank]} from it; make them equal"
        )
    return sent, received

"""What a caller hands to a collective, checked before anything is sent.

One rule: what a rank can see for itself is refused at once, with its numbers. Whatever all ranks
were given alike is then refused by all of them alike, so nobody is left waiting.
"""

import operator
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError, LaunchError, LayoutError, TopologyError

Sizes = Sequence[int]
"""Lengths along one dim, one for each rank of a group, in its order; some may be 0."""


def as_group(group: Group | str) -> Group:
    """The group itself, or mine of an axis or mode of tpc: "data", "model", "global", ...

    An axis that tpc's topology leaves out has one rank a group.

    Raises:
        CommError: this rank is not in it, there is no such name, or it is no group at all.
    """
    if isinstance(group, Group):
        return group
    if isinstance(group, str):
        return _named(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise CommError(
            "this rank is not in the group, as torch.distributed.new_group() told it; "
            "let only the members call"
        )
    raise CommError(
        f"a group was expected, not {group!r}; pass a process group, or the name of one of tpc's "
        f'axes such as "data"'
    )


def _named(name: str) -> Group:
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
    """`dim` of `x`, counted from the front.

    Raises:
        LayoutError: there is no such dim.
    """
    num_dims = x.dim()
    if not isinstance(dim, int) or not -num_dims <= dim < num_dims:
        known = f"use {-num_dims} to {num_dims - 1}" if num_dims else "unsqueeze it first"
        raise LayoutError(
            f"there is no dim {dim!r} in a tensor of shape {tuple(x.shape)}, which has {num_dims} "
            f"dims; {known}"
        )
    return dim % num_dims


def lengths_of_parts(
    x: Tensor, dim: int, sizes: Sizes | None, group: Group, name: str = "sizes"
) -> tuple[int, ...] | None:
    """`sizes`, into which `dim` of `x` is cut; None stays None: equal parts.

    Raises:
        LayoutError: they do not add up to the length, or equal parts do not.
    """
    length = x.shape[dim]
    if sizes is None:
        if length % group.size():
            raise LayoutError(
                f"{_place(x, dim)} elements, which {group.size()} ranks cannot share evenly; use a "
                f"multiple of {group.size()}, or pass {name}=, the length of each rank's part"
            )
        return None
    known = _lengths(sizes, group, name)
    if sum(known) != length:
        raise LayoutError(
            f"{_place(x, dim)} elements, but {name}={known} add up to {sum(known)}; "
            f"pass lengths that add up to {length}"
        )
    return known


def lengths_to_join(
    x: Tensor, dim: int, sizes: Sizes | None, group: Group, name: str = "sizes"
) -> tuple[int, ...] | None:
    """`sizes`, of which mine is that of `x` along `dim`; None stays None: all are like mine.

    Raises:
        LayoutError: mine is another.
    """
    if sizes is None:
        return None
    known, rank = _lengths(sizes, group, name), group.rank()
    if known[rank] != x.shape[dim]:
        raise LayoutError(
            f"{_place(x, dim)} elements, but {name}={known} give {known[rank]} to this rank, "
            f"number {rank} of its group; pass what each rank holds, as exchange_sizes() finds it"
        )
    return known


def lengths_to_swap(
    x: Tensor, dim: int, split_sizes: Sizes | None, join_sizes: Sizes | None, group: Group
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """What goes to each rank and what comes from each, along one and the same dim of `x`.

    Raises:
        LayoutError: one is missing, they do not fit `x`, or differ in what stays here.
    """
    sent = lengths_of_parts(x, dim, split_sizes, group, "split_sizes")
    if sent is None and join_sizes is None:
        return None, None
    if sent is None or join_sizes is None:
        raise LayoutError(
            f"split_sizes={split_sizes} and join_sizes={join_sizes} along the one dim {dim}: pass "
            f"both, what goes to each rank and what comes from each, or neither"
        )
    received, rank = _lengths(join_sizes, group, "join_sizes"), group.rank()
    if sent[rank] != received[rank]:
        raise LayoutError(
            f"split_sizes={sent} keep {sent[rank]} elements for this rank, number {rank} of its "
            f"group, but join_sizes={received} expect {received[rank]} from it; make them equal"
        )
    return sent, received


def _lengths(sizes: Sizes, group: Group, name: str) -> tuple[int, ...]:
    try:
        known = tuple(map(operator.index, sizes))
    except TypeError as error:
        raise LayoutError(f"{name}={sizes!r}: pass one whole number for each rank") from error
    if len(known) != group.size() or any(length < 0 for length in known):
        raise LayoutError(
            f"{name}={known} for a group of {group.size()} ranks; "
            f"pass one length for each of them, 0 or more"
        )
    return known


def _place(x: Tensor, dim: int) -> str:
    return f"dim {dim} of a tensor of shape {tuple(x.shape)} has {x.shape[dim]}"

"""A tensor of the whole sequence into parts and back, each the transpose of the other."""

import torch
from torch import Tensor

from torchdistpackage.comm import collectives
from torchdistpackage.comm.collectives import as_dim
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.parallel.context.agreement import agree
from torchdistpackage.parallel.context.order import OrderName, SequenceOrder, order_of
from torchdistpackage.parallel.context.parts import by_position, by_rank


def shard_sequence(
    x: Tensor, dim: int, *, order: OrderName = "zigzag", group: Group | None = None
) -> Tensor:
    """This rank's part of `x` along `dim`, which is equal on all ranks; gradients are gathered.

    x (..., S, ...) -> (..., S_local, ...), the chunks i and 2n - 1 - i of 2n in zigzag order; their
    lengths differ by at most 1. Nothing is sent before the backward.

    Raises:
        LayoutError: S is shorter than the number of chunks.
    """
    group, dim = resolve_group(group, "context"), as_dim(x, dim)
    held = SequenceOrder(x.shape[dim], group.size(), order)
    return collectives.scatter(by_rank(x, dim, held), dim, group, held.lengths)


def gather_sequence(
    x: Tensor,
    dim: int,
    *,
    order: OrderName = "zigzag",
    seq_len: int | None = None,
    group: Group | None = None,
) -> Tensor:
    """The whole, equal on all ranks, of which `x` is this rank's part; the gradient of my part
    passes back.

    x (..., S_local, ...) -> (..., S, ...), in the order of positions.
    seq_len: S; None: the ranks ask each other.

    Raises:
        LayoutError: the ranks' parts are of no sequence; on all of them, with what each holds.
    """
    group, dim = resolve_group(group, "context"), as_dim(x, dim)
    if seq_len is None:
        lengths = agree({"positions": x.shape[dim], "dims": x.dim()}, group)
    else:
        known = list(SequenceOrder(seq_len, group.size(), order).lengths)
        known[group.rank()] = x.shape[dim]
        lengths = tuple(known)
    held = order_of(lengths, order, ranks_of(group))
    return by_position(collectives.gather(x, dim, group, lengths), dim, held)


def sequence_positions(
    seq_len: int,
    *,
    order: OrderName = "zigzag",
    device: torch.device | str | None = None,
    group: Group | None = None,
) -> Tensor:
    """(S_local,) int64: where the positions of this rank's part lie in the whole sequence.

    Raises:
        LayoutError: `seq_len` is shorter than the number of chunks.
    """
    group = resolve_group(group, "context")
    part = SequenceOrder(seq_len, group.size(), order).parts[group.rank()]
    return torch.cat([torch.arange(r.start, r.stop, device=device) for r in part])

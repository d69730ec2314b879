"""Cut a sequence into the ranks' slices, and gather it; each function is the other's transpose."""

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
    """Return this rank's part of `x` along `dim`; the backward gathers the gradients.

    `x` (..., S, ...) is equal on all ranks; the result is (..., S_local, ...). In zigzag order
    rank i of n gets the chunks i and 2n - 1 - i of 2n, whose lengths differ by at most 1. The
    forward sends nothing.

    Raises:
        LayoutError: S is shorter than the number of chunks.
    """
    group, dim = resolve_group(group, "context"), as_dim(x, dim)
    sequence = SequenceOrder(x.shape[dim], group.size(), order)
    return collectives.scatter(by_rank(x, dim, sequence), dim, group, sequence.lengths)


def gather_sequence(
    x: Tensor,
    dim: int,
    *,
    order: OrderName = "zigzag",
    seq_len: int | None = None,
    group: Group | None = None,
) -> Tensor:
    """Return the full sequence, equal on all ranks, from each rank's part `x`.

    x (..., S_local, ...) -> (..., S, ...), in the order of positions. The backward returns this
    rank's part of the gradient.

    seq_len: S; None: the ranks exchange their lengths.

    Raises:
        LayoutError: the parts do not form a sequence. Without `seq_len` all ranks raise it, with
            what each holds.
    """
    group, dim = resolve_group(group, "context"), as_dim(x, dim)
    if seq_len is None:
        lengths = agree({"positions": x.shape[dim], "dims": x.dim()}, group)
    else:
        expected = list(SequenceOrder(seq_len, group.size(), order).lengths)
        expected[group.rank()] = x.shape[dim]
        lengths = tuple(expected)
    sequence = order_of(lengths, order, ranks_of(group))
    return by_position(collectives.gather(x, dim, group, lengths), dim, sequence)


def sequence_positions(
    seq_len: int,
    *,
    order: OrderName = "zigzag",
    device: torch.device | str | None = None,
    group: Group | None = None,
) -> Tensor:
    """Return the positions (S_local,), int64, of this rank's part in the full sequence.

    Raises:
        LayoutError: `seq_len` is shorter than the number of chunks.
    """
    group = resolve_group(group, "context")
    part = SequenceOrder(seq_len, group.size(), order).parts[group.rank()]
    return torch.cat([torch.arange(r.start, r.stop, device=device) for r in part])

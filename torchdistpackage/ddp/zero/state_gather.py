"""Pieces of many tensors, joined on every rank of a group or on one of them.

One rule: pieces travel together, a batch at a time, and a rank that gets nothing never holds
more than what it sends.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdistpackage.comm.p2p import Post
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.transport.sharded_flat import start_all_gather_v
from torchdistpackage.errors import CommError

BATCH_BYTES = 32 * 2**20
"""Of whole tensors; a larger one travels alone. What a gather needs beside its result."""


@dataclass(frozen=True)
class GatherItem:
    """A flat tensor of which rank i of the group has elements bounds[i] to bounds[i + 1].

    mine: my elements, 1-D on any device; None where there are none. device: where it travels.
    """

    bounds: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    mine: Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.bounds[-1] * self.dtype.itemsize

    def length(self, index: int) -> int:
        return self.bounds[index + 1] - self.bounds[index]


def batched_gather(
    items: Sequence[GatherItem], group: Group, to: int | None = None
) -> Iterator[Tensor | None]:
    """Yield each item whole, 1-D in memory of its own, in order.

    to: index in the group of the rank that gets them; the others get None. Default: all do.
    All ranks of the group call it with the same items, and take all of them.

    Raises:
        CommError: `to` is no index in the group.
    """
    if to is not None and not 0 <= to < group.size():
        raise CommError(
            f"to={to} is no rank of a group of {group.size()}, whose ranks are 0 to "
            f"{group.size() - 1} here, by their place; give one of these"
        )
    for batch in _batches(items):
        yield from _gather(batch, group, to)


def _batches(items: Sequence[GatherItem]) -> Iterator[list[GatherItem]]:
    batch: list[GatherItem] = []
    num_bytes = 0
    for item in items:
        alike = batch and (item.dtype, item.device) == (batch[0].dtype, batch[0].device)
        if batch and (not alike or num_bytes + item.num_bytes > BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += item.num_bytes
    if batch:
        yield batch


def _gather(batch: Sequence[GatherItem], group: Group, to: int | None) -> Iterator[Tensor | None]:
    """The batch lies rank after rank, and for each rank item after item."""
    me, bounds = group.rank(), [0]
    for index in range(group.size()):
        bounds.append(bounds[-1] + sum(item.length(index) for item in batch))
    receives = to is None or to == me
    start, stop = (bounds[me], bounds[me + 1]) if receives else (0, bounds[me + 1] - bounds[me])
    length = bounds[-1] if receives else stop
    flat = torch.empty(length, dtype=batch[0].dtype, device=batch[0].device)
    mine = [item.mine for item in batch if item.mine is not None]
    at = start
    for piece in mine:
        flat[at : at + piece.numel()].copy_(piece)
        at += piece.numel()
    if to is None:
        start_all_gather_v(flat, bounds, group).wait()
    elif group.size() > 1:
        _collect(flat, bounds, group, to)
    if not receives:
        yield from (None for _ in batch)
    elif len(batch) == 1:
        yield flat
    else:
        yield from _unpack(batch, flat, bounds)


def _collect(flat: Tensor, bounds: Sequence[int], group: Group, to: int) -> None:
    """Fill `flat` on rank `to` of the group; on the others it is what they send."""
    post, ranks, room = Post(group), ranks_of(group), flat.view(torch.uint8)
    if group.rank() != to:
        post.send([room], ranks[to])
    else:
        for index, rank in enumerate(ranks):
            if index != to:
                size = flat.element_size()
                post.receive([room[bounds[index] * size : bounds[index + 1] * size]], rank)
    post.go().wait()


def _unpack(batch: Sequence[GatherItem], flat: Tensor, bounds: Sequence[int]) -> Iterator[Tensor]:
    at = list(bounds[:-1])
    for item in batch:
        pieces: list[Tensor] = []
        for index, start in enumerate(at):
            pieces.append(flat[start : start + item.length(index)])
            at[index] += item.length(index)
        yield torch.cat(pieces)

"""Gathers and reduce-scatters along a sequence in chunks that overlap with a matmul.

A gather starts all chunks at once; local rows come first, then those of the other ranks chunk by
chunk. A reduce-scatter sends a chunk as soon as its rows are computed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.backends import is_queued
from torchdistpackage.comm.primitives import Group, Sizes
from torchdistpackage.comm.work import Work
from torchdistpackage.layout.partition import even_sizes

CHUNK_BYTES = 2**17
"""Smallest slice of a rank in a chunk over gloo: below it, a call costs as much as hiding it
saves.
"""
QUEUED_CHUNK_BYTES = 2**22
"""The same over NCCL, whose calls are faster and whose links need larger messages; not measured."""
MAX_CHUNKS = 4

Rows = slice
"""Rows of a full sequence."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks in which a sequence travels; each rank holds a range of rows.

    rows: by chunk and rank, positions in the full sequence. own_rows: this rank's rows.
    """

    group: Group
    rows: tuple[tuple[Rows, ...], ...]
    own_rows: Rows

    @classmethod
    def of(cls, lengths: Sizes, num_chunks: int, group: Group) -> "Chunks":
        """Return the chunks of a sequence whose ranks hold `lengths` rows."""
        starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
        by_rank: list[list[Rows]] = []
        for start, length in zip(starts, lengths, strict=True):
            parts: list[Rows] = []
            for part in even_sizes(length, num_chunks):
                parts.append(slice(start, start + part))
                start += part
            by_rank.append(parts)
        me = group.rank()
        own_rows = slice(starts[me], starts[me] + lengths[me])
        return cls(group, tuple(zip(*by_rank, strict=True)), own_rows)

    @property
    def num_rows(self) -> int:
        """Number of rows of the full sequence."""
        return self.rows[-1][-1].stop

    def sizes(self, chunk: int) -> list[int] | None:
        """Return the rows of each rank in a chunk; None: all are equal."""
        sizes = [rows.stop - rows.start for rows in self.rows[chunk]]
        return None if len(set(sizes)) == 1 else sizes


def num_chunks_of(lengths: Sizes, row_bytes: int, group: Group) -> int:
    """Return the number of chunks in which a sequence travels; the same on all ranks."""
    least = QUEUED_CHUNK_BYTES if is_queued(group) else CHUNK_BYTES
    return max(1, min(MAX_CHUNKS, max(lengths) * row_bytes // least, max(lengths)))


@dataclass(slots=True, eq=False)
class Arrivals:
    """A gather in flight that writes its rows into `into`. Iterate once."""

    chunks: Chunks
    into: Tensor
    works: list[Work]

    def __iter__(self) -> Iterator[Rows]:
        """Yield the available rows; those of this rank first."""
        yield self.chunks.own_rows
        own_rank = self.chunks.group.rank()
        for rows, work in zip(self.chunks.rows, self.works, strict=True):
            # later rows still travel while these are computed with
            parts = work.wait().split([r.stop - r.start for r in rows])
            for rank, (target, part) in enumerate(zip(rows, parts, strict=True)):
                if rank != own_rank and len(part):
                    with torch.no_grad():
                        self.into[target].copy_(part)
                    yield target


def start_gather(x: Tensor, chunks: Chunks) -> Arrivals:
    """Start to send x, this rank's rows (n, ...), to all ranks."""
    x = x.contiguous()
    into = x.new_empty((chunks.num_rows, *x.shape[1:]))
    into[chunks.own_rows].copy_(x)
    me, works = chunks.group.rank(), list[Work]()
    for index, rows in enumerate(chunks.rows):
        own_rows = rows[me]
        part = x[own_rows.start - chunks.own_rows.start : own_rows.stop - chunks.own_rows.start]
        works.append(primitives.all_gather(part, chunks.group, chunks.sizes(index), True))
    return Arrivals(chunks, into, works)


def start_scatter(
    chunks: Chunks, like: Tensor, compute: Callable[[Rows, Tensor], object]
) -> Callable[[], Tensor]:
    """Start to reduce-scatter the result of `compute`, chunk by chunk; call the return value for
    this rank's rows.

    compute: writes some rows of this rank's summand into a tensor (rows, ...). like: gives dtype
    and shape except the first dim.
    """
    works: list[Work] = []
    for index, rows in enumerate(chunks.rows):
        lengths = [r.stop - r.start for r in rows]
        partial = like.new_empty((sum(lengths), *like.shape[1:]))
        for target, into in zip(rows, partial.split(lengths), strict=True):
            if len(into):
                compute(target, into)
        works.append(primitives.reduce_scatter(partial, chunks.group, chunks.sizes(index), True))
    # waits when the result is asked for, so the caller can compute meanwhile
    return lambda: _joined([work.wait() for work in works])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts as one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))

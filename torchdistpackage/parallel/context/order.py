"""Orders that decide which positions of a sequence each rank of a group holds. No torch.

Under a causal mask a query at the end of a sequence sees many more keys than one at its
beginning. Zig-zag order cuts the sequence into 2n chunks and gives rank i the chunks i and
2n - 1 - i, so that all ranks score equally many pairs (Brandon et al., Striped Attention,
arXiv:2311.09431, has the problem; this order is Megatron-LM's).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, get_args

from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.partition import even_sizes

OrderName = Literal["zigzag", "contiguous"]
Ranges = tuple[range, ...]
"""Ascending ranges of positions, apart from each other; a part holds them joined in this order."""


@dataclass(frozen=True)
class SequenceOrder:
    """A sequence of `seq_len` positions over `size` ranks; chunk lengths differ by at most 1.

    Raises:
        LayoutError: the sequence has fewer positions than chunks, or the order is unknown.
    """

    seq_len: int
    size: int
    order: OrderName = "zigzag"

    def __post_init__(self) -> None:
        if self.order not in get_args(OrderName):
            raise LayoutError(
                f"there is no order {self.order!r} of a sequence; use zigzag or contiguous"
            )
        if self.seq_len < self.num_chunks:
            raise LayoutError(
                f"a sequence of {self.seq_len} positions cannot be cut into the "
                f"{self.num_chunks} chunks of {self.size} ranks in {self.order} order; use "
                f"{self.num_chunks} positions or more, or fewer ranks"
            )

    @property
    def num_chunks(self) -> int:
        """Number of chunks: two for each rank in zigzag order, else one."""
        return 2 * self.size if self.order == "zigzag" and self.size > 1 else self.size

    @cached_property
    def parts(self) -> tuple[Ranges, ...]:
        """Ranges of positions of each rank."""
        sizes = even_sizes(self.seq_len, self.num_chunks)
        ends = accumulate(sizes, initial=0)
        chunks = [range(*bounds) for bounds in pairwise(ends)]
        if len(chunks) == self.size:
            return tuple((chunk,) for chunk in chunks)
        return tuple(joined((chunks[i], chunks[-1 - i])) for i in range(self.size))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of positions that each rank holds."""
        return tuple(length(ranges) for ranges in self.parts)


def length(ranges: Iterable[range]) -> int:
    """Return the number of positions in all ranges."""
    return sum(map(len, ranges))


def joined(ranges: Iterable[range]) -> Ranges:
    """Return the same positions in ascending order, with adjacent ranges merged."""
    merged: list[range] = []
    for each in sorted(ranges, key=lambda r: r.start):
        if merged and merged[-1].stop == each.start:
            each = range(merged.pop().start, each.stop)
        merged.append(each)
    return tuple(merged)


def order_of(lengths: Sequence[int], order: OrderName, ranks: Sequence[int]) -> SequenceOrder:
    """Return the order in which the ranks' parts have these lengths.

    Raises:
        LayoutError: no sequence is cut into such parts; the message names what each rank holds.
    """
    sequence = SequenceOrder(sum(lengths), len(lengths), order)
    if sequence.lengths == tuple(lengths):
        return sequence
    actual = ", ".join(f"rank {r} {n}" for r, n in zip(ranks, lengths, strict=True))
    expected = ", ".join(f"rank {r} {n}" for r, n in zip(ranks, sequence.lengths, strict=True))
    raise LayoutError(
        f"the ranks hold {actual} positions, which is no {order} split of one sequence; for "
        f"{sequence.seq_len} positions together they would hold {expected}: cut the sequence with "
        "shard_sequence, or pad it equally on all ranks"
    )

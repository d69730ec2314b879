"""Which elements of a bucket each rank owns: arithmetic on sizes, no torch.

A bucket is its members side by side on one line. A cut is a list of bounds on that line, rank i
owning bounds[i] to bounds[i + 1]; what a rank owns of one member is a piece. Every element of
every member lies in exactly one piece over the ranks: the whole of ZeRO rests on this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torchdistpackage.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of a member, in the order of its memory; `offset` into my slice."""

    member: int
    start: int
    stop: int
    offset: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


def even_bounds(num_elements: int, num_ranks: int) -> tuple[int, ...]:
    """Slices of one length, so the last bound may lie beyond the end: the line is padded.

    For optimizers that treat every element alike, and so do not care where a parameter is cut.
    """
    length = -(-num_elements // num_ranks)
    return tuple(rank * length for rank in range(num_ranks + 1))


def pieces(
    offsets: Sequence[int], sizes: Sequence[int], bounds: Sequence[int], index: int
) -> tuple[Piece, ...]:
    """What the rank at `index` owns; member i is the sizes[i] elements from offsets[i] on.

    Raises:
        LayoutError: members overlap or are not in ascending order, bounds descend or leave
            elements without owner.
    """
    _check(offsets, sizes, bounds)
    first, end = bounds[index], bounds[index + 1]
    owned: list[Piece] = []
    for member, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        start, stop = max(first, offset), min(end, offset + size)
        if start < stop:
            owned.append(Piece(member, start - offset, stop - offset, start - first))
    return tuple(owned)


def _check(offsets: Sequence[int], sizes: Sequence[int], bounds: Sequence[int]) -> None:
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    if any(end > offset for end, offset in zip(ends, offsets[1:], strict=False)):
        raise LayoutError(
            f"members of sizes {list(sizes)} at offsets {list(offsets)} overlap; each must begin "
            f"at or after the end of the one before"
        )
    if any(stop < start for start, stop in pairwise(bounds)):
        raise LayoutError(f"bounds {list(bounds)} descend; give ascending ones")
    if ends and (bounds[0] > offsets[0] or bounds[-1] < ends[-1]):
        raise LayoutError(
            f"bounds {bounds[0]} to {bounds[-1]} leave elements {offsets[0]} to {ends[-1]} partly "
            f"without an owner; let them span all members"
        )

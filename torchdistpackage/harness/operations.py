"""The operations that are measured, one row each, and how the NCCL tests count their bytes.

One rule: a bandwidth is comparable only where bytes and factor are counted alike, so both are
taken from the tables of nccl-tests (doc/PERFORMANCE.md) and from nowhere else. The *counted* bytes
are those of the larger buffer of a rank. The algorithm bandwidth is counted bytes by time; the bus
bandwidth is that times `bus_factor(size)`, which makes it the speed of the busiest link whatever
the size of the group, so that it may be held against the hardware's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchdistpackage.errors import LayoutError


@dataclass(frozen=True, slots=True)
class CollectiveSpec:
    """One operation over a group of `size` ranks.

    bus_factor: of the group's size; 0 where a group of one moves nothing.
    input_is_part, output_is_part: that buffer of a rank is one of `size` equal parts of what is
        counted, else all of it.
    in_parts: what is counted falls into `size` equal parts.
    """

    name: str
    bus_factor: Callable[[int], float]
    input_is_part: bool = False
    output_is_part: bool = False
    in_parts: bool = False

    def input_bytes(self, counted_bytes: int, size: int) -> int:
        """What each rank gives.

        Raises:
            LayoutError: the counted bytes do not fall into equal parts.
        """
        return self._buffer_bytes(self.input_is_part, counted_bytes, size)

    def output_bytes(self, counted_bytes: int, size: int) -> int:
        """What each rank gets; raises as `input_bytes`."""
        return self._buffer_bytes(self.output_is_part, counted_bytes, size)

    def counted_bytes(self, input_bytes: int, size: int) -> int:
        """What is counted where each rank gives `input_bytes`."""
        return input_bytes * size if self.input_is_part else input_bytes

    def bus_bytes_per_s(self, counted_bytes: int, size: int, time_s: float) -> float:
        """The bus bandwidth of one run that took `time_s`."""
        return counted_bytes / time_s * self.bus_factor(size)

    def _buffer_bytes(self, is_part: bool, counted_bytes: int, size: int) -> int:
        if self.in_parts and counted_bytes % size:
            raise LayoutError(
                f"{self.name}: {counted_bytes} bytes do not fall into {size} equal parts, one for "
                f"each rank of the group; use a multiple of {size}"
            )
        return counted_bytes // size if is_part else counted_bytes


def _one(size: int) -> float:
    return float(size > 1)


def _others_share(size: int) -> float:
    return (size - 1) / size


def _twice_others_share(size: int) -> float:
    return 2 * (size - 1) / size


COLLECTIVES: dict[str, CollectiveSpec] = {
    case.name: case
    for case in (
        CollectiveSpec("p2p", _one),
        CollectiveSpec("p2p_both", _one),
        CollectiveSpec("all_reduce", _twice_others_share),
        CollectiveSpec("all_gather", _others_share, input_is_part=True, in_parts=True),
        CollectiveSpec("reduce_scatter", _others_share, output_is_part=True, in_parts=True),
        CollectiveSpec("all_to_all", _others_share, in_parts=True),
        CollectiveSpec("broadcast", _one),
    )
}
"""By name. `p2p` sends from one rank to another; `p2p_both` both ways at once, counted one way."""

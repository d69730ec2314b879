"""The table of collective operations: what is tested and measured, and how its bytes are counted.

`tdp comm test`, `tdp comm bench` and benchmarks/comm_overhead.py iterate it; its data and calls
follow from a row in harness/calls.py. Bytes and factors are those of nccl-tests
(doc/PERFORMANCE.md), or a bandwidth could not be compared with others'. The *counted* bytes are
those of the larger buffer of a rank; the algorithm bandwidth is counted bytes by time, and the bus
bandwidth that times `bus_factor(size)`: the speed of the busiest link at any size of the group.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torchdistpackage.errors import LayoutError


@dataclass(frozen=True, slots=True)
class CollectiveSpec:
    """One operation over a group of `size` ranks; `name` is its function in comm/primitives.py.

    bus_factor: of the group's size; 0 where a group of one moves nothing.
    input_is_part, output_is_part: that buffer of a rank is one of `size` equal parts of what is
        counted, else all of it.
    in_parts: what is counted falls into `size` equal parts.
    is_sum: inputs are added; else they are moved.
    is_message: between two ranks.
    tested: element types that `tdp comm test` sends; () where harness/comm_checks.py has a check.
    """

    name: str
    bus_factor: Callable[[int], float]
    input_is_part: bool = False
    output_is_part: bool = False
    in_parts: bool = False
    is_sum: bool = False
    is_message: bool = False
    tested: tuple[str, ...] = ("float32",)

    def input_bytes(self, counted_bytes: int, size: int) -> int:
        """Return the bytes of each rank's input.

        Raises:
            LayoutError: the counted bytes do not fall into equal parts.
        """
        return self._buffer_bytes(self.input_is_part, counted_bytes, size)

    def output_bytes(self, counted_bytes: int, size: int) -> int:
        """Return the bytes of each rank's output; raises as `input_bytes`."""
        return self._buffer_bytes(self.output_is_part, counted_bytes, size)

    def bus_bytes_per_s(self, counted_bytes: int, size: int, time_s: float) -> float:
        """Return the bus bandwidth of one call that took `time_s`."""
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


COLLECTIVES: dict[str, CollectiveSpec] = {
    spec.name: spec
    for spec in (
        CollectiveSpec("p2p", _one, is_message=True, tested=()),
        CollectiveSpec("p2p_both", _one, is_message=True, tested=()),
        CollectiveSpec(
            "all_reduce",
            lambda size: 2 * _others_share(size),
            is_sum=True,
            tested=("float32", "int64", "bfloat16"),
        ),
        CollectiveSpec(
            "all_gather", _others_share, input_is_part=True, in_parts=True, tested=("bfloat16",)
        ),
        CollectiveSpec(
            "reduce_scatter", _others_share, output_is_part=True, in_parts=True, is_sum=True
        ),
        CollectiveSpec("all_to_all", _others_share, in_parts=True, tested=("float64",)),
        CollectiveSpec("broadcast", _one, tested=()),
    )
}
"""By name. `p2p` sends from one rank to another; `p2p_both` both ways at once, counted one way."""

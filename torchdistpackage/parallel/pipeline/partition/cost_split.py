"""Cuts of a chain of pieces into stages, as arithmetic on costs. This file imports no torch.

`split_by_cost` judges a cut by the largest sum of costs on one rank, then by the largest stage.
`refine` moves the edges of such a cut to where a simulated step of the schedule is shortest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torchdistpackage.errors import ScheduleError
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.parallel.pipeline.partition.cut_search import PartitionProblem, Span
from torchdistpackage.schedule.actions import Schedule

Cut = tuple[range, ...]
"""The pieces of each stage, in order."""

_MOVES = [(width, by) for width in (1, 2) for by in (-2, -1, 1, 2)]
"""Moves of `refine`: the number of adjacent edges to move at once, and by how many pieces. With
these, 37 of 40 random chains in 4 stages reached the best cut, within 0.2 % on average; by busiest
rank alone 12 did, within 3.4 %."""
_ROUNDING = 1e-9
MOST_COMPUTATIONS = 200_000
"""Most computations to simulate in all, less than a second, which a start may wait for a cut."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory that a rank may hold, and that the pieces need, in bytes.

    cap_bytes: limit of one rank.
    held_bytes: weights, gradients and optimizer state of each piece.
    live_bytes: memory of each piece that one micro-batch keeps from its forward to its backward.
    live: for each stage the most such micro-batches at a time (`Timeline.peak_live`).
    """

    cap_bytes: float
    held_bytes: Sequence[float]
    live_bytes: Sequence[float]
    live: Sequence[int]

    def holds(self, cut: Sequence[range], placement: Sequence[int]) -> bool:
        """Return whether no rank exceeds its limit."""
        span, full = _held(self), dict.fromkeys(placement, 0.0)
        for stage, pieces in enumerate(cut):
            full[placement[stage]] += span(stage, pieces.start, pieces.stop)
        return max(full.values()) <= self.cap_bytes


def split_by_cost(
    costs: Sequence[float],
    num_stages: int,
    *,
    placement: Sequence[int] | None = None,
    memory: MemoryLimit | None = None,
    crossing: Sequence[float] | None = None,
) -> Cut:
    """Cut pieces 0..n-1 into consecutive ranges whose largest sum of costs is as small as possible.

    It uses dynamic programming over stages and pieces. The result is exact for the busiest rank if
    each runs one stage, and nearly so if they run several (`cut_search.KEPT`). For many pieces in
    many stages it searches a good cut for about a second. With fewer pieces than stages, the last
    stages are empty.

    placement: for each stage the pipe index that runs it (`Schedule.placement`); None: one each.
        If an index runs several stages, it first minimises the largest sum of an index, and then
        the largest stage.
    memory: limit of each rank's memory.
    crossing: for each piece the cost that a cut before it adds to the stages on both sides, if they
        are on different ranks.

    Raises:
        ScheduleError: fewer than one stage, a placement of another number, a negative cost, a
            crossing for another number of pieces, or no cut fits the memory.
    """
    lowest = min((*costs, *(crossing or ())), default=0)
    if num_stages < 1 or lowest < 0:
        raise ScheduleError(
            f"cannot cut {len(costs)} pieces into {num_stages} stages; use one stage or more and "
            f"costs of zero or more (lowest: {lowest:g})"
        )
    if crossing is not None and len(crossing) != len(costs):
        raise ScheduleError(
            f"crossing has {len(crossing)} numbers for {len(costs)} pieces; give one for each"
        )
    placement = range(num_stages) if placement is None else placement
    if len(placement) != num_stages:
        raise ScheduleError(
            f"the placement {[*placement]} has {len(placement)} stages, but the cut has "
            f"{num_stages}; give both the same number"
        )
    num_pieces, used = len(costs), min(num_stages, len(costs))
    stage_ranks, work = [*placement][:used], _sums(costs)
    time = work if crossing is None else _with_crossing(work, crossing, stage_ranks)
    if memory is None:
        # a bound: a cut into equal parts, each exceeded by less than one piece, always exists
        share = work(0, 0, num_pieces) / max(used, 1) + max(costs, default=0.0)
        share += 2 * max(crossing or (), default=0.0)
        busiest = max(map(stage_ranks.count, stage_ranks), default=0)
        cut = PartitionProblem(num_pieces, stage_ranks, time, work).best(busiest * share)
        assert cut is not None
    else:
        num_bytes = _held(memory)
        cut = PartitionProblem(
            num_pieces, stage_ranks, time, work, num_bytes, memory.cap_bytes
        ).best()
        if cut is None:
            least = PartitionProblem(num_pieces, stage_ranks, num_bytes, num_bytes).best()
            assert least is not None
            raise ScheduleError(
                f"no cut of {num_pieces} pieces into {num_stages} stages holds at most "
                f"{memory.cap_bytes:.3g} bytes a rank; the one that holds least needs "
                f"{least.rank:.3g} on its fullest rank: use more stages, fewer live microbatches "
                f"or checkpointing"
            )
    ranges = tuple(range(a, b) for a, b in pairwise(cut.ends()))
    return (*ranges, *(range(num_pieces, num_pieces) for _ in range(num_stages - used)))


def refine(cut: Sequence[range], schedule: Schedule, step: Callable[[Cut], float]) -> Cut:
    """Improve a cut by moves of its edges, each of which makes a simulated step shorter.

    It compares steps, not the busiest ranks: with few micro-batches a stage before the busiest one
    costs less than one behind it, and a message costs more than its bytes. No stage becomes empty.

    schedule: the schedule to simulate; for a large one it tries fewer moves.
    step: returns the time of a step with a cut, infinite if the cut does not fit.
    """
    tries = MOST_COMPUTATIONS // (2 * schedule.num_stages * schedule.num_microbatches)
    best, shortest = tuple(cut), step(tuple(cut))
    edges = [*(stage.start for stage in cut), cut[-1].stop]
    moved = True
    while moved:
        moved = False
        for width, by in _MOVES:
            for first in range(1, len(edges) - width):
                moving = range(first, first + width)
                tried = [edge + by * (i in moving) for i, edge in enumerate(edges)]
                if any(a >= b for a, b in pairwise(tried)):
                    continue
                if (tries := tries - 1) <= 0:
                    return best
                other = tuple(range(a, b) for a, b in pairwise(tried))
                if (length := step(other)) < shortest * (1 - _ROUNDING):
                    best, shortest, edges, moved = other, length, tried, True
    return best


def split_evenly(num_pieces: int, num_stages: int, *, longer_last: bool = False) -> Cut:
    """Return ranges whose lengths differ by at most one, longer ones first unless `longer_last`."""
    lengths = even_sizes(num_pieces, num_stages)
    ends = accumulate(reversed(lengths) if longer_last else lengths, initial=0)
    return tuple(range(a, b) for a, b in pairwise(ends))


def _sums(values: Sequence[float]) -> Span:
    """Return a function that sums `values` over a stage's pieces, for any stage."""
    total = list(accumulate(values, initial=0.0))
    return lambda stage, first, end: total[end] - total[first]


def _with_crossing(work: Span, crossing: Sequence[float], placement: Sequence[int]) -> Span:
    """Return `work` plus the cost of crossing to other ranks at the two ends of the stage."""
    num_pieces = len(crossing)
    leaves = [a != b for a, b in pairwise(placement)]

    def time(stage: int, first: int, end: int) -> float:
        incoming = crossing[first] if stage and leaves[stage - 1] else 0.0
        outgoing = crossing[end] if end < num_pieces and leaves[stage] else 0.0
        return incoming + work(stage, first, end) + outgoing

    return time


def _held(memory: MemoryLimit) -> Span:
    """Return a function for the bytes that a rank holds for a stage."""
    num_bytes, live = _sums(memory.held_bytes), _sums(memory.live_bytes)
    return lambda stage, first, end: (
        num_bytes(stage, first, end) + memory.live[stage] * live(stage, first, end)
    )

"""Where to cut a chain of pieces into stages: arithmetic on costs.

The busiest rank sets the pace, so a cut is judged by the largest sum of costs on one rank, then by
the largest stage. This file imports no torch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from torchdistpackage.errors import ScheduleError

Span = Callable[[int, int, int], float]
"""(stage, first piece, first piece of the next stage) -> what the stage costs or holds."""

KEPT = (4, 48)
"""Partial cuts that end at one piece and are kept, where ranks run several stages: in a first
search, whose answer bounds the second one, and in that. Of 48,769 random cases of up to twelve
pieces one missed a cut that was better, by 0.04 %."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a rank may hold, and what the pieces would have it hold, in bytes.

    cap_bytes: of one rank. held_bytes: of each piece, whatever the microbatches: weights,
    gradients, optimizer state. live_bytes: of each piece, what one microbatch keeps from its
    forward to its backward. live: for each stage the number of such microbatches at the worst
    moment of the schedule (`Timeline.peak_live`).
    """

    cap_bytes: float
    held_bytes: Sequence[float]
    live_bytes: Sequence[float]
    live: Sequence[int]

    def holds(self, cut: Sequence[range], placement: Sequence[int]) -> bool:
        """Whether no rank holds more than its cap."""
        span, full = _held(self), dict.fromkeys(placement, 0.0)
        for stage, pieces in enumerate(cut):
            full[placement[stage]] += span(stage, pieces.start, pieces.stop)
        return max(full.values()) <= self.cap_bytes


def split_by_cost(
    costs: Sequence[float],
    num_stages: int,
    *,
    placement: Sequence[int] | None = None,
    memory: Memory | None = None,
    crossing: Sequence[float] | None = None,
) -> tuple[range, ...]:
    """Cut pieces 0..n-1 into consecutive ranges, the largest sum of costs as small as can be.

    placement: for each stage the pipe index that runs it (`Schedule.placement`); None: one each.
    Where an index runs several, the largest sum over the stages of an index is made small first,
    then the largest stage. memory: no rank may hold more than its cap. crossing: for each piece
    what a cut before it adds to the stages on its two sides, where these are on two ranks.

    By dynamic programming over stages and pieces; exact for the busiest rank where each runs one
    stage, and but for what KEPT leaves out where they run several. What comes after that, the
    largest stage and even ones, is preferred on the way and not searched for. With fewer pieces
    than stages, stages without a piece stand last.

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
            f"the placement {[*placement]} is of {len(placement)} stages, the cut of {num_stages}"
        )
    num_pieces, used = len(costs), min(num_stages, len(costs))
    places, work = [*placement][:used], _sums(costs)
    time = work if crossing is None else _with_crossing(work, crossing, places)
    if memory is None:
        # a cut into equal parts, each overshot by less than a piece, is always there
        share = work(0, 0, num_pieces) / max(used, 1) + max(costs, default=0.0)
        share += 2 * max(crossing or (), default=0.0)
        busiest = max(map(places.count, places), default=0)
        cut = _best(num_pieces, places, time, work, most=busiest * share)
        assert cut is not None
    else:
        held = _held(memory)
        cut = _best(num_pieces, places, time, work, held, memory.cap_bytes)
        if cut is None:
            least = _best(num_pieces, places, held, held)
            assert least is not None
            raise ScheduleError(
                f"no cut of {num_pieces} pieces into {num_stages} stages holds at most "
                f"{memory.cap_bytes:.3g} bytes a rank; the one that holds least needs "
                f"{least.rank:.3g} on its fullest rank: use more stages, fewer live microbatches "
                f"or checkpointing"
            )
    ranges = tuple(range(a, b) for a, b in pairwise(cut.ends()))
    return (*ranges, *(range(num_pieces, num_pieces) for _ in range(num_stages - used)))


def split_evenly(
    num_pieces: int, num_stages: int, *, longer_last: bool = False
) -> tuple[range, ...]:
    """Ranges whose lengths differ by at most one, longer ones first unless `longer_last`."""
    short, longer = divmod(num_pieces, num_stages)
    lengths = [short + (i < longer) for i in range(num_stages)]
    ends = accumulate(reversed(lengths) if longer_last else lengths, initial=0)
    return tuple(range(a, b) for a, b in pairwise(ends))


class _Cut(NamedTuple):
    """A cut of the first `end` pieces; the smaller in this order is the better.

    rank, stage: largest sum of a rank and of a stage; of ranks that have stages to come, `open` and
    `full` tell what they cost and hold so far.
    """

    rank: float
    stage: float
    squares: float
    open: tuple[float, ...]
    full: tuple[float, ...]
    end: int
    before: "_Cut | None"

    def ends(self) -> list[int]:
        return [*(self.before.ends() if self.before else ()), self.end]

    def beats(self, other: "_Cut") -> bool:
        """Whether nothing that follows could make `other` the better one by its busiest rank."""
        return (
            self.rank <= other.rank
            and all(a <= b for a, b in zip(self.open, other.open, strict=True))
            and all(a <= b for a, b in zip(self.full, other.full, strict=True))
        )


@dataclass(frozen=True, slots=True)
class _Search:
    """Stage by stage, for every piece at which the stages so far may end, the best ways to do so.

    work: the part of `time` that grows with every piece. most: what a rank may cost, held and cap:
    what it holds and may hold, kept: see KEPT.
    """

    num_pieces: int
    placement: Sequence[int]
    time: Span
    work: Span
    held: Span | None
    cap: float
    most: float
    kept: int

    def best(self) -> _Cut | None:
        """None where no cut keeps to cap and most."""
        ended: dict[int, list[_Cut]] = {0: [_Cut(0.0, 0.0, 0.0, (), (), 0, None)]}
        going: list[int] = []  # ranks in the order of _Cut.open
        for stage, rank in enumerate(self.placement):
            at = going.index(rank) if rank in going else None
            last = rank not in self.placement[stage + 1 :]
            reached: dict[int, list[_Cut]] = {}
            for cuts in ended.values():
                for cut in cuts:
                    for longer in self._extended(cut, stage, at, last):
                        reached.setdefault(longer.end, []).append(longer)
            ended = {end: self._worth_keeping(cuts) for end, cuts in reached.items()}
            going = [r for r in going if r != rank] + ([] if last else [rank])
        return min(ended.get(self.num_pieces, ()), default=None)

    def _extended(self, cut: _Cut, stage: int, at: int | None, last: bool) -> Iterator[_Cut]:
        """`cut` with one more stage, of every length. at: of its rank in `open`."""
        left = len(self.placement) - stage - 1
        spent, full = (0.0, 0.0) if at is None else (cut.open[at], cut.full[at])
        others, others_full = cut.open, cut.full
        if at is not None:
            others = others[:at] + others[at + 1 :]
            others_full = others_full[:at] + others_full[at + 1 :]
        # what is not done by now must fit into the time that other ranks have left
        going = len(set(self.placement[stage + 1 :]) - {self.placement[stage]} if last else ())
        room = going * self.most - sum(others) if last else float("inf")
        for end in range(cut.end + 1 if left else self.num_pieces, self.num_pieces - left + 1):
            here = self.time(stage, cut.end, end)
            holds = full + (0.0 if self.held is None else self.held(stage, cut.end, end))
            if spent + self.work(stage, cut.end, end) > self.most or holds > self.cap:
                break
            if spent + here > self.most or self.work(stage, end, self.num_pieces) > room:
                continue
            yield _Cut(
                max(cut.rank, spent + here) if last else cut.rank,
                max(cut.stage, here),
                cut.squares + here * here,
                others if last else (*others, spent + here),
                others_full if last else (*others_full, holds),
                end,
                cut,
            )

    def _worth_keeping(self, cuts: list[_Cut]) -> list[_Cut]:
        """Those that no other beats, up to `kept`."""
        cuts.sort(key=lambda cut: (max(cut.open, default=0.0), cut[:3]))
        if not cuts[0].open:
            return cuts[:1]
        kept: list[_Cut] = []
        for cut in cuts:
            if not any(other.beats(cut) for other in kept):
                kept.append(cut)
                if len(kept) == self.kept:
                    break
        return kept


def _best(
    num_pieces: int,
    placement: Sequence[int],
    time: Span,
    work: Span,
    held: Span | None = None,
    cap: float = float("inf"),
    most: float = float("inf"),
) -> _Cut | None:
    best = None
    for kept in KEPT:
        most *= 1 + 1e-9
        found = _Search(num_pieces, placement, time, work, held, cap, most, kept).best()
        if found is not None:
            best, most = found, found.rank
    return best


def _sums(values: Sequence[float]) -> Span:
    """Sum over a stage's pieces, whichever stage it is."""
    total = list(accumulate(values, initial=0.0))
    return lambda stage, first, end: total[end] - total[first]


def _with_crossing(work: Span, crossing: Sequence[float], placement: Sequence[int]) -> Span:
    """`work`, and what goes over the two ends of the stage to other ranks."""
    num_pieces = len(crossing)
    leaves = [a != b for a, b in pairwise(placement)]

    def time(stage: int, first: int, end: int) -> float:
        taken = crossing[first] if stage and leaves[stage - 1] else 0.0
        given = crossing[end] if end < num_pieces and leaves[stage] else 0.0
        return taken + work(stage, first, end) + given

    return time


def _held(memory: Memory) -> Span:
    held, live = _sums(memory.held_bytes), _sums(memory.live_bytes)
    return lambda stage, first, end: (
        held(stage, first, end) + memory.live[stage] * live(stage, first, end)
    )

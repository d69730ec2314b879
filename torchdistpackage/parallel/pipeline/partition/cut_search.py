"""The search for a cut, with bounded cost whatever the chain.

All ranks find the same cut, so nothing here depends on time, or on chance but for a fixed seed. A
small chain is searched stage by stage: of all ways to come to an edge the best are kept. In a large
one the edges first move by simulated annealing until ranks are evenly busy (`wander`), and such
searches go on from there, among edges nearby.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import le
from random import Random
from typing import NamedTuple

Span = Callable[[int, int, int], float]
"""(stage, first piece, first piece of the next stage) -> seconds or bytes of the stage."""

KEPT = (4, 48)
"""Partial cuts that end at one piece and are kept, where ranks run several stages: in a first
search, whose answer bounds the second one, and in that. Of 48,769 random cases of up to twelve
pieces one missed a cut that was better, by 0.04 %."""
MOST_TRIED = 250_000
"""Partial cuts that a search may try: half a second. A larger chain is not searched as a whole."""
MOST_NEAR = 100_000
"""Partial cuts that searches near a known cut may try, all together."""
MOVES, WALKS = 70_000, 2
"""Moves of single edges in a walk, and the number of walks. Of 50 random chains that could be tried
in up to four times MOST_TRIED 4 had the same busiest rank as after a whole search, 25 a less busy
one, 21 a busier one, by 1 % at most: the same in the mean, to 0.01 %."""


class StageCut(NamedTuple):
    """A cut of the first `end` pieces; the smaller in this order is the better.

    rank, stage: largest sum of a rank and of a stage; of ranks that have stages to come, `open` and
    `full` are what they cost and hold so far.
    """

    rank: float
    stage: float
    squares: float
    open: tuple[float, ...]
    full: tuple[float, ...]
    end: int
    before: "StageCut | None"

    def ends(self) -> list[int]:
        return [*(self.before.ends() if self.before else ()), self.end]

    def beats(self, other: "StageCut") -> bool:
        """Whether `other` cannot become the better one by its busiest rank, whatever follows."""
        return (
            self.rank <= other.rank
            and all(map(le, self.open, other.open))
            and all(map(le, self.full, other.full))
        )


@dataclass(frozen=True, slots=True)
class PartitionProblem:
    """A chain to cut into stages that run where `placement` says.

    time: seconds of a stage. work: the part of them that grows with every piece. memory: bytes of a
    stage, of which a rank may have `cap_bytes`; None: whatever it has.
    """

    num_pieces: int
    placement: Sequence[int]
    time: Span
    work: Span
    memory: Span | None = None
    cap_bytes: float = float("inf")

    def best(self, most: float = float("inf")) -> StageCut | None:
        """The best cut; None where none keeps to cap_bytes, and to `most` seconds on a rank."""
        every = range(self.num_pieces + 1)
        if self.memory is None and self._tried(len(every), KEPT[-1]) > MOST_TRIED:
            walks = (self._improved(wander(self, seed)) for seed in range(WALKS))
            return min(walks, key=lambda cut: cut[:3])
        found = None
        for kept in KEPT:
            better = self._searched([every] * len(self.placement), most, kept)
            if better is not None:
                found, most = better, better.rank
        return found

    def _improved(self, ends: Sequence[int]) -> StageCut:
        """Improve a cut by searches near the best one that is known, ever wider ones."""
        found = self._searched([(end,) for end in ends], float("inf"), 1)
        assert found is not None
        left, near = MOST_NEAR, 1
        while True:
            for kept in (8, KEPT[-1]):
                tried = self._tried(2 * near + len(self.placement) + 1, kept)
                better: StageCut | None = found
                while better is not None:
                    left -= tried
                    if left < 0:
                        return found
                    around = [range(max(end - near, 0), end + near + 1) for end in found.ends()[1:]]
                    better = self._searched(around, found.rank, kept)
                    if better is not None and better[:3] < found[:3]:
                        found = better
                    else:
                        better = None
            near += 1

    def _tried(self, num_edges: int, kept: int) -> int:
        """The number of partial cuts, at most, if stages may end at so many edges."""
        placement = self.placement
        stages, chunks = max(len(placement), 1), max(map(placement.count, placement), default=1)
        if chunks < 2:
            return 0  # one is kept, and it is exact
        ends = num_edges - stages
        return stages * ends * min(ends, chunks * self.num_pieces // stages) * kept

    def _searched(
        self, allowed: Sequence[Sequence[int]], most: float, kept: int
    ) -> StageCut | None:
        return _StageSearch(self, allowed, most * (1 + 1e-9), kept).best()


def wander(of: PartitionProblem, seed: int) -> list[int]:
    """Find the ends of stages by simulated annealing, one edge by one or two pieces at a time.

    What falls is the sum of the squares of what ranks cost, and a little of what stages do; of all
    cuts on the way the one with the least busy rank is returned.
    """
    time, placement, num = of.time, of.placement, len(of.placement)
    edges, draw = [0, *_even_ends(of)], Random(seed).random
    cost = [time(s, edges[s], edges[s + 1]) for s in range(num)]
    load = dict.fromkeys(placement, 0.0)
    for s in range(num):
        load[placement[s]] += cost[s]
    best, found = max(load.values()), edges[1:]
    hot = HOT * (sum(load.values()) / len(load)) ** 2
    for move in range(MOVES):
        i, by = 1 + int(draw() * (num - 1)), int(draw() * 4)
        edge = edges[i] + (-2, -1, 1, 2)[by]
        if not edges[i - 1] < edge < edges[i + 1]:
            continue
        a, b = placement[i - 1], placement[i]
        before, after = time(i - 1, edges[i - 1], edge), time(i, edge, edges[i + 1])
        less, more = before - cost[i - 1], after - cost[i]
        rise = STAGES * (less * (before + cost[i - 1]) + more * (after + cost[i]))
        if a != b:
            rise += less * (2 * load[a] + less) + more * (2 * load[b] + more)
        if rise > 0 and draw() >= math.exp(-rise / (hot * COOLED ** (move / MOVES))):
            continue
        edges[i], cost[i - 1], cost[i] = edge, before, after
        load[a] += less
        load[b] += more
        if (busiest := max(load.values())) < best:
            best, found = busiest, edges[1:]
    return found


STAGES, HOT, COOLED = 0.02, 0.5, 1e-5
"""The weight of a stage's square if a rank's is 1; the first temperature in squares of a rank's
mean cost, and the last as a part of it."""


def _even_ends(of: PartitionProblem) -> list[int]:
    """Ends of stages that are as even as the pieces allow; one may be larger than a stage."""
    num, stages = of.num_pieces, len(of.placement)
    costs = [of.work(0, i, i + 1) for i in range(num)]
    for _ in range(4):
        share = sum(costs) / stages
        costs = [min(cost, share) for cost in costs]
    total = list(accumulate(costs))
    ends = [bisect_left(total, share * (s + 1) - share / 2) + 1 for s in range(stages - 1)]
    for s in range(stages - 1):  # a piece each at least, and as many left
        ends[s] = max(ends[s], s + 1, ends[s - 1] + 1 if s else 1)
    for s in reversed(range(stages - 1)):
        ends[s] = min(ends[s], num - (stages - 1 - s), ends[s + 1] - 1 if s < stages - 2 else num)
    return [*ends, num]


@dataclass(frozen=True, slots=True)
class _StageSearch:
    """A search stage by stage: the best ways to come to each piece at which stages may end.

    allowed: for each stage where it may end. most: what a rank may cost. kept: see KEPT.
    """

    of: PartitionProblem
    allowed: Sequence[Sequence[int]]
    most: float
    kept: int

    def best(self) -> StageCut | None:
        placement, num_pieces = self.of.placement, self.of.num_pieces
        ended: dict[int, list[StageCut]] = {0: [StageCut(0.0, 0.0, 0.0, (), (), 0, None)]}
        going: list[int] = []  # ranks in the order of Cut.open
        for stage, rank in enumerate(placement):
            at = going.index(rank) if rank in going else None
            last = rank not in placement[stage + 1 :]
            reached: dict[int, list[StageCut]] = {}
            for cuts in ended.values():
                for cut in cuts:
                    for longer in self._extended(cut, stage, at, last):
                        reached.setdefault(longer.end, []).append(longer)
            ended = {end: self._worth_keeping(cuts) for end, cuts in reached.items()}
            going = [r for r in going if r != rank] + ([] if last else [rank])
        return min(ended.get(num_pieces, ()), default=None)

    def _extended(
        self, cut: StageCut, stage: int, at: int | None, last: bool
    ) -> Iterator[StageCut]:
        """Extend `cut` by one more stage, of every length. at: the place of its rank in `open`."""
        of, most = self.of, self.most
        time, work, memory, num_pieces = of.time, of.work, of.memory, of.num_pieces
        left = len(of.placement) - stage - 1
        spent, full = (0.0, 0.0) if at is None else (cut.open[at], cut.full[at])
        others, others_full = cut.open, cut.full
        if at is not None:
            others = others[:at] + others[at + 1 :]
            others_full = others_full[:at] + others_full[at + 1 :]
        # what is not done by now must fit into the time that other ranks have left
        going = len(set(of.placement[stage + 1 :]) - {of.placement[stage]} if last else ())
        room = going * most - sum(others) if last else float("inf")
        ends = self.allowed[stage] if left else (num_pieces,)
        first = bisect_left(ends, cut.end + 1)
        for end in ends[first : bisect_left(ends, num_pieces - left + 1)]:
            here = time(stage, cut.end, end)
            holds = full + (0.0 if memory is None else memory(stage, cut.end, end))
            if spent + work(stage, cut.end, end) > most or holds > of.cap_bytes:
                break
            if spent + here > most or (last and work(stage, end, num_pieces) > room):
                continue
            yield StageCut(
                max(cut.rank, spent + here) if last else cut.rank,
                max(cut.stage, here),
                cut.squares + here * here,
                others if last else (*others, spent + here),
                others_full if last else (*others_full, holds),
                end,
                cut,
            )

    def _worth_keeping(self, cuts: list[StageCut]) -> list[StageCut]:
        """The cuts that no other beats, up to `kept`."""
        cuts.sort(key=_order)
        if not cuts[0].open:
            return cuts[:1]
        kept: list[StageCut] = []
        for cut in cuts:
            if not any(other.beats(cut) for other in kept):
                kept.append(cut)
                if len(kept) == self.kept:
                    break
        return kept


def _order(cut: StageCut) -> tuple[float, float, float, float]:
    return (max(cut.open, default=0.0), *cut[:3])

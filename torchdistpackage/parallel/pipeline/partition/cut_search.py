"""The search for a cut, with bounded cost for any chain.

All ranks must find the same cut, so nothing here depends on time, and random choices use a fixed
seed. A small chain is searched stage by stage, keeping the best partial cuts that end at each edge.
In a large chain simulated annealing first moves the edges until ranks are evenly busy (`wander`),
and such searches then continue among nearby edges.
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
"""A function (stage, first piece, first piece of the next stage) -> seconds or bytes of
the stage.
"""

KEPT = (4, 48)
"""Numbers of partial cuts to keep for each end, if ranks run several stages: in a first search,
whose answer bounds the second, and in the second. Of 48,769 random cases of up to twelve pieces one
missed a better cut, by 0.04 %."""
MOST_TRIED = 250_000
"""Largest number of partial cuts that a search may try, half a second. Larger chains are not
searched completely.
"""
MOST_NEAR = 100_000
"""Largest number of partial cuts that all searches near a known cut may try together."""
MOVES, WALKS = 70_000, 2
"""Moves of single edges in a walk, and number of walks. Of 50 random chains with up to four times
MOST_TRIED partial cuts, 4 had the same busiest rank as after a full search, 25 a less busy one and
21 a busier one, by 1 % at most. The mean was equal to 0.01 %."""


class StageCut(NamedTuple):
    """A cut of the first `end` pieces; tuples that compare smaller are better.

    rank, stage: largest sum of a rank and of a stage.
    open, full: time and memory so far of the ranks that have stages to come.
    before: the cut without its last stage.
    """

    rank: float
    stage: float
    squares: float
    open: tuple[float, ...]
    full: tuple[float, ...]
    end: int
    before: "StageCut | None"

    def ends(self) -> list[int]:
        """Return the ends of all stages, from 0 on."""
        return [*(self.before.ends() if self.before else ()), self.end]


@dataclass(frozen=True, slots=True)
class PartitionProblem:
    """A chain to cut into stages, which the ranks in `placement` run.

    time: seconds of a stage. work: the part of them that grows with every piece.
    memory: bytes of a stage, at most `cap_bytes` on a rank; None: no limit.
    """

    num_pieces: int
    placement: Sequence[int]
    time: Span
    work: Span
    memory: Span | None = None
    cap_bytes: float = float("inf")

    def best(self, most: float = float("inf")) -> StageCut | None:
        """Return the best cut, or None if none is within cap_bytes and `most` seconds on a rank."""
        every = range(self.num_pieces + 1)
        if self.memory is None and self._tried(len(every), KEPT[-1]) > MOST_TRIED:
            walks = (self._improved(wander(self, seed)) for seed in range(WALKS))
            return min(walks, key=lambda cut: cut[:3])
        best_cut = None
        for num_kept in KEPT:
            better = self._searched([every] * len(self.placement), most, num_kept)
            if better is not None:
                best_cut, most = better, better.rank
        return best_cut

    def _improved(self, ends: Sequence[int]) -> StageCut:
        """Improve a cut by wider and wider searches around the best cut so far."""
        best = self._searched([(end,) for end in ends], float("inf"), 1)
        assert best is not None
        budget, near = MOST_NEAR, 1
        while True:
            for num_kept in (8, KEPT[-1]):
                tried = self._tried(2 * near + len(self.placement) + 1, num_kept)
                better: StageCut | None = best
                while better is not None:
                    budget -= tried
                    if budget < 0:
                        return best
                    around = [range(max(end - near, 0), end + near + 1) for end in best.ends()[1:]]
                    better = self._searched(around, best.rank, num_kept)
                    if better is not None and better[:3] < best[:3]:
                        best = better
                    else:
                        better = None
            near += 1

    def _tried(self, num_edges: int, num_kept: int) -> int:
        """Return the largest number of partial cuts of a search in which stages may end at
        `num_edges` edges.
        """
        placement = self.placement
        stages, chunks = max(len(placement), 1), max(map(placement.count, placement), default=1)
        if chunks < 2:
            return 0  # the search keeps one partial cut for each end, and is exact
        ends = num_edges - stages
        return stages * ends * min(ends, chunks * self.num_pieces // stages) * num_kept

    def _searched(
        self, allowed: Sequence[Sequence[int]], most: float, kept: int
    ) -> StageCut | None:
        return _StageSearch(self, allowed, most * (1 + 1e-9), kept).best()


def wander(problem: PartitionProblem, seed: int) -> list[int]:
    """Find the ends of stages by simulated annealing, moving one edge by one or two pieces at a
    time.

    It minimises the sum of squares of the ranks' costs, plus a little of the stages'. It returns
    the cut with the least busy busiest rank of all that it visited.
    """
    time, placement, num = problem.time, problem.placement, len(problem.placement)
    edges, draw = [0, *_even_ends(problem)], Random(seed).random
    cost = [time(s, edges[s], edges[s + 1]) for s in range(num)]
    load = dict.fromkeys(placement, 0.0)
    for s in range(num):
        load[placement[s]] += cost[s]
    best, best_ends = max(load.values()), edges[1:]
    hot = HOT * (sum(load.values()) / len(load)) ** 2
    for move in range(MOVES):
        i, by = 1 + int(draw() * (num - 1)), int(draw() * 4)
        edge = edges[i] + (-2, -1, 1, 2)[by]
        if not edges[i - 1] < edge < edges[i + 1]:
            continue
        a, b = placement[i - 1], placement[i]
        left_cost, right_cost = time(i - 1, edges[i - 1], edge), time(i, edge, edges[i + 1])
        less, more = left_cost - cost[i - 1], right_cost - cost[i]
        rise = STAGES * (less * (left_cost + cost[i - 1]) + more * (right_cost + cost[i]))
        if a != b:
            rise += less * (2 * load[a] + less) + more * (2 * load[b] + more)
        if rise > 0 and draw() >= math.exp(-rise / (hot * COOLED ** (move / MOVES))):
            continue
        edges[i], cost[i - 1], cost[i] = edge, left_cost, right_cost
        load[a] += less
        load[b] += more
        if (busiest := max(load.values())) < best:
            best, best_ends = busiest, edges[1:]
    return best_ends


STAGES, HOT, COOLED = 0.02, 0.5, 1e-5
"""STAGES: weight of a stage's square relative to a rank's. HOT: first temperature, in squares of
the ranks' mean cost. COOLED: last temperature as a share of the first."""


def _even_ends(problem: PartitionProblem) -> list[int]:
    """Return ends of stages that are as even as the pieces allow."""
    num, stages = problem.num_pieces, len(problem.placement)
    costs = [problem.work(0, i, i + 1) for i in range(num)]
    for _ in range(4):
        share = sum(costs) / stages
        costs = [min(cost, share) for cost in costs]
    total = list(accumulate(costs))
    ends = [bisect_left(total, share * (s + 1) - share / 2) + 1 for s in range(stages - 1)]
    for s in range(stages - 1):  # leave at least one piece for this and each later stage
        ends[s] = max(ends[s], s + 1, ends[s - 1] + 1 if s else 1)
    for s in reversed(range(stages - 1)):
        ends[s] = min(ends[s], num - (stages - 1 - s), ends[s + 1] - 1 if s < stages - 2 else num)
    return [*ends, num]


@dataclass(frozen=True, slots=True)
class _StageSearch:
    """A search stage by stage, which keeps the best partial cuts for each end.

    allowed: for each stage the pieces at which it may end. most: largest cost of a rank.
    kept: number of partial cuts to keep, see KEPT.
    """

    problem: PartitionProblem
    allowed: Sequence[Sequence[int]]
    most: float
    kept: int

    def best(self) -> StageCut | None:
        """Return the best cut of all pieces, or None."""
        placement, num_pieces = self.problem.placement, self.problem.num_pieces
        ended: dict[int, list[StageCut]] = {0: [StageCut(0.0, 0.0, 0.0, (), (), 0, None)]}
        going: list[int] = []  # ranks in the order of Cut.open
        for stage, rank in enumerate(placement):
            open_index = going.index(rank) if rank in going else None
            last = rank not in placement[stage + 1 :]
            reached: dict[int, list[StageCut]] = {}
            for cuts in ended.values():
                for cut in cuts:
                    for longer in self._extended(cut, stage, open_index, last):
                        reached.setdefault(longer.end, []).append(longer)
            ended = {end: self._worth_keeping(cuts) for end, cuts in reached.items()}
            going = [r for r in going if r != rank] + ([] if last else [rank])
        return min(ended.get(num_pieces, ()), default=None)

    def _extended(
        self, cut: StageCut, stage: int, open_index: int | None, last: bool
    ) -> Iterator[StageCut]:
        """Yield `cut` extended by one more stage, of every length.

        open_index: index of the stage's rank in `open`.
        """
        problem, most = self.problem, self.most
        time, work, memory, num_pieces = (
            problem.time,
            problem.work,
            problem.memory,
            problem.num_pieces,
        )
        num_left = len(problem.placement) - stage - 1
        spent, full = (
            (0.0, 0.0) if open_index is None else (cut.open[open_index], cut.full[open_index])
        )
        others, others_full = cut.open, cut.full
        if open_index is not None:
            others = others[:open_index] + others[open_index + 1 :]
            others_full = others_full[:open_index] + others_full[open_index + 1 :]
        # the remaining pieces must fit into the time that the other ranks have left
        going = len(
            set(problem.placement[stage + 1 :]) - {problem.placement[stage]} if last else ()
        )
        room = going * most - sum(others) if last else float("inf")
        ends = self.allowed[stage] if num_left else (num_pieces,)
        first = bisect_left(ends, cut.end + 1)
        for end in ends[first : bisect_left(ends, num_pieces - num_left + 1)]:
            stage_time = time(stage, cut.end, end)
            holds = full + (0.0 if memory is None else memory(stage, cut.end, end))
            if spent + work(stage, cut.end, end) > most or holds > problem.cap_bytes:
                break
            if spent + stage_time > most or (last and work(stage, end, num_pieces) > room):
                continue
            yield StageCut(
                max(cut.rank, spent + stage_time) if last else cut.rank,
                max(cut.stage, stage_time),
                cut.squares + stage_time * stage_time,
                others if last else (*others, spent + stage_time),
                others_full if last else (*others_full, holds),
                end,
                cut,
            )

    def _worth_keeping(self, cuts: list[StageCut]) -> list[StageCut]:
        """Return the cuts that no other beats, up to `best_cuts`."""
        cuts.sort(key=_order)
        if not cuts[0].open:
            return cuts[:1]
        best_cuts: list[StageCut] = []
        has_memory = self.problem.memory is not None
        for cut in cuts:
            rank, open_times, full = cut.rank, cut.open, cut.full
            # written out, since a search spends most of its time here: another beats this cut if
            # this one cannot get a less busy busiest rank, whatever stages follow
            for other in best_cuts:
                if (
                    other.rank <= rank
                    and all(map(le, other.open, open_times))
                    and (not has_memory or all(map(le, other.full, full)))
                ):
                    break
            else:
                best_cuts.append(cut)
                if len(best_cuts) == self.kept:
                    break
        return best_cuts


def _order(cut: StageCut) -> tuple[float, float, float, float]:
    return (max(cut.open, default=0.0), *cut[:3])

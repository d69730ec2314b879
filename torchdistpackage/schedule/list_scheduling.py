"""List scheduling: each rank, whenever free, does the first thing on its list that is possible.

A rank never starts what would hold more than its capacity, and leaves room for the later chunks of
what it starts, so no list deadlocks. Priorities are data (`Rules`); gradients of weights fill the
gaps, as in the automatic schedules of Zero Bubble Pipeline Parallelism (arXiv:2401.10241, section
3), and are joined to the first half of their backward again where the split gains nothing
(`merge_backward`).
"""

import heapq
import math
from dataclasses import dataclass
from typing import Self

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.engine import BACKWARD, FORWARD, INPUT, WEIGHT, Order, TaskGraph


@dataclass(frozen=True, slots=True)
class Rules:
    """A rank's preferences, and its limits.

    priority: (forward, backward) of each stage: with several possible, the lowest number starts.
    capacity: what each rank may hold, in the unit of TaskGraph.weights.
    ahead: how many forwards each stage may be ahead of its backwards; the warm-up's depth.
    split: how many of the first and of the last microbatches of each stage have their backward
        split; the Ws of those fill gaps.
    max_deferred_w: how many Ws each rank may owe; with more it runs one before all else.
    min_gap_fill: the share of a W that must fit into a gap for the W to start in it.
    backward: False leaves only forwards.
    """

    priority: tuple[tuple[float, float], ...]
    capacity: tuple[float, ...]
    ahead: tuple[int, ...]
    split: tuple[tuple[int, int], ...]
    max_deferred_w: tuple[int, ...]
    min_gap_fill: float = 0.5
    backward: bool = True

    @classmethod
    def unlimited(
        cls,
        work: TaskGraph,
        priority: tuple[tuple[float, float], ...],
        capacity: tuple[float, ...] | None = None,
    ) -> Self:
        """Every backward split, and no limit but the capacity; None: a rank may hold all."""
        m, everything = work.num_microbatches, (work.size,) * work.num_ranks
        return cls(
            priority,
            everything if capacity is None else capacity,
            (m,) * work.num_stages,
            ((m, 0),) * work.num_stages,
            everything,
        )


def deepest_first(num_stages: int) -> tuple[tuple[float, float], ...]:
    """The latest stage first, its backward before its forward: what is begun gets finished."""
    return tuple((-s, -s - 0.5) for s in range(num_stages))


def backward_first(num_stages: int) -> tuple[tuple[float, float], ...]:
    """Any backward before any forward; of those what is nearest to its end."""
    return tuple((num_stages - s, s - num_stages) for s in range(num_stages))


class _RankState:
    """One rank on its way: its clock, what it holds, and its stages' candidates in turn."""

    def __init__(self, stages: list[int], rules: Rules, late: int) -> None:
        self.program: list[int] = []
        self.clock = 0.0
        self.holds = 0.0
        self.asleep = False
        self.late = late
        kinds = (FORWARD, INPUT) if rules.backward else (FORWARD,)
        self.candidates = sorted(
            ((kind, s) for s in stages for kind in kinds), key=lambda c: rules.priority[c[1]][c[0]]
        )
        self.pending: list[tuple[int, int]] = []
        """(stage, microbatch) of each W that may run, the newest last."""


def list_order(work: TaskGraph, rules: Rules) -> Order:
    """The order that `rules` give, at the costs of `work`; raises ScheduleError where a capacity
    does not even hold one microbatch of each stage of its rank."""
    m, size, cost, delay = work.num_microbatches, work.size, work.cost, work.delay
    last = work.num_stages - 1
    placement, weights = work.placement, work.weights
    ahead, split, limits = rules.ahead, rules.split, _limits(work, rules)
    ranks = [
        _RankState(mine, rules, late)
        for mine, late in zip(work.stages, rules.max_deferred_w, strict=True)
    ]
    # Next microbatch of each stage and, by kind, when what it waits for is there.
    nexts = [[0] * work.num_stages, [0] * work.num_stages]
    ready = [[math.inf] * size, [math.inf] * size]
    ready[FORWARD][:m] = [0.0] * m
    events = [(0.0, r) for r in range(len(ranks))]

    def pick(rank: _RankState, now: float) -> tuple[int, int, float]:
        """(kind, stage, when it may start) of the first possible; kind -1 if there is none."""
        if len(rank.pending) > rank.late:
            return WEIGHT, rank.pending[-1][0], now
        soonest, full = math.inf, False
        for kind, s in rank.candidates:
            k = nexts[kind][s]
            if k == m:
                continue
            when = ready[kind][s * m + k]
            if kind == FORWARD:
                if k - nexts[INPUT][s] >= ahead[s]:
                    continue
                if rank.holds > limits[s]:
                    full = full or when <= now
                    continue
            if when <= now:
                return kind, s, when
            soonest = min(soonest, when)
        if rank.pending:
            s = rank.pending[-1][0]
            if full or soonest - now >= rules.min_gap_fill * work.costs.weight[s]:
                return WEIGHT, s, now
        return -1, -1, soonest

    while events:
        now, r = heapq.heappop(events)
        rank = ranks[r]
        if now < rank.clock:
            continue
        kind, s, when = pick(rank, now)
        if kind < 0:
            rank.asleep = True
            if when < math.inf:
                heapq.heappush(events, (when, r))
            continue
        rank.asleep = False
        wakes = -1
        if kind == WEIGHT:
            _, k = rank.pending.pop()
            rank.holds -= weights[s]
        else:
            k = nexts[kind][s]
            nexts[kind][s] += 1
            if kind == FORWARD:
                rank.holds += weights[s]
            elif k < split[s][0] or k >= m - split[s][1]:
                rank.pending.append((s, k))
            else:
                kind = BACKWARD
                rank.holds -= weights[s]
        number = kind * size + s * m + k
        rank.program.append(number)
        rank.clock = end = now + cost[number]
        heapq.heappush(events, (end, r))
        if kind == FORWARD:
            if s == last:
                ready[INPUT][s * m + k] = end
            else:
                wakes, when = s + 1, end + delay[s * m + k]
                ready[FORWARD][wakes * m + k] = when
        elif kind != WEIGHT and s:
            wakes, when = s - 1, end + delay[size + s * m + k]
            ready[INPUT][wakes * m + k] = when
        if wakes >= 0 and ranks[placement[wakes]].asleep:
            heapq.heappush(events, (when, placement[wakes]))
    return [rank.program for rank in ranks]


def _limits(work: TaskGraph, rules: Rules) -> list[float]:
    """For each stage what its rank may hold at most when it starts a forward of it.

    Below the capacity by one of it and of each later stage of the rank: otherwise a rank full of
    early stages could wait for ever for room for the late ones.
    """
    limits = [0.0] * work.num_stages
    for r, mine in enumerate(work.stages):
        capacity = rules.capacity[r]
        # sums may be a little over for rounding
        left = capacity * (1 + 1e-9)
        for s in reversed(mine):
            left -= work.weights[s]
            limits[s] = left
        if left < 0:
            raise ScheduleError(
                f"rank {r} may hold {capacity:g}, but one microbatch of each of its stages "
                f"{mine} takes {capacity - left:g}; allow at least that much"
            )
    return limits


def merge_backward(work: TaskGraph, order: Order, allowance: float = 0.0) -> Order:
    """The order with a B for each I whose message can wait until a W in the next place has ended.

    No computation starts later than before. A full backward runs through autograd once and keeps
    nothing for its second half; a split one pays only if a rank waits for the first. That W may be
    of another microbatch: if it takes as long, the two change places. allowance: how much later
    than it is used a message may arrive; above 0 a computation may start later.
    """
    size, cost, needs = work.size, work.cost, work.needs
    _, arrived = work.arrivals(order)
    latest: dict[int, float] = {}
    for program in order:
        for number in program:
            if number // size in (INPUT, BACKWARD):
                slot = work.gives[number]
                start = arrived[slot] - work.delay[slot] - cost[number]
                latest[needs[number]] = start + allowance + work.tiny
    gone = -1
    joined: Order = []
    for program in order:
        places = {number: i for i, number in enumerate(program)}
        program = list(program)
        for i in range(len(program) - 1):
            first, second = program[i], program[i + 1]
            if first // size != INPUT or second // size != WEIGHT:
                continue
            own, joint = first + size * (WEIGHT - INPUT), first + size * (BACKWARD - INPUT)
            slot = work.gives[first]
            longer = cost[joint] - cost[first]
            if longer > cost[own] + work.tiny or cost[own] != cost[second]:
                continue
            if slot in latest and arrived[slot] + longer > latest[slot]:
                continue
            program[places[own]], places[second] = second, places[own]
            program[i], program[i + 1] = joint, gone
        joined.append(_by_age(work, [number for number in program if number != gone]))
    return joined


def _by_age(work: TaskGraph, program: list[int]) -> list[int]:
    """The program with the Ws of each stage, in the places that they have, oldest first."""
    size, m = work.size, work.num_microbatches
    weights: dict[int, list[int]] = {}
    for number in sorted(n for n in program if n // size == WEIGHT):
        weights.setdefault(number // m, []).append(number)
    queues = {stage: iter(numbers) for stage, numbers in weights.items()}
    return [next(queues[n // m]) if n // m in queues else n for n in program]

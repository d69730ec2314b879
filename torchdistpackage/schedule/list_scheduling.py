"""List scheduling: a free rank starts the first computation on its list that is possible.

A rank never starts a computation that would exceed its memory capacity, and it keeps memory for the
later chunks of what it starts, so no list deadlocks. Priorities are data (`Rules`). Gradients of
weights (W) fill gaps, as in the automatic schedules of Zero Bubble Pipeline Parallelism
(arXiv:2401.10241, section 3). `merge_backward` joins them with the first half of their backward
again if the split gains nothing.
"""

import heapq
import math
from dataclasses import dataclass
from typing import Self

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.engine import BACKWARD, FORWARD, INPUT, WEIGHT, Order, TaskGraph


@dataclass(frozen=True, slots=True)
class Rules:
    """The preferences and limits of list scheduling.

    priority: (forward, backward) of each stage; of several possible computations the one with the
        lowest number starts.
    capacity: memory that each rank may hold, in the unit of TaskGraph.weights.
    ahead: number of forwards that each stage may be ahead of its backwards, the warm-up's depth.
    split: numbers of first and of last micro-batches of each stage whose backward is split; their
        Ws fill gaps.
    max_deferred_w: number of Ws that each rank may defer; with more it runs one before all else.
    min_gap_fill: share of a W that must fit into a gap for the W to start in it.
    backward: False schedules only forwards.
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
        """Return rules that split every backward, with no limit but the capacity.

        capacity: None: a rank may hold everything.
        """
        m, everything = work.num_microbatches, (work.size,) * work.num_ranks
        return cls(
            priority,
            everything if capacity is None else capacity,
            (m,) * work.num_stages,
            ((m, 0),) * work.num_stages,
            everything,
        )


def deepest_first(num_stages: int) -> tuple[tuple[float, float], ...]:
    """Return priorities that prefer the latest stage, and its backward before its forward."""
    return tuple((-s, -s - 0.5) for s in range(num_stages))


def backward_first(num_stages: int) -> tuple[tuple[float, float], ...]:
    """Return priorities that prefer any backward, and then whatever is nearest to its end."""
    return tuple((num_stages - s, s - num_stages) for s in range(num_stages))


class _RankState:
    """State of one rank during scheduling: its clock, its memory, and its candidates in order."""

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
        """(stage, micro-batch) of each W that may run, the newest last."""


def list_order(work: TaskGraph, rules: Rules) -> Order:
    """Return the order that `rules` give for the costs of `work`.

    Raises:
        ScheduleError: a rank's capacity does not hold one micro-batch of each of its stages.
    """
    m, size, cost, delay = work.num_microbatches, work.size, work.cost, work.delay
    last = work.num_stages - 1
    placement, weights = work.placement, work.weights
    ahead, split, limits = rules.ahead, rules.split, _limits(work, rules)
    ranks = [
        _RankState(rank_stages, rules, late)
        for rank_stages, late in zip(work.stages, rules.max_deferred_w, strict=True)
    ]
    # Next micro-batch of each stage, and the time at which its input is ready, both by kind.
    nexts = [[0] * work.num_stages, [0] * work.num_stages]
    ready = [[math.inf] * size, [math.inf] * size]
    ready[FORWARD][:m] = [0.0] * m
    events = [(0.0, r) for r in range(len(ranks))]

    def pick(rank: _RankState, now: float) -> tuple[int, int, float]:
        """Return (kind, stage, earliest start) of the first possible one; kind -1 if none is."""
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
    """Return for each stage the most that its rank may hold when it starts a forward of it.

    The limit leaves room for one micro-batch of this and of each later stage of the rank. Otherwise
    a rank full of early stages could wait for ever for room for the late ones.
    """
    limits = [0.0] * work.num_stages
    for r, rank_stages in enumerate(work.stages):
        capacity = rules.capacity[r]
        # allow for rounding in sums of weights
        limit = capacity * (1 + 1e-9)
        for s in reversed(rank_stages):
            limit -= work.weights[s]
            limits[s] = limit
        if limit < 0:
            raise ScheduleError(
                f"rank {r} may hold {capacity:g}, but one microbatch of each of its stages "
                f"{rank_stages} takes {capacity - limit:g}; allow at least that much"
            )
    return limits


def merge_backward(work: TaskGraph, order: Order, allowance: float = 0.0) -> Order:
    """Replace an I and the W that follows it by a B, if no rank needs the I's message earlier.

    No computation then starts later than before. A full backward runs autograd once and keeps
    nothing for a second half; a split one pays only if a rank waits for the first half. The W that
    follows may be of another micro-batch: if it takes as long, the two Ws change places.

    allowance: time by which a message may arrive late; above 0 a computation may start later.
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
    removed = -1
    joined: Order = []
    for program in order:
        index_of = {number: i for i, number in enumerate(program)}
        program = list(program)
        for i in range(len(program) - 1):
            first, second = program[i], program[i + 1]
            if first // size != INPUT or second // size != WEIGHT:
                continue
            own_weight = first + size * (WEIGHT - INPUT)
            full = first + size * (BACKWARD - INPUT)
            slot = work.gives[first]
            longer = cost[full] - cost[first]
            if longer > cost[own_weight] + work.tiny or cost[own_weight] != cost[second]:
                continue
            if slot in latest and arrived[slot] + longer > latest[slot]:
                continue
            program[index_of[own_weight]], index_of[second] = second, index_of[own_weight]
            program[i], program[i + 1] = full, removed
        joined.append(_by_age(work, [number for number in program if number != removed]))
    return joined


def _by_age(work: TaskGraph, program: list[int]) -> list[int]:
    """Return the program with each stage's Ws, in their positions, sorted oldest first."""
    size, m = work.size, work.num_microbatches
    weights: dict[int, list[int]] = {}
    for number in sorted(n for n in program if n // size == WEIGHT):
        weights.setdefault(number // m, []).append(number)
    queues = {stage: iter(numbers) for stage, numbers in weights.items()}
    return [next(queues[n // m]) if n // m in queues else n for n in program]

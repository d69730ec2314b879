"""The simulator, which computes when each action of a schedule runs, given the cost of each.

A computation (kind, stage, micro-batch) is one int, and an `Order` is a list of ints for each rank.
Timing looks everything up in flat lists, so that a search can time orders by the hundred. Messages
have no number: they leave when their action ends, arrive their cost later, and delay no sender. A
`Timeline` shows the result by actions, to draw it or to compare it with a measured step.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple, Self

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Action, ActionKind, Program, Schedule, flatten
from torchdistpackage.schedule.costs import Costs, StageCosts

Order = list[list[int]]
"""The computations of each rank, as numbers of a `TaskGraph`."""

FORWARD, INPUT, WEIGHT, BACKWARD = range(4)
"""F, I, W and B, in the order in which `TaskGraph` numbers them."""

_KINDS = (ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B)


class TaskGraph:
    """All computations of one step of a pipeline, with their costs and dependencies.

    A computation has the number `kind * size + stage * num_microbatches + microbatch`, where `size`
    is stages times micro-batches. B stands for an I and its W.

    placement: for each stage its rank. costs: costs of as many stages.
    weights: memory that a rank holds for a micro-batch of each stage, in any unit; default: 1.
    """

    def __init__(
        self,
        placement: tuple[int, ...],
        num_microbatches: int,
        costs: StageCosts | None = None,
        weights: tuple[float, ...] | None = None,
    ) -> None:
        self.placement = placement
        self.num_stages = len(placement)
        self.num_ranks = max(placement) + 1
        self.num_microbatches = m = num_microbatches
        self.weights = weights or (1.0,) * self.num_stages
        self.costs = StageCosts.of(costs or StageCosts.uniform(len(placement)), len(placement))
        self.size = size = self.num_stages * m
        rows = (self.costs.forward, self.costs.input, self.costs.weight, self.costs.backward)
        self.cost = [x for row in rows for x in row for _ in range(m)]
        self.tiny = 1e-9 * max(self.cost)
        """Largest difference of two times that counts as rounding."""
        # A computation needs a slot and fills one: F of (stage, microbatch) fills slot
        # stage * m + microbatch, I and B that slot + size, and W one that nothing needs.
        forwards, gradients = range(size), range(size, 2 * size)
        self.gives = [*forwards, *gradients, *range(2 * size, 3 * size), *gradients]
        # The last stage's backwards need its own forwards, all others need the next stage's.
        needed = [*range(size + m, 2 * size), *range(size - m, size)]
        self.needs = [*repeat(-1, m), *range(size - m), *needed, *repeat(-1, size), *needed]
        self.delay = [0.0] * (3 * size)
        for stage in range(self.num_stages - 1):
            if placement[stage] != placement[stage + 1]:
                message = self.costs.message[stage]
                forward, back = stage * m, size + (stage + 1) * m
                self.delay[forward : forward + m] = self.delay[back : back + m] = [message] * m
        self.stages = [
            [s for s, rank in enumerate(placement) if rank == r] for r in range(self.num_ranks)
        ]

    def number(self, kind: int, stage: int, microbatch: int) -> int:
        """Return the number of a computation."""
        return kind * self.size + stage * self.num_microbatches + microbatch

    def arrivals(
        self, order: Order, log: list[tuple[int, int, float, float]] | None = None
    ) -> tuple[list[float], list[float]]:
        """Return when each rank ends, and when each slot is filled and has arrived.

        All ends are infinite in a deadlock. A rank computes in its order, and each computation
        starts as soon as the slot it needs has arrived.

        log: gets (rank, index in its order, start, end) of each computation, after those it needs.
        """
        needs, gives, cost, delay = self.needs, self.gives, self.cost, self.delay
        arrived = [-1.0] * (3 * self.size)
        waiting = [-1] * (3 * self.size)
        clock, positions = [0.0] * len(order), [0] * len(order)
        runnable = list(range(len(order)))[::-1]
        while runnable:
            rank = runnable.pop()
            time, i, program = clock[rank], positions[rank], order[rank]
            for number in program[i:] if i else program:
                need = needs[number]
                if need >= 0:
                    arrival = arrived[need]
                    if arrival < 0:
                        waiting[need] = rank
                        break
                    if arrival > time:
                        time = arrival
                if log is not None:
                    log.append((rank, i, time, time + cost[number]))
                time += cost[number]
                slot = gives[number]
                arrived[slot] = time + delay[slot]
                if waiting[slot] >= 0:
                    runnable.append(waiting[slot])
                i += 1
            clock[rank], positions[rank] = time, i
        stuck = any(i < len(program) for i, program in zip(positions, order, strict=True))
        return ([math.inf] * len(order) if stuck else clock), arrived

    def makespan(self, order: Order) -> float:
        """Return the time from the start of the first computation to the end of the last."""
        return max(self.arrivals(order)[0])

    def lowest_makespan(self) -> float:
        """Return a lower bound: a rank waits for its first input, and then computes all
        its work.
        """
        c, m = self.costs, self.num_microbatches
        full = [
            f + min(b, i + w)
            for f, b, i, w in zip(c.forward, c.backward, c.input, c.weight, strict=True)
        ]
        starts = [0.0] * self.num_stages
        for s in range(1, self.num_stages):
            starts[s] = starts[s - 1] + c.forward[s - 1] + self.delay[(s - 1) * m]
        return max(
            starts[rank_stages[0]] + m * sum(full[s] for s in rank_stages)
            for rank_stages in self.stages
        )

    def room(self) -> tuple[float, ...]:
        """Return the memory that each rank needs at least: one micro-batch of all its stages."""
        return tuple(sum(self.weights[s] for s in rank_stages) for rank_stages in self.stages)

    def held(self, order: Order) -> list[float]:
        """Return the peak memory of each rank; an F is held until its B, or its W if split."""
        size = self.size
        weight = [x for x in self.weights for _ in range(self.num_microbatches)]
        peaks: list[float] = []
        for program in order:
            current = peak = 0.0
            for number in program:
                if number < size:
                    current += weight[number]
                    peak = max(peak, current)
                elif number >= 2 * size:
                    current -= weight[number % size]
            peaks.append(peak)
        return peaks

    def schedule(self, name: str, order: Order) -> Schedule:
        """Return the order as a Schedule, computations only."""
        m, stages = self.num_microbatches, range(self.num_stages)
        used = {number // self.size for program in order for number in program}
        actions: list[Action] = []
        for number, kind in enumerate(_KINDS):
            # as many where none is used, so that numbers are indices
            some = stages if number in used else ()
            actions += [Action(s, kind, k) for s in some for k in range(m)]
            actions += actions[:1] * (self.size * (number + 1) - len(actions))
        programs = tuple(tuple(actions[number] for number in program) for program in order)
        return Schedule(name, self.num_stages, m, self.placement, programs)

    def order(self, schedule: Schedule) -> Order:
        """Return a schedule's computations as numbers, without messages.

        Raises:
            ScheduleError: the schedule has another placement or number of micro-batches.
        """
        m = self.num_microbatches
        if (schedule.placement, schedule.num_microbatches) != (self.placement, m):
            raise ScheduleError(
                f"{schedule.name} places {schedule.num_microbatches} microbatches on ranks "
                f"{schedule.placement}, not {m} on {self.placement}"
            )
        number = {kind: i for i, kind in enumerate(_KINDS)}
        return [
            [self.number(number[kind], s, k) for s, kind, k in flatten(program) if kind in number]
            for program in schedule.programs
        ]


DEFAULT_COSTS: Mapping[ActionKind, float] = {ActionKind.F: 1.0, ActionKind.B: 2.0}
"""Default costs: a backward has two matmuls for each one of the forward; messages are free."""

_LIVE = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.W: -1}


class Span(NamedTuple):
    """One action on the time axis, in the unit of the costs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times of all actions of a step, simulated or measured.

    spans: for each pipe index its actions in order of start. A simulation has only computations; a
        measurement also has the waits for messages, under the message's kind.
    total: end of the last action.
    bubble: share of the ranks' time in which they computed nothing.
    peak_live: for each stage the most micro-batches held at once: from the start of their F to the
        end of their B, or of their W if the backward is split. 0 without backwards.
    peak_live_of_rank: for each pipe index the same, counted over all its stages together.
    """

    name: str
    spans: tuple[tuple[Span, ...], ...]
    total: float
    bubble: float
    peak_live: tuple[int, ...]
    peak_live_of_rank: tuple[int, ...]

    @classmethod
    def of(cls, name: str, spans: Iterable[Iterable[Span]], num_stages: int) -> Self:
        """Return the timeline of these spans, one row for each pipe index, in order of start."""
        rows = tuple(map(tuple, spans))
        total = max((span.end for row in rows for span in row), default=0.0)
        bubble = 1 - sum(map(busy, rows)) / (len(rows) * total) if total else 0.0
        return cls(name, rows, total, bubble, *_peak_live(rows, num_stages))

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The share of idle time of each pipe index."""
        return tuple(1 - busy(row) / self.total if self.total else 0.0 for row in self.spans)


def busy(row: Iterable[Span]) -> float:
    """Return how long one rank computed."""
    return sum(span.end - span.start for span in row if not span.action.kind.is_message)


def simulate(schedule: Schedule, costs: Costs = DEFAULT_COSTS, steps: int = 1) -> Timeline:
    """Simulate `schedule` with the costs of its actions.

    steps: number of steps back to back. A rank starts the next step when its own last one has
        ended, not when all have. Micro-batch i of step k gets the number i + k x num_microbatches.

    Raises:
        ScheduleError: a deadlock; the message lists what each rank waits for.
    """
    schedule = _repeated(schedule, steps)
    spans: list[list[Span]] = [[] for _ in schedule.programs]
    for span in replay(schedule, costs):
        spans[schedule.placement[span.action.stage]].append(span)
    return Timeline.of(schedule.name, spans, schedule.num_stages)


def replay(schedule: Schedule, costs: Costs = DEFAULT_COSTS) -> list[Span]:
    """Return all computations with their times, each after those it uses; raise as `simulate`.

    It ignores the messages of a program, because their times follow from the computations.
    """
    stage_costs = StageCosts.of(costs, schedule.num_stages)
    work = TaskGraph(schedule.placement, schedule.num_microbatches, stage_costs)
    programs = tuple(map(_computations, schedule.programs))
    order = work.order(replace(schedule, programs=programs))
    order = [_up_to_early_weight(work, row) for row in order]
    log: list[tuple[int, int, float, float]] = []
    work.arrivals(order, log)
    if len(log) < sum(map(len, programs)):
        next_index = Counter(rank for rank, *_ in log)
        stuck = [r for r, program in enumerate(programs) if next_index[r] < len(program)]
        waiting = ", ".join(f"rank {r} at {programs[r][next_index[r]]}" for r in stuck)
        raise ScheduleError(
            f"{schedule.name}: deadlock; {waiting}: each uses what never comes or stands later in "
            f"the order; put it after the actions that it uses"
        )
    return [Span(programs[rank][index], start, end) for rank, index, start, end in log]


def _up_to_early_weight(work: TaskGraph, row: list[int]) -> list[int]:
    """Return a row up to a W that comes before its I, which no rank can run."""
    size, gives = work.size, work.gives
    filled: set[int] = set()
    for index, number in enumerate(row):
        if number // size == WEIGHT and number - size not in filled:
            return row[:index]
        filled.add(gives[number])
    return row


def _computations(program: Program) -> tuple[Action, ...]:
    """Return the actions of a program that compute."""
    return tuple([action for action in flatten(program) if not action.kind.is_message])


def _repeated(schedule: Schedule, steps: int) -> Schedule:
    """Return the schedule of `steps` steps back to back, without messages."""
    if steps < 1:
        raise ScheduleError(f"{schedule.name}: {steps} steps; simulate 1 or more")
    if steps == 1:
        return schedule
    m = schedule.num_microbatches
    programs = tuple(
        tuple(
            action._replace(microbatch=action.microbatch + step * m)
            for step in range(steps)
            for action in _computations(program)
        )
        for program in schedule.programs
    )
    return replace(schedule, num_microbatches=steps * m, programs=programs)


def _peak_live(
    rows: tuple[tuple[Span, ...], ...], num_stages: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the most micro-batches held at once, for each stage and for each rank."""
    peak, peak_of_rank = [0] * num_stages, [0] * len(rows)
    trains = any(span.action.kind.gives_gradient for row in rows for span in row)
    for rank, row in enumerate(rows if trains else ()):
        by_stage, peak_of_rank[rank] = most_live(span.action for span in row)
        for stage, number in by_stage.items():
            peak[stage] = max(peak[stage], number)
    return tuple(peak), tuple(peak_of_rank)


def most_live(actions: Iterable[Action]) -> tuple[dict[int, int], int]:
    """Return the most micro-batches that a rank holds at once of each stage, and of all together,
    if it runs these actions in their order."""
    live, peak = Counter[int](), dict[int, int]()
    of_rank = peak_of_rank = 0
    for stage, kind, _ in actions:
        if change := _LIVE.get(kind, 0):
            live[stage] += change
            of_rank += change
            peak[stage] = max(peak.get(stage, 0), live[stage])
            peak_of_rank = max(peak_of_rank, of_rank)
    return peak, peak_of_rank

"""The simulator: when each action of a schedule runs, if every action takes a known time.

Computation (kind, stage, microbatch) is one int, an `Order` holds for each rank the list of its
ints, and all that timing needs is looked up in flat lists, so that orders are timed by the hundred.
Messages have no number: they leave when their action ends and arrive their cost later, and hold up
no rank. A `Timeline` is a view of that by actions: what is drawn, and what a measured step is
compared with.
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
"""For each rank its computations, as numbers of a `TaskGraph`."""

FORWARD, INPUT, WEIGHT, BACKWARD = range(4)
"""F, I, W and B, in the order in which `TaskGraph` numbers them."""

_KINDS = (ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B)


class TaskGraph:
    """The work of the ranks of a pipe in one step, and its costs.

    Number of a computation: `kind * size + stage * num_microbatches + microbatch`, where `size` is
    stages times microbatches. B ends where I would: it takes the place of an I and its W.

    placement: for each stage its rank. costs: as many stages. weights: what a rank holds of a
    microbatch of each stage, in any unit; 1 if left out.
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
        """Times that differ by no more than this are the same but for rounding."""
        # What a computation waits for and what it hands on are slots: F of (stage, microbatch)
        # fills slot stage * m + microbatch, I and B the one `size` further, W an idle one.
        forwards, gradients = range(size), range(size, 2 * size)
        self.gives = [*forwards, *gradients, *range(2 * size, 3 * size), *gradients]
        # The last stage's gradients come from its own forwards, all others from the stage after.
        after = [*range(size + m, 2 * size), *range(size - m, size)]
        self.needs = [*repeat(-1, m), *range(size - m), *after, *repeat(-1, size), *after]
        self.delay = [0.0] * (3 * size)
        for stage in range(self.num_stages - 1):
            if placement[stage] != placement[stage + 1]:
                message = self.costs.message[stage]
                there, back = stage * m, size + (stage + 1) * m
                self.delay[there : there + m] = self.delay[back : back + m] = [message] * m
        self.stages = [
            [s for s, rank in enumerate(placement) if rank == r] for r in range(self.num_ranks)
        ]

    def number(self, kind: int, stage: int, microbatch: int) -> int:
        return kind * self.size + stage * self.num_microbatches + microbatch

    def arrivals(
        self, order: Order, log: list[tuple[int, int, float, float]] | None = None
    ) -> tuple[list[float], list[float]]:
        """When each rank ends, and when what each slot holds is there for what needs it.

        All ends are infinite in a deadlock. A rank computes in its order, each computation as soon
        as what it needs is there. log: is given (rank, place in its order, start, end) of each
        computation, listed after those that it needs.
        """
        needs, gives, cost, delay = self.needs, self.gives, self.cost, self.delay
        arrived = [-1.0] * (3 * self.size)
        waiting = [-1] * (3 * self.size)
        clock, at = [0.0] * len(order), [0] * len(order)
        runnable = list(range(len(order)))[::-1]
        while runnable:
            rank = runnable.pop()
            now, i, program = clock[rank], at[rank], order[rank]
            for number in program[i:] if i else program:
                need = needs[number]
                if need >= 0:
                    arrival = arrived[need]
                    if arrival < 0:
                        waiting[need] = rank
                        break
                    if arrival > now:
                        now = arrival
                if log is not None:
                    log.append((rank, i, now, now + cost[number]))
                now += cost[number]
                slot = gives[number]
                arrived[slot] = now + delay[slot]
                if waiting[slot] >= 0:
                    runnable.append(waiting[slot])
                i += 1
            clock[rank], at[rank] = now, i
        stuck = any(i < len(program) for i, program in zip(at, order, strict=True))
        return ([math.inf] * len(order) if stuck else clock), arrived

    def makespan(self, order: Order) -> float:
        """From the start of the first computation to the end of the last."""
        return max(self.arrivals(order)[0])

    def lowest_makespan(self) -> float:
        """That no order goes below: a rank waits for its first input, then computes all it has."""
        c, m = self.costs, self.num_microbatches
        full = [
            f + min(b, i + w)
            for f, b, i, w in zip(c.forward, c.backward, c.input, c.weight, strict=True)
        ]
        starts = [0.0] * self.num_stages
        for s in range(1, self.num_stages):
            starts[s] = starts[s - 1] + c.forward[s - 1] + self.delay[(s - 1) * m]
        return max(starts[mine[0]] + m * sum(full[s] for s in mine) for mine in self.stages)

    def room(self) -> tuple[float, ...]:
        """For each rank the least that it must hold to run: one microbatch of all its stages."""
        return tuple(sum(self.weights[s] for s in mine) for mine in self.stages)

    def held(self, order: Order) -> list[float]:
        """For each rank the most that it holds: of each F until its B, or its W if split."""
        size = self.size
        weight = [x for x in self.weights for _ in range(self.num_microbatches)]
        peaks: list[float] = []
        for program in order:
            now = peak = 0.0
            for number in program:
                if number < size:
                    now += weight[number]
                    peak = max(peak, now)
                elif number >= 2 * size:
                    now -= weight[number % size]
            peaks.append(peak)
        return peaks

    def schedule(self, name: str, order: Order) -> Schedule:
        """The order as a Schedule, computations only."""
        m, stages = self.num_microbatches, range(self.num_stages)
        actions = [Action(s, kind, k) for kind in _KINDS for s in stages for k in range(m)]
        programs = tuple(tuple(actions[number] for number in program) for program in order)
        return Schedule(name, self.num_stages, m, self.placement, programs)

    def order(self, schedule: Schedule) -> Order:
        """A schedule's computations as numbers, without messages; raises ScheduleError for one of
        other stages or microbatches."""
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
"""A backward is two matrix products for each of the forward's one; messages are free."""

_LIVE = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.W: -1}


class Span(NamedTuple):
    """One action on the time axis, in the unit of the costs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When everything happened.

    spans: for each pipe index its actions in order of start. Simulated, these are the ones that
        compute; measured, the waits for messages are there too, under the message's kind.
    total: end of the last action.
    bubble: share of the ranks' time in which they computed nothing.
    peak_live: for each stage the most microbatches held at once: from the start of their F to
        the end of their B, or of their W where the backward is split. 0 without backwards.
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
        """The timeline of these spans, one row for each pipe index, in order of start."""
        rows = tuple(map(tuple, spans))
        total = max((span.end for row in rows for span in row), default=0.0)
        bubble = 1 - sum(map(busy, rows)) / (len(rows) * total) if total else 0.0
        return cls(name, rows, total, bubble, *_peak_live(rows, num_stages))

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each pipe index its own `bubble`."""
        return tuple(1 - busy(row) / self.total if self.total else 0.0 for row in self.spans)


def busy(row: Iterable[Span]) -> float:
    """How long one rank computed."""
    return sum(span.end - span.start for span in row if not span.action.kind.is_message)


def simulate(schedule: Schedule, costs: Costs = DEFAULT_COSTS, steps: int = 1) -> Timeline:
    """Run `schedule` on paper.

    steps: so many back to back. A rank starts the next step when it has ended its own, not when all
        have; microbatch i of step k is written as i + k x num_microbatches.

    Raises:
        ScheduleError: a deadlock; the text lists what each rank waits for.
    """
    schedule = _repeated(schedule, steps)
    spans: list[list[Span]] = [[] for _ in schedule.programs]
    for span in replay(schedule, costs):
        spans[schedule.placement[span.action.stage]].append(span)
    return Timeline.of(schedule.name, spans, schedule.num_stages)


def replay(schedule: Schedule, costs: Costs = DEFAULT_COSTS) -> list[Span]:
    """All computations with their times, each after those it uses; raises as `simulate`.

    The messages of a program are passed over: when they travel follows from the computations.
    """
    stage_costs = StageCosts.of(costs, schedule.num_stages)
    work = TaskGraph(schedule.placement, schedule.num_microbatches, stage_costs)
    programs = tuple(map(_computations, schedule.programs))
    order = work.order(replace(schedule, programs=programs))
    order = [_up_to_early_weight(work, row) for row in order]
    log: list[tuple[int, int, float, float]] = []
    work.arrivals(order, log)
    if len(log) < sum(map(len, programs)):
        at = Counter(rank for rank, *_ in log)
        stuck = [r for r, program in enumerate(programs) if at[r] < len(program)]
        waiting = ", ".join(f"rank {r} at {programs[r][at[r]]}" for r in stuck)
        raise ScheduleError(
            f"{schedule.name}: deadlock; {waiting}: each uses what never comes or stands later in "
            f"the order; put it after the actions that it uses"
        )
    return [Span(programs[rank][place], start, end) for rank, place, start, end in log]


def _up_to_early_weight(work: TaskGraph, row: list[int]) -> list[int]:
    """Actions that a rank can run before a W that stands before the first half of its backward."""
    size, gives, given = work.size, work.gives, set[int]()
    for place, number in enumerate(row):
        if number // size == WEIGHT and number - size not in given:
            return row[:place]
        given.add(gives[number])
    return row


def _computations(program: Program) -> tuple[Action, ...]:
    return tuple([action for action in flatten(program) if not action.kind.is_message])


def _repeated(schedule: Schedule, steps: int) -> Schedule:
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
    live, peak, peak_of_rank = [0] * num_stages, [0] * num_stages, [0] * len(rows)
    trains = any(span.action.kind.gives_gradient for row in rows for span in row)
    for rank, row in enumerate(rows if trains else ()):
        held = 0
        for (stage, kind, _), _, _ in row:
            change = _LIVE.get(kind, 0)
            live[stage] += change
            held += change
            peak[stage] = max(peak[stage], live[stage])
            peak_of_rank[rank] = max(peak_of_rank[rank], held)
    return tuple(peak), tuple(peak_of_rank)

"""Analysis of a run's spans: align the clocks, derive the cost of each action, explain idle time.

Each rank times its actions on its own clock. A rank that waited for a message used it the moment it
arrived. The quickest such messages each way are assumed to take equal time, which gives both the
difference of two clocks and the time of a message.

To explain a bubble, the schedule is simulated with one more measured effect at a time, and each
effect is what the bubble grows by. Imbalance is the effect of unequal stages, host time that of
gaps between a rank's actions, and message wait the rest.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import add, sub
from statistics import fmean, median
from typing import NamedTuple

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Action, ActionKind, Schedule
from torchdistpackage.schedule.costs import StageCosts
from torchdistpackage.schedule.engine import Span, Timeline, busy, simulate

Spans = Sequence[Sequence[Span]]
"""The spans of one step for each pipe index, in seconds of that rank's clock."""

_SHORT = 0.02
"""Share of a computation's time below which a wait counts as none: the message was there."""


def costs_of(
    spans: Spans, num_stages: int, average: Callable[[list[float]], float] = median
) -> StageCosts:
    """Return the seconds of each stage's actions, and derive those of kinds that never ran.

    A message takes the time of the quickest one between two ranks, from the end of its action to
    the start of its user. If a stage ran only B, its I and W divide B as on the other stages.

    Raises:
        ScheduleError: a stage has no forward in the spans.
    """
    durations: defaultdict[tuple[ActionKind, int], list[float]] = defaultdict(list)
    for row in spans:
        for action, start, end in row:
            durations[action.kind, action.stage].append(end - start)
    if absent := [s for s in range(num_stages) if not durations[ActionKind.F, s]]:
        raise ScheduleError(
            f"no forward of stage {', '.join(map(str, absent))} among the spans of {len(spans)} "
            f"pipe ranks; pass those of every rank, of a step with all {num_stages} stages"
        )

    zeros = (0.0,) * num_stages

    def by_stage(kind: ActionKind, default: Sequence[float] = zeros) -> tuple[float, ...]:
        rows = [durations[kind, s] for s in range(num_stages)]
        return tuple(average(x) if x else y for x, y in zip(rows, default, strict=True))

    first, second, full = by_stage(ActionKind.I), by_stage(ActionKind.W), by_stage(ActionKind.B)
    parts = sum(first) + sum(second)
    share = sum(first) / parts if parts else 0.5
    first = by_stage(ActionKind.I, [b * share for b in full])
    second = by_stage(ActionKind.W, [b * (1 - share) for b in full])
    full = by_stage(ActionKind.B, [i + w for i, w in zip(first, second, strict=True)])
    rank_of = {span.action.stage: rank for rank, rows in enumerate(spans) for span in rows}
    quickest = _quickest(spans)
    message = [
        0.0 if rank_of[s] == rank_of[s + 1] else _link(quickest, rank_of[s], rank_of[s + 1])[0]
        for s in range(num_stages - 1)
    ]
    return StageCosts(by_stage(ActionKind.F), full, first, second, (*message, 0.0))


def aligned(spans: Spans) -> list[list[Span]]:
    """Return the spans on one clock that starts with the first computation, without earlier waits.

    If all messages of one direction were early, it is wrong by the time of one in the other.
    """
    quickest = _quickest(spans)
    shift, reached = {0: 0.0}, [0]
    for a in reached:  # which grows
        for b in range(len(spans)):
            if b not in shift and ((a, b) in quickest or (b, a) in quickest):
                shift[b] = shift[a] + _link(quickest, a, b)[1]
                reached.append(b)
    moved = [
        [Span(a, start - shift.get(r, 0.0), end - shift.get(r, 0.0)) for a, start, end in row]
        for r, row in enumerate(spans)
    ]
    origin = min(
        (s.start for row in moved for s in row if not s.action.kind.is_message), default=0.0
    )
    return [
        [Span(a, max(0.0, start - origin), end - origin) for a, start, end in row if end > origin]
        for row in moved
    ]


class _Quickest(NamedTuple):
    """The quickest message from one rank to another."""

    early: bool
    """True if all arrived before they were needed, so that even the quickest took less time."""
    time_s: float
    """Least time from the sender's end, on its clock, to the user's start, on its own clock."""


def _quickest(spans: Spans) -> dict[tuple[int, int], _Quickest]:
    """Return the quickest messages by (from, to)."""
    users: dict[Action, tuple[int, float]] = {}
    waits: dict[Action, float] = {}
    for rank, row in enumerate(spans):
        for action, start, end in row:
            if action.kind.is_message:
                waits[action] = end - start
            else:
                users[action.result] = (rank, start)
    computing = [end - start for row in spans for a, start, end in row if not a.kind.is_message]
    short = _SHORT * median(computing) if computing else 0.0
    quickest: dict[tuple[int, int], _Quickest] = {}
    for rank, row in enumerate(spans):
        for action, _, end in row:
            send = action.send
            if send is None:
                continue
            to, start = users.get(action.result._replace(stage=send.peer), (rank, 0.0))
            if to != rank:
                best = quickest.get((rank, to), _Quickest(True, math.inf))
                early = best.early and waits.get(send.match, 0.0) <= short
                quickest[rank, to] = _Quickest(early, min(best.time_s, start - end))
    return quickest


def _link(quickest: dict[tuple[int, int], _Quickest], a: int, b: int) -> tuple[float, float]:
    """Return the time of a message between two ranks, and by how much b's clock is ahead of a's.

    With messages in one direction only, as in evaluation, it assumes that the clocks agree. If all
    messages of one direction were early, it assumes that those of the other took no time.
    """
    forward, back = quickest.get((a, b)), quickest.get((b, a))
    if forward is None or back is None:
        only = forward or back
        return (0.0 if only is None else max(0.0, only.time_s)), 0.0
    if forward.early != back.early:
        return 0.0, -back.time_s if forward.early else forward.time_s
    return max(0.0, (forward.time_s + back.time_s) / 2), (forward.time_s - back.time_s) / 2


@dataclass(frozen=True, slots=True)
class BubbleAttribution:
    """A measured step and its simulation; prints as one line of a log.

    measured, predicted: timelines in seconds; the prediction uses the measured mean costs, with
        messages.
    alone: for each pipe index the bubble of the schedule with equal stages and free messages.
    imbalance, host, message_wait: for each pipe index the part that each adds, as shares of the
        step; with `alone` they sum to the measured bubbles. Negative if an effect helps a rank.
    """

    measured: Timeline
    predicted: Timeline
    alone: tuple[float, ...]
    imbalance: tuple[float, ...]
    host: tuple[float, ...]
    message_wait: tuple[float, ...]

    def __str__(self) -> str:
        ranks = " ".join(f"{bubble:.1%}" for bubble in self.measured.bubbles)
        imbalance, wait, host = (
            100 * fmean(parts) for parts in (self.imbalance, self.message_wait, self.host)
        )
        return (
            f"{self.measured.name}: bubble {self.measured.bubble:.1%} (by pipe rank {ranks}), "
            f"by its costs {self.predicted.bubble:.1%}; the schedule alone "
            f"{fmean(self.alone):.1%}, imbalance {imbalance:+.1f}, message wait {wait:+.1f}, "
            f"host time {host:+.1f} points"
        )


def attribute_bubble(schedule: Schedule, spans: Spans) -> BubbleAttribution:
    """Compare one measured step of `schedule` with simulations of it.

    spans: spans of every pipe index, from `Executor.run(record=True)`: computations and, under the
        message's kind, waits.

    Raises:
        ScheduleError: a stage of the schedule has no forward in the spans.
    """
    rows = aligned(spans)
    measured = Timeline.of(schedule.name, rows, schedule.num_stages)
    costs = costs_of(rows, schedule.num_stages, fmean)
    free = replace(costs, message=(0.0,) * schedule.num_stages)
    alone = simulate(schedule, _equal(free)).bubbles
    uneven = simulate(schedule, free).bubbles
    hosted = simulate(schedule, _plus(free, [_host_s(rows[r]) for r in schedule.placement])).total
    with_host = [1 - busy(row) / hosted if hosted else 0.0 for row in rows]
    return BubbleAttribution(
        measured,
        simulate(schedule, costs),
        alone,
        tuple(map(sub, uneven, alone)),
        tuple(map(sub, with_host, uneven)),
        tuple(map(sub, measured.bubbles, with_host)),
    )


def _host_s(row: Sequence[Span]) -> float:
    """Return seconds an action that a rank neither computed nor waited, within its spans."""
    computations = sum(not span.action.kind.is_message for span in row)
    if not computations:
        return 0.0
    inside = max(span.end for span in row) - min(span.start for span in row)
    return max(0.0, inside - sum(span.end - span.start for span in row)) / computations


def _plus(costs: StageCosts, more: Sequence[float]) -> StageCosts:
    """Return costs with `more` added to every computation of each stage."""
    computations = (costs.forward, costs.backward, costs.input, costs.weight)
    return StageCosts(*(tuple(map(add, row, more)) for row in computations), message=costs.message)


def _equal(costs: StageCosts) -> StageCosts:
    """Return costs in which every stage has the mean of all stages."""
    means = [fmean(row) for row in (costs.forward, costs.input, costs.weight)]
    return StageCosts.uniform(len(costs.forward), *means, backward=fmean(costs.backward))

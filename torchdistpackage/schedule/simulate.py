"""A schedule on paper: when each action runs, if every action takes a known time.

A rank follows its program; a message starts when both ends have reached it. The result, a
Timeline, is what is drawn and what the measured step is compared with.
"""

from dataclasses import dataclass

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Action, Batch, Costs, Kind, Schedule

DEFAULT_COSTS: Costs = {Kind.F: 1.0, Kind.B: 2.0}
"""A backward is two matrix products for each of the forward's one; messages are free."""


@dataclass(frozen=True, slots=True)
class Span:
    """One action on the time axis, in the unit of the costs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When everything happened.

    spans: for each pipe index its actions in order of start.
    total: end of the last action.
    bubble: share of the ranks' time in which they computed nothing.
    peak_live: for each stage the most microbatches whose forward ran but not yet their backward.
    """

    name: str
    spans: tuple[tuple[Span, ...], ...]
    total: float
    bubble: float
    peak_live: tuple[int, ...]


def simulate(schedule: Schedule, costs: Costs = DEFAULT_COSTS) -> Timeline:
    """Run `schedule` on paper; see Timeline for what comes out.

    Raises:
        ScheduleError: no rank can move; the text lists what each one waits for.
    """
    num_ranks = len(schedule.programs)
    clock, at = [0.0] * num_ranks, [0] * num_ranks
    reached: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in range(num_ranks)]

    def advance(rank: int) -> bool:
        """One step of `rank`, if all it takes part in has been reached by both ends."""
        step = schedule.programs[rank][at[rank]]
        actions = step.actions if isinstance(step, Batch) else (step,)
        for action in actions:
            reached.setdefault(action, clock[rank])
        messages = [a for a in actions if a.kind.is_message]
        if any(a.match not in reached for a in messages):
            return False
        done = clock[rank]
        for action in actions:
            both = max(reached[action], reached[action.match]) if messages else clock[rank]
            end = both + costs.get(action.kind, 0.0)
            spans[rank].append(Span(action, both, end))
            done = max(done, end)
        clock[rank], at[rank] = done, at[rank] + 1
        return True

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(schedule.programs):
            while at[rank] < len(program) and advance(rank):
                moved = True
    stuck = [r for r in range(num_ranks) if at[r] < len(schedule.programs[r])]
    if stuck:
        waiting = ", ".join(f"rank {r} at {schedule.programs[r][at[r]]}" for r in stuck)
        raise ScheduleError(f"{schedule.name}: nobody can move; {waiting}")
    total = max(clock)
    busy = sum(s.end - s.start for row in spans for s in row if not s.action.kind.is_message)
    bubble = 1 - busy / (num_ranks * total) if total else 0.0
    return Timeline(
        schedule.name, tuple(map(tuple, spans)), total, bubble, _peak_live(schedule, spans)
    )


def _peak_live(schedule: Schedule, spans: list[list[Span]]) -> tuple[int, ...]:
    live, peak = [0] * schedule.num_stages, [0] * schedule.num_stages
    for row in spans:
        for span in row:
            stage = span.action.stage
            if span.action.kind is Kind.F and schedule.has_backward:
                live[stage] += 1
                peak[stage] = max(peak[stage], live[stage])
            elif span.action.kind is Kind.B:
                live[stage] -= 1
    return tuple(peak)

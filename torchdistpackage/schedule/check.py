"""Whether a schedule can run: complete, in order, and never stuck.

Messages are checked as *unbuffered*: a send ends only when its receive has been posted, and
the other way round. Real transports buffer sometimes; a program that is safe here is safe
on all of them.
"""

from collections import Counter

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Action, Batch, Kind, Program, Schedule, flatten


def check(schedule: Schedule) -> None:
    """Raise unless every action is there once, in a possible order, and all ranks finish.

    Raises:
        ScheduleError: lists what is missing, doubled, misplaced, or whom each rank waits for.
    """
    _check_complete(schedule)
    _check_order(schedule)
    _check_unbuffered(schedule)


def _check_complete(schedule: Schedule) -> None:
    p, m = schedule.num_stages, schedule.num_microbatches
    kinds = (Kind.F, Kind.B) if schedule.has_backward else (Kind.F,)
    expected = {Action(s, k, i) for s in range(p) for k in kinds for i in range(m)}
    for action in tuple(expected):
        forward = action.kind is Kind.F
        target = action.stage + (1 if forward else -1)
        if 0 <= target < p and schedule.placement[target] != schedule.placement[action.stage]:
            send = Action(action.stage, Kind.SEND_F if forward else Kind.SEND_B, action.microbatch)
            expected |= {send, send.match}
    found = Counter(a for program in schedule.programs for a in flatten(program))
    problems = {
        "missing": expected - found.keys(),
        "unexpected": found.keys() - expected,
        "listed twice": {a for a, count in found.items() if count > 1},
        "on the wrong rank": {
            a
            for i, program in enumerate(schedule.programs)
            for a in flatten(program)
            if a.stage < p and schedule.placement[a.stage] != i
        },
    }
    texts = [f"{what}: {_some(actions)}" for what, actions in problems.items() if actions]
    if texts:
        raise ScheduleError(
            f"{schedule.name} with {p} stages, {m} microbatches: {'; '.join(texts)}"
        )


def _check_order(schedule: Schedule) -> None:
    """On its own rank each action comes after what it uses."""
    for index, program in enumerate(schedule.programs):
        place = {action: i for i, step in enumerate(program) for action in _opened(step)}
        for action, i in place.items():
            for need in needs(action, schedule):
                if need in place and place[need] >= i:
                    raise ScheduleError(
                        f"{schedule.name}: rank {index} runs {action} at step {i} but {need}, "
                        f"which it uses, only at step {place[need]}"
                    )


def needs(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """The actions of the same rank that must have ended before `action` starts."""
    s, m = action.stage, action.microbatch
    last = schedule.num_stages - 1

    def from_stage(other: int, kind: Kind, receive: Kind) -> tuple[Action, ...]:
        if not 0 <= other <= last:
            return ()
        near = schedule.placement[other] == schedule.placement[s]
        return (Action(other, kind, m) if near else Action(s, receive, m),)

    match action.kind:
        case Kind.F:
            return from_stage(s - 1, Kind.F, Kind.RECV_F)
        case Kind.B:
            return (Action(s, Kind.F, m), *from_stage(s + 1, Kind.B, Kind.RECV_B))
        case Kind.SEND_F:
            return (Action(s, Kind.F, m),)
        case Kind.SEND_B:
            return (Action(s, Kind.B, m),)
        case _:
            return ()


def _check_unbuffered(schedule: Schedule) -> None:
    """Run all programs with messages that end only when both ends are posted."""
    at = [0] * len(schedule.programs)
    posted: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for index, program in enumerate(schedule.programs):
            while at[index] < len(program):
                messages = [a for a in _opened(program[at[index]]) if a.kind.is_message]
                posted.update(messages)
                if not posted.issuperset(a.match for a in messages):
                    break
                at[index] += 1
                moved = True
    stuck = [
        f"rank {i} at {program[at[i]]} waits for {_some(_unmet(program, at[i], posted))}"
        for i, program in enumerate(schedule.programs)
        if at[i] < len(program)
    ]
    if stuck:
        raise ScheduleError(
            f"{schedule.name} gets stuck when messages are not buffered: {'; '.join(stuck)}; "
            f"post the messages of neighbours together (fuse_messages)"
        )


def _unmet(program: Program, at: int, posted: set[Action]) -> set[Action]:
    return {a.match for a in _opened(program[at]) if a.match not in posted}


def _opened(step: Action | Batch) -> tuple[Action, ...]:
    return step.actions if isinstance(step, Batch) else (step,)


def _some(actions: set[Action]) -> str:
    shown = [str(a) for a in sorted(actions)[:5]]
    more = len(actions) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")

"""Schedule to schedule: add the messages that a compute order needs, batch them, post them early.

`lower` makes of a compute order what a rank can run.

A pass never reorders computation. Messages are placed along one global order of everything that
happens, so each rank's program is a part of that order, and no rank can wait for one that waits
for it. That stays true when neighbouring messages are posted together.
"""

from dataclasses import replace

from torchdistpackage.schedule.actions import Action, Batch, Program, Schedule, Step, flatten
from torchdistpackage.schedule.check import check
from torchdistpackage.schedule.costs import Costs
from torchdistpackage.schedule.timeline import DEFAULT_COSTS, replay


def lower(schedule: Schedule, costs: Costs = DEFAULT_COSTS) -> Schedule:
    """The schedule with its messages, fused and checked: ready to run.

    Raises:
        ScheduleError: it cannot run, or is incomplete.
    """
    lowered = fuse_messages(add_messages(schedule, costs))
    check(lowered)
    return lowered


def add_messages(schedule: Schedule, costs: Costs = DEFAULT_COSTS) -> Schedule:
    """Each send where its action ends, its receive at the same point of the other rank's program.

    The points are those of the simulation at `costs`; messages already there are placed anew.
    Stages on the same rank hand over in memory and get no message.

    Raises:
        ScheduleError: the computations cannot run in this order.
    """
    programs: list[list[Step]] = [[] for _ in schedule.programs]
    place = schedule.placement
    ended: list[Action] = []
    now = 0.0

    def deliver() -> None:
        for send in ended:
            programs[place[send.stage]].append(send)
            programs[place[send.peer]].append(send.match)
        ended.clear()

    for action, start, end in sorted(replay(schedule, costs), key=lambda span: span.end):
        # Actions that end together come first, then their messages, side by side, to be fused. One
        # that takes no time may use a message of this very moment.
        if end > now or start == end:
            deliver()
            now = end
        programs[place[action.stage]].append(action)
        if send := _send(action, schedule):
            ended.append(send)
    deliver()
    return replace(schedule, programs=tuple(map(tuple, programs)))


def _send(action: Action, schedule: Schedule) -> Action | None:
    send, place = action.send, schedule.placement
    if send is None or not 0 <= send.peer < schedule.num_stages:
        return None
    return None if place[send.peer] == place[send.stage] else send


def fuse_messages(schedule: Schedule) -> Schedule:
    """Adjacent messages of a rank become one batch, receives first, else in their order.

    Receives first because a transport may only drain what it has been told to expect: posted
    the other way round, both directions of a link take turns.
    """
    return replace(schedule, programs=tuple(map(_fuse, schedule.programs)))


def receives_ahead(schedule: Schedule, ahead: int) -> Schedule:
    """Post each receive `ahead` computations earlier, for transports where that holds up nothing.

    All receives of a rank keep their order. Whoever runs the result must not wait for a batch
    as a whole, only for the message that the next computation uses: it is not unbuffered-safe.
    """
    if ahead < 0:
        raise ValueError(f"receives can be posted 0 or more computations ahead, not {ahead}")
    return fuse_messages(
        replace(schedule, programs=tuple(_ahead(program, ahead) for program in schedule.programs))
    )


def _ahead(program: Program, ahead: int) -> Program:
    """Messages stand in the gaps before, between and after the computations."""
    gaps: list[list[Action]] = [[]]
    computations: list[Action] = []
    for action in flatten(program):
        if action.kind.is_message:
            gaps[-1].append(action)
        else:
            computations.append(action)
            gaps.append([])
    moved: list[list[Action]] = [[] for _ in gaps]
    for i, gap in enumerate(gaps):
        for action in gap:
            moved[i if action.kind.is_send else max(0, i - ahead)].append(action)
    steps = list(moved[0])
    for action, gap in zip(computations, moved[1:], strict=True):
        steps += [action, *gap]
    return tuple(steps)


def _fuse(program: Program) -> Program:
    fused: list[Step] = []
    run: list[Action] = []

    def close() -> None:
        run.sort(key=lambda action: action.kind.is_send)
        if run:
            fused.append(run[0] if len(run) == 1 else Batch(tuple(run)))
        run.clear()

    for action in flatten(program):
        if action.kind.is_message:
            run.append(action)
        else:
            close()
            fused.append(action)
    close()
    return tuple(fused)

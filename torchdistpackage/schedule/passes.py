"""Schedule to schedule: add the messages that a compute order needs, batch them, post them early.

`lower` makes of a compute order what a rank can run.

A pass never reorders computation. Messages are placed along one global order of everything that
happens, so each rank's program is a part of that order, and no rank can wait for one that waits
for it. That stays true when neighbouring messages are posted together.
"""

from dataclasses import replace
from itertools import groupby

from torchdistpackage.schedule.actions import (
    Action,
    ActionKind,
    Batch,
    Program,
    Schedule,
    Step,
    flatten,
)
from torchdistpackage.schedule.check import check
from torchdistpackage.schedule.costs import Costs
from torchdistpackage.schedule.timeline import DEFAULT_COSTS, replay


def lower(schedule: Schedule, costs: Costs = DEFAULT_COSTS) -> Schedule:
    """The schedule with its messages, fused and checked: ready to run; raises as `check`."""
    lowered = fuse_messages(add_messages(schedule, costs))
    check(lowered)
    return lowered


def add_messages(schedule: Schedule, costs: Costs = DEFAULT_COSTS) -> Schedule:
    """Each send where its action ends, its receive at the same point of the other rank's program.

    The points are those of the simulation at `costs`; messages already there are placed anew.
    Stages on one rank need no message. Raises ScheduleError where the order cannot run.
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
        send = action.send
        is_between = send is not None and 0 <= send.peer < len(place)
        if send is not None and is_between and place[send.peer] != place[send.stage]:
            ended.append(send)
    deliver()
    return replace(schedule, programs=tuple(map(tuple, programs)))


def fuse_messages(schedule: Schedule, apart: ActionKind | None = None) -> Schedule:
    """Adjacent messages of a rank become one batch, receives first, else in their order.

    Receives first because a transport may drain only into posted receives: posted the other way
    round, both directions of a link alternate. apart: a kind of message that stays alone.
    """
    fused = tuple(_fuse(program, apart) for program in schedule.programs)
    return replace(schedule, programs=fused)


def receives_ahead(schedule: Schedule, ahead: int) -> Schedule:
    """Post each receive `ahead` computations earlier, for transports where that holds up nothing.

    All receives of a rank keep their order. An executor of the result must not wait for a batch
    at once, only for the message that the next computation uses: it is not unbuffered-safe.
    """
    if ahead < 0:
        raise ValueError(f"receives can be posted 0 or more computations ahead, not {ahead}")
    programs = tuple(_ahead(program, ahead) for program in schedule.programs)
    return fuse_messages(replace(schedule, programs=programs))


def _ahead(program: Program, ahead: int) -> Program:
    steps: list[list[Action]] = [[]]  # each with the messages that follow it
    for action in flatten(program):
        if not action.kind.is_message:
            steps.append([action])
        else:
            moved = -1 if action.kind.is_send else max(0, len(steps) - 1 - ahead)
            steps[moved].append(action)
    return tuple(action for step in steps for action in step)


def _fuse(program: Program, apart: ActionKind | None) -> Program:
    fused: list[Step] = []

    def is_batched(action: Action) -> bool:
        return action.kind.is_message and action.kind is not apart

    for batched, group in groupby(flatten(program), is_batched):
        run: list[Step] = list(group)
        if batched and len(run) > 1:
            run = [Batch(tuple(sorted(flatten(run), key=lambda a: a.kind.is_send)))]
        fused += run
    return tuple(fused)

"""Schedule to schedule: add the messages that a compute order needs, then batch them.

A pass never reorders computation. `fuse_messages` puts adjacent messages of a rank into one
batch: two neighbours that each send first would otherwise wait for each other for ever.
"""

from dataclasses import replace

from torchdistpackage.schedule.actions import Action, Batch, Kind, Program, Schedule, Step


def add_messages(schedule: Schedule) -> Schedule:
    """A receive before each action that needs one, a send after each that feeds another rank.

    Stages on the same rank hand over in memory and get no message.
    """
    last = schedule.num_stages - 1

    def apart(stage: int, other: int) -> bool:
        return 0 <= other <= last and schedule.placement[stage] != schedule.placement[other]

    def around(action: Action) -> tuple[Action, ...]:
        stage, m = action.stage, action.microbatch
        forward = action.kind is Kind.F
        source, target = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
        receive, send = (Kind.RECV_F, Kind.SEND_F) if forward else (Kind.RECV_B, Kind.SEND_B)
        before = (Action(stage, receive, m),) if apart(stage, source) else ()
        after = (Action(stage, send, m),) if apart(stage, target) else ()
        return (*before, action, *after)

    programs = tuple(
        tuple(a for step in program if isinstance(step, Action) for a in around(step))
        for program in schedule.programs
    )
    return replace(schedule, programs=programs)


def fuse_messages(schedule: Schedule) -> Schedule:
    """Adjacent messages of a rank become one batch, receives first.

    Receives first because a transport may only drain what it has been told to expect: posted
    the other way round, both directions of a link take turns.
    """
    return replace(schedule, programs=tuple(map(_fuse, schedule.programs)))


def _fuse(program: Program) -> Program:
    fused: list[Step] = []
    run: list[Action] = []
    for step in (*program, None):
        if isinstance(step, Action) and step.kind.is_message:
            run.append(step)
            continue
        if run:
            run.sort(key=lambda a: a.kind.is_send)
            fused.append(run[0] if len(run) == 1 else Batch(tuple(run)))
            run = []
        if step is not None:
            fused.append(step)
    return tuple(fused)

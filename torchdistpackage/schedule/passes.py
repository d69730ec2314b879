"""Passes over schedules: add the messages that a compute order needs, batch them, post them early.

`lower` turns a compute order into a schedule that ranks can run. `check` verifies that a schedule
can
run: it is complete, in order, and never gets stuck.

A pass never reorders computations. It places messages along one global order of all events, so each
rank's program follows that order, and ranks cannot wait for each other in a circle. This stays true
if adjacent messages are posted together.

`check` treats messages as *unbuffered*: a send ends only when its receive is posted, and vice
versa. Real transports sometimes buffer; a program that is safe here is safe on all of them.
Transports match the messages between two ranks by order, so `check` verifies the order too.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby, zip_longest

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import (
    Action,
    ActionKind,
    Batch,
    Program,
    Schedule,
    Step,
    flatten,
)
from torchdistpackage.schedule.costs import Costs
from torchdistpackage.schedule.engine import DEFAULT_COSTS, replay


def check(schedule: Schedule) -> None:
    """Check that every action is there once, in a possible order, and that all ranks finish.

    Each micro-batch on each stage needs an F and, in a schedule with backwards, either a B or one I
    and one W. Adjacent stages on different ranks need a message each way; those on one rank need
    none.

    Raises:
        ScheduleError: lists what is missing, doubled or misplaced, or what each rank waits for.
    """
    _check_complete(schedule, messages=True)
    _check_order(schedule)
    _check_pairs(schedule)
    _check_unbuffered(schedule)


def check_computations(schedule: Schedule) -> None:
    """Check the computations of a schedule that has no messages yet."""
    _check_complete(schedule, messages=False)
    _check_order(schedule)


def _check_complete(schedule: Schedule, *, messages: bool) -> None:
    """Raise ScheduleError if actions are missing, doubled, unexpected or misplaced."""
    p, num_ranks = schedule.num_stages, len(schedule.programs)
    placement = schedule.placement
    if len(placement) != p or not set(placement) <= set(range(num_ranks)):
        raise ScheduleError(
            f"{schedule.name} places {p} stages on {placement} with {num_ranks} programs; give "
            f"each stage a pipe index from 0 to {num_ranks - 1}"
        )
    counts = Counter(a for program in schedule.programs for a in flatten(program))
    expected = _expected(schedule, counts.keys(), messages=messages)
    problems = {
        "missing": expected - counts.keys(),
        "unexpected": counts.keys() - expected,
        "listed twice": {a for a, count in counts.items() if count > 1},
        "on the wrong rank": {
            a
            for i, program in enumerate(schedule.programs)
            for a in flatten(program)
            if a.stage < p and placement[a.stage] != i
        },
    }
    if texts := [
        f"{problem}: {_some(actions)}" for problem, actions in problems.items() if actions
    ]:
        raise ScheduleError(
            f"{schedule.name} with {p} stages, {schedule.num_microbatches} microbatches: "
            f"{'; '.join(texts)}"
        )


def _expected(schedule: Schedule, actions: Iterable[Action], *, messages: bool) -> set[Action]:
    """Return the actions that the schedule must have."""
    K, placement = ActionKind, schedule.placement
    split = {(a.stage, a.microbatch) for a in actions if a.kind in (K.I, K.W)}
    has_backward = schedule.has_backward  # walks all programs
    expected: set[Action] = set()
    for s in range(schedule.num_stages):
        cut = messages and s > 0 and placement[s] != placement[s - 1]
        for m in range(schedule.num_microbatches):
            expected.add(Action(s, K.F, m))
            if cut:
                expected |= {Action(s - 1, K.SEND_F, m), Action(s, K.RECV_F, m)}
            if not has_backward:
                continue
            kinds = (K.I, K.W) if (s, m) in split else (K.B,)
            expected |= {Action(s, kind, m) for kind in kinds}
            if cut:
                expected |= {Action(s, K.SEND_B, m), Action(s - 1, K.RECV_B, m)}
    return expected


def _check_order(schedule: Schedule) -> None:
    """Raise ScheduleError if an action comes before one that it uses on its own rank."""
    for index, program in enumerate(schedule.programs):
        produced_at = {a.result: (i, a) for i, step in enumerate(program) for a in flatten([step])}
        for i, action in produced_at.values():
            for need in _needs(action, schedule):
                produced, used = produced_at.get(need, (-1, need))
                if produced >= i:
                    raise ScheduleError(
                        f"{schedule.name}: rank {index} runs {action} at step {i} but {used}, "
                        f"which it uses, only at step {produced}; move it before"
                    )


def _needs(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Return the results that `action` uses, which must exist before it starts."""
    s, kind, m = action

    def from_stage(other: int, sent: ActionKind, receive: ActionKind) -> tuple[Action, ...]:
        if not 0 <= other < schedule.num_stages:
            return ()
        near = schedule.placement[other] == schedule.placement[s]
        return (Action(other, sent, m) if near else Action(s, receive, m),)

    match kind:
        case ActionKind.F:
            return from_stage(s - 1, ActionKind.F, ActionKind.RECV_F)
        case ActionKind.B | ActionKind.I:
            return (Action(s, ActionKind.F, m), *from_stage(s + 1, ActionKind.B, ActionKind.RECV_B))
        case ActionKind.SEND_F:
            return (Action(s, ActionKind.F, m),)
        case ActionKind.W | ActionKind.SEND_B:
            return (Action(s, ActionKind.B, m),)
        case _:
            return ()


def _check_pairs(schedule: Schedule) -> None:
    """Raise ScheduleError unless each rank receives in the order in which its peer sends."""
    placement = schedule.placement
    sent: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for action in (a for program in schedule.programs for a in flatten(program)):
        if action.kind.is_send:
            sent[placement[action.stage], placement[action.peer]].append(action)
        elif action.kind.is_message:
            received[placement[action.peer], placement[action.stage]].append(action)
    for (source, target), sends in sent.items():
        for send, receive in zip_longest(sends, received[source, target]):
            if receive is None or send is None or send.match != receive:
                raise ScheduleError(
                    f"{schedule.name}: rank {source} sends {send} to rank {target}, which "
                    f"then receives {receive}; messages between two ranks are matched by their "
                    f"order, so list both in the same one"
                )


def _check_unbuffered(schedule: Schedule) -> None:
    """Run all programs, where a batch ends when both sides have posted all its messages."""
    programs = schedule.programs
    positions, unmet = [0] * len(programs), [0] * len(programs)
    posted: dict[Action, int] = {}
    runnable = list(range(len(programs)))
    while runnable:
        rank = runnable.pop()
        program = programs[rank]
        while positions[rank] < len(program) and not unmet[rank]:
            for action in flatten([program[positions[rank]]]):
                if not action.kind.is_message:
                    continue
                peer = posted.pop(action.match, None)
                if peer is None:
                    posted[action] = rank
                    unmet[rank] += 1
                else:
                    unmet[peer] -= 1
                    if not unmet[peer] and peer != rank:
                        positions[peer] += 1
                        runnable.append(peer)
            if not unmet[rank]:
                positions[rank] += 1
    stuck = [
        f"rank {i} at {program[positions[i]]} waits for "
        f"{_some({a.match for a in flatten([program[positions[i]]]) if a in posted})}"
        for i, program in enumerate(programs)
        if positions[i] < len(program)
    ]
    if stuck:
        raise ScheduleError(
            f"{schedule.name} gets stuck when messages are not buffered: {'; '.join(stuck)}; "
            f"post the messages of neighbours together (fuse_messages)"
        )


def _some(actions: set[Action]) -> str:
    """Return the first five actions as text, for messages."""
    more = f" and {len(actions) - 5} more" if len(actions) > 5 else ""
    return ", ".join(map(str, sorted(actions)[:5])) + more


def lower(schedule: Schedule, costs: Costs = DEFAULT_COSTS) -> Schedule:
    """Return the schedule with its messages, fused and checked, ready to run; raise as `check`."""
    lowered = fuse_messages(add_messages(schedule, costs))
    check(lowered)
    return lowered


def add_messages(schedule: Schedule, costs: Costs = DEFAULT_COSTS) -> Schedule:
    """Place each send where its action ends, and its receive at that time in the peer's program.

    The times are those of a simulation with `costs`. Existing messages are placed again. Adjacent
    stages on one rank need no message.

    Raises:
        ScheduleError: the order cannot run.
    """
    programs: list[list[Step]] = [[] for _ in schedule.programs]
    placement = schedule.placement
    ended: list[Action] = []
    time = 0.0

    def deliver() -> None:
        for send in ended:
            programs[placement[send.stage]].append(send)
            programs[placement[send.peer]].append(send.match)
        ended.clear()

    for action, start, end in sorted(replay(schedule, costs), key=lambda span: span.end):
        # Place actions that end together first, and then their messages side by side, so that they
        # are fused. An action that takes no time may use a message of this moment, so deliver
        # first.
        if end > time or start == end:
            deliver()
            time = end
        programs[placement[action.stage]].append(action)
        send = action.send
        is_between = send is not None and 0 <= send.peer < len(placement)
        if send is not None and is_between and placement[send.peer] != placement[send.stage]:
            ended.append(send)
    deliver()
    return replace(schedule, programs=tuple(map(tuple, programs)))


def fuse_messages(schedule: Schedule, apart: ActionKind | None = None) -> Schedule:
    """Join adjacent messages of a rank into one batch, receives first, otherwise in their order.

    Receives come first because a transport may deliver only into posted receives; with sends first,
    the two directions of a link would take turns.

    apart: a kind of message that is never batched.
    """
    fused = tuple(_fuse(program, apart) for program in schedule.programs)
    return replace(schedule, programs=fused)


def receives_ahead(schedule: Schedule, ahead: int) -> Schedule:
    """Post each receive `ahead` computations earlier, for transports where a receive blocks
    nothing.

    All receives of a rank keep their order. The result is not safe without buffers: an executor
    must not wait for a whole batch at once, but only for the message that the next computation
    uses.
    """
    if ahead < 0:
        raise ValueError(
            f"receives can be posted 0 or more computations ahead, not {ahead}; pass 0 or more"
        )
    programs = tuple(_ahead(program, ahead) for program in schedule.programs)
    return fuse_messages(replace(schedule, programs=programs))


def _ahead(program: Program, ahead: int) -> Program:
    """Move each receive of a program `ahead` computations earlier."""
    steps: list[list[Action]] = [[]]  # a computation with the messages that follow it
    for action in flatten(program):
        if not action.kind.is_message:
            steps.append([action])
        else:
            moved = -1 if action.kind.is_send else max(0, len(steps) - 1 - ahead)
            steps[moved].append(action)
    return tuple(action for step in steps for action in step)


def _fuse(program: Program, apart: ActionKind | None) -> Program:
    """Join adjacent messages of a program into batches."""
    fused: list[Step] = []

    def is_batched(action: Action) -> bool:
        return action.kind.is_message and action.kind is not apart

    for batched, group in groupby(flatten(program), is_batched):
        run: list[Step] = list(group)
        if batched and len(run) > 1:
            run = [Batch(tuple(sorted(flatten(run), key=lambda a: a.kind.is_send)))]
        fused += run
    return tuple(fused)

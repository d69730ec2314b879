"""Schedule to schedule: add the messages that a compute order needs, batch them, post them early.

`lower` makes of a compute order what a rank can run, `check` says whether a schedule can run:
complete, in order, and never stuck.

A pass never reorders computation. Messages are placed along one global order of everything that
happens, so each rank's program is a part of that order, and no rank can wait for one that waits
for it. That stays true when neighbouring messages are posted together.

Messages are checked as *unbuffered*: a send ends only when its receive has been posted, and
the other way round. Real transports buffer sometimes; a program that is safe here is safe
on all of them. They match the messages between two ranks by order, so that is checked too.
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
    """Raise unless every action is there once, in a possible order, and all ranks finish.

    Each microbatch on each stage needs an F and, in a schedule with backwards, either a B or one
    I and one W; stages on different ranks need a message both ways, those on one rank none.

    Raises:
        ScheduleError: lists what is missing, doubled, misplaced, or what each rank waits for.
    """
    _check_complete(schedule, messages=True)
    _check_order(schedule)
    _check_pairs(schedule)
    _check_unbuffered(schedule)


def check_computations(schedule: Schedule) -> None:
    """`check` of a schedule that has no messages yet, as far as its computations show."""
    _check_complete(schedule, messages=False)
    _check_order(schedule)


def _check_complete(schedule: Schedule, *, messages: bool) -> None:
    p, num_ranks = schedule.num_stages, len(schedule.programs)
    placement = schedule.placement
    if len(placement) != p or not set(placement) <= set(range(num_ranks)):
        raise ScheduleError(
            f"{schedule.name} places {p} stages on {placement} with {num_ranks} programs; give "
            f"each stage a pipe index from 0 to {num_ranks - 1}"
        )
    found = Counter(a for program in schedule.programs for a in flatten(program))
    expected = _expected(schedule, found.keys(), messages=messages)
    problems = {
        "missing": expected - found.keys(),
        "unexpected": found.keys() - expected,
        "listed twice": {a for a, count in found.items() if count > 1},
        "on the wrong rank": {
            a
            for i, program in enumerate(schedule.programs)
            for a in flatten(program)
            if a.stage < p and placement[a.stage] != i
        },
    }
    if texts := [f"{what}: {_some(actions)}" for what, actions in problems.items() if actions]:
        raise ScheduleError(
            f"{schedule.name} with {p} stages, {schedule.num_microbatches} microbatches: "
            f"{'; '.join(texts)}"
        )


def _expected(schedule: Schedule, found: Iterable[Action], *, messages: bool) -> set[Action]:
    K, placement = ActionKind, schedule.placement
    split = {(a.stage, a.microbatch) for a in found if a.kind in (K.I, K.W)}
    expected: set[Action] = set()
    for s in range(schedule.num_stages):
        cut = messages and s > 0 and placement[s] != placement[s - 1]
        for m in range(schedule.num_microbatches):
            expected.add(Action(s, K.F, m))
            if cut:
                expected |= {Action(s - 1, K.SEND_F, m), Action(s, K.RECV_F, m)}
            if not schedule.has_backward:
                continue
            kinds = (K.I, K.W) if (s, m) in split else (K.B,)
            expected |= {Action(s, kind, m) for kind in kinds}
            if cut:
                expected |= {Action(s, K.SEND_B, m), Action(s - 1, K.RECV_B, m)}
    return expected


def _check_order(schedule: Schedule) -> None:
    """On its own rank each action comes after what it uses."""
    for index, program in enumerate(schedule.programs):
        made_at = {a.result: (i, a) for i, step in enumerate(program) for a in flatten([step])}
        for i, action in made_at.values():
            for need in _needs(action, schedule):
                made, used = made_at.get(need, (-1, need))
                if made >= i:
                    raise ScheduleError(
                        f"{schedule.name}: rank {index} runs {action} at step {i} but {used}, "
                        f"which it uses, only at step {made}; move it before"
                    )


def _needs(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """The results that `action` uses, which must be there before it starts."""
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
    """Of any two ranks, one receives in the order in which the other sends."""
    placement = schedule.placement
    sent: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    taken: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for action in (a for program in schedule.programs for a in flatten(program)):
        if action.kind.is_send:
            sent[placement[action.stage], placement[action.peer]].append(action)
        elif action.kind.is_message:
            taken[placement[action.peer], placement[action.stage]].append(action)
    for (source, target), sends in sent.items():
        for send, receive in zip_longest(sends, taken[source, target]):
            if receive is None or send is None or send.match != receive:
                raise ScheduleError(
                    f"{schedule.name}: rank {source} sends {send} to rank {target}, which "
                    f"then receives {receive}; messages between two ranks are matched by their "
                    f"order, so list both in the same one"
                )


def _check_unbuffered(schedule: Schedule) -> None:
    """Run all programs; a batch ends when all its messages have been posted on both ends."""
    programs = schedule.programs
    at, unmet = [0] * len(programs), [0] * len(programs)
    posted: dict[Action, int] = {}
    runnable = list(range(len(programs)))
    while runnable:
        rank = runnable.pop()
        program = programs[rank]
        while at[rank] < len(program) and not unmet[rank]:
            for action in flatten([program[at[rank]]]):
                if not action.kind.is_message:
                    continue
                peer = posted.pop(action.match, None)
                if peer is None:
                    posted[action] = rank
                    unmet[rank] += 1
                else:
                    unmet[peer] -= 1
                    if not unmet[peer] and peer != rank:
                        at[peer] += 1
                        runnable.append(peer)
            if not unmet[rank]:
                at[rank] += 1
    stuck = [
        f"rank {i} at {program[at[i]]} waits for "
        f"{_some({a.match for a in flatten([program[at[i]]]) if a in posted})}"
        for i, program in enumerate(programs)
        if at[i] < len(program)
    ]
    if stuck:
        raise ScheduleError(
            f"{schedule.name} gets stuck when messages are not buffered: {'; '.join(stuck)}; "
            f"post the messages of neighbours together (fuse_messages)"
        )


def _some(actions: set[Action]) -> str:
    more = f" and {len(actions) - 5} more" if len(actions) > 5 else ""
    return ", ".join(map(str, sorted(actions)[:5])) + more


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
    placement = schedule.placement
    ended: list[Action] = []
    now = 0.0

    def deliver() -> None:
        for send in ended:
            programs[placement[send.stage]].append(send)
            programs[placement[send.peer]].append(send.match)
        ended.clear()

    for action, start, end in sorted(replay(schedule, costs), key=lambda span: span.end):
        # Actions that end together come first, then their messages, side by side, to be fused. One
        # that takes no time may use a message of this very moment.
        if end > now or start == end:
            deliver()
            now = end
        programs[placement[action.stage]].append(action)
        send = action.send
        is_between = send is not None and 0 <= send.peer < len(placement)
        if send is not None and is_between and placement[send.peer] != placement[send.stage]:
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

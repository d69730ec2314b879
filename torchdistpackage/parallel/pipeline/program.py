"""A rank's program as a list of bound functions, made once.

One rule: whatever can be known before a run (who is whose neighbour, which message a computation
waits for, which boundary it crosses) is known when the list is made; a run calls one after another.

There are four lists, for all ranks alike. While forms of messages are not known yet: one global
order of all messages, in which a rank may wait for a header wherever it stands, as whoever sends it
has nothing to wait for but what comes earlier. Then the program's own batches. And where posting a
receive holds up nothing (gloo), each message alone, receives early, and over a connection for each
way. In the debug mode the one global order again, each message alone: a comparison waits for the
peer, and one of a whole batch would keep back a message that the peer needs before it can come to
another of that batch.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise

import torch

from torchdistpackage.comm.backends import is_queued
from torchdistpackage.comm.companions import make_duplex_groups, reverse_group
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.groups import connect
from torchdistpackage.comm.p2p import P2PChannel, Post
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tensor_meta import MetaChannel
from torchdistpackage.comm.work import Work
from torchdistpackage.parallel.pipeline.clock import ComputeClock
from torchdistpackage.parallel.pipeline.links import LocalLink, Output, RecvLink, SendLink
from torchdistpackage.parallel.pipeline.stage_runner import StageRunner
from torchdistpackage.schedule.actions import Action, ActionKind, Batch, Schedule
from torchdistpackage.schedule.passes import add_messages, receives_ahead

BEGINS, WAITS, COMPUTES = range(3)
"""What a step does: begin messages, wait for one, or compute."""
Step = tuple[Callable[[int], object], int, Action | Batch, int]
"""(what to call, with which number, a microbatch or a batch; for which action; what it does)"""

PREPOST = 2
"""Computations by which receives are posted early: one in work, one to follow at once."""
PREPOST_BYTES = 2**20
"""Room for messages up to here is posted early in any case: each notice to the sender that there is
room wakes a thread there, and many at a time wake it once."""
SENDS_KEPT = 2
"""Sends under way where the host waits for them: what they hold is let go with them, and does not
grow. On a queue a wait would hold up the stream that computes until the peer has received; there
nobody waits before the end, and the queue, not the flight, keeps what was sent until it has left:
NCCL by `record_stream`, so the allocator has the memory back once the message is out."""


class RankProgram:
    """The stages of this rank, what joins them, and the lists."""

    def __init__(
        self,
        schedule: Schedule,
        group: Group,
        device: torch.device,
        timeout_s: float | None,
        dynamic: bool,
        clock: ComputeClock,
    ):
        self._schedule, self._group, self.timeout_s = schedule, group, timeout_s
        self._dynamic, self._trains = dynamic, schedule.has_backward
        self._index, self._knows = group.rank(), False
        self._sends: deque[Work] = deque()
        self._queued = is_queued(group)
        self._wire = P2PChannel(group, timeout_s)
        place = schedule.placement
        apart = any(a != b for a, b in pairwise(place))
        if apart:  # before a message: see comm/groups.py
            connect(group, neighbours=True)
        self._headers = MetaChannel(group, device, timeout_s, always=dynamic) if apart else None
        self._inlets: dict[int, RecvLink] = {}
        self._outlets: dict[int, SendLink] = {}
        self.stages: dict[int, StageRunner] = {}
        self._join(clock)
        self._batches: list[tuple[Action, ...]] = []
        self._lists: dict[str, list[Step]] = {}

    def limit(self, timeout_s: float | None) -> None:
        """How long a message may take from now on."""
        self.timeout_s = timeout_s
        self._wire.limit(timeout_s)
        if self._headers is not None:
            self._headers.limit(timeout_s)

    @property
    def has_messages(self) -> bool:
        """Whether any go to other ranks, or come from there."""
        return bool(self._inlets or self._outlets)

    # -- the life of a run ---------------------------------------------------------------

    def begin(self) -> list[Step]:
        """The list for this run."""
        if recorder.checks:
            return self._list("compared", lambda: add_messages(self._schedule), self._add_batch)
        if not self._knows:
            return self._list("learning", lambda: _in_one_order(self._schedule), self._add_batch)
        if not self._wire.is_direct:
            return self._list("batched", lambda: self._schedule, self._add_batch)
        ahead = lambda: receives_ahead(self._schedule, self._ahead())  # noqa: E731
        return self._list("ahead", ahead, self._add_early)

    def end(self) -> None:
        """Wait for what is under way."""
        while self._sends:
            self._sends.popleft().wait()
        if self._headers is not None:
            self._headers.settle()
        if not self._knows:
            for stage in self.stages.values():
                stage.learned()
            if self._headers is not None and not self._dynamic:
                make_duplex_groups([self._group])  # all its ranks come to this place
                self._wire = P2PChannel(
                    self._group, self.timeout_s, down=reverse_group(self._group)
                )
        self._knows = not self._dynamic

    def reset(self) -> None:
        """Let go of everything; after an exception, also of what is under way."""
        self._sends.clear()
        if self._headers is not None:
            self._headers.reset()
        for part in (*self.stages.values(), *self._outlets.values()):
            part.reset()

    def _ahead(self) -> int:
        """As all messages here are known, how early to post receives."""
        sides = (*self._inlets.values(), *self._outlets.values())
        largest = max((t.num_bytes for side in sides for t in side.templates if t), default=0)
        return max(PREPOST, PREPOST_BYTES // max(1, largest))

    # -- stages and boundaries -----------------------------------------------------------

    def _join(self, clock: ComputeClock) -> None:
        schedule, ranks, num = (
            self._schedule,
            ranks_of(self._group),
            self._schedule.num_microbatches,
        )
        place, before = schedule.placement, None
        for s in schedule.stages_of(self._index):
            outputs: list[Output] = [None] * num
            entrance = exit = None
            if s > 0 and place[s - 1] == self._index:
                entrance = before
            elif s > 0:
                entrance = RecvLink(num, self._trains, ranks[place[s - 1]], self._headers)
                self._inlets[s] = entrance
            if s < schedule.num_stages - 1 and place[s + 1] == self._index:
                before = exit = LocalLink(num, self._trains, outputs)
            elif s < schedule.num_stages - 1:
                peer = ranks[place[s + 1]]
                exit = SendLink(s, outputs, self._trains, peer, self._headers)
                self._outlets[s] = exit
            self.stages[s] = StageRunner(s, outputs, entrance, exit, clock)

    # -- making the lists ----------------------------------------------------------------

    def _list(
        self, name: str, schedule: Callable[[], Schedule], add: Callable[..., None]
    ) -> list[Step]:
        if name not in self._lists:
            steps = self._lists[name] = []
            for step in schedule().programs[self._index]:
                messages = step.actions if isinstance(step, Batch) else (step,)
                if messages[0].kind.is_message:
                    add(steps, step, messages)
                else:
                    self._add_computation(steps, messages[0])
        return self._lists[name]

    def _add_computation(self, steps: list[Step], action: Action) -> None:
        s, kind, m = action
        stage = self.stages[s]
        if kind is ActionKind.F and s in self._inlets:
            steps.append((self._inlets[s].arrive, m, Action(s, ActionKind.RECV_F, m), WAITS))
        elif kind.gives_gradient and s in self._outlets:
            steps.append((self._outlets[s].arrive, m, Action(s, ActionKind.RECV_B, m), WAITS))
        do = {
            ActionKind.F: stage.forward if self._trains else stage.evaluate,
            ActionKind.B: stage.backward,
            ActionKind.I: stage.backward_input,
            ActionKind.W: stage.backward_weight,
        }[kind]
        steps.append((do, m, action, COMPUTES))

    def _add_early(self, steps: list[Step], _: object, messages: Sequence[Action]) -> None:
        for action in messages:
            _, kind, m = action
            side = self._side(action)
            if kind.is_send:
                do: Callable[[int], object] = partial(self._send, side)
            else:
                do = partial(side.receive, self._wire)
            steps.append((do, m, action, BEGINS))

    def _add_batch(
        self, steps: list[Step], step: Action | Batch, messages: tuple[Action, ...]
    ) -> None:
        steps.append((self._exchange, len(self._batches), step, BEGINS))
        self._batches.append(messages)

    def _side(self, action: Action) -> RecvLink | SendLink:
        sides = (
            self._inlets if action.kind in (ActionKind.RECV_F, ActionKind.SEND_B) else self._outlets
        )
        return sides[action.stage]

    # -- messages ------------------------------------------------------------------------

    def _send(self, side: RecvLink | SendLink, m: int) -> None:
        if isinstance(side, SendLink):
            side.announce(m)
        self._await_later(side, side.send(self._wire, m))

    def _await_later(self, side: RecvLink | SendLink, flight: Work) -> None:
        """What was sent is held by its flight alone, unless the side keeps it."""
        if isinstance(side, SendLink) and side.keeps_outputs:
            return
        if len(self._sends) == SENDS_KEPT:
            self._sends.popleft().wait()
        self._sends.append(flight)

    def _exchange(self, index: int) -> None:
        """All messages of a batch as one; headers before, where one is due."""
        messages = self._batches[index]
        for action in messages:
            side, m, recorder.action = self._side(action), action.microbatch, action
            if action.kind is ActionKind.SEND_F:
                side.announce(m)
            elif action.kind is ActionKind.RECV_F and not side.knows(m):
                side.learn(m)
        post = Post(self._group, self.timeout_s)
        for action in messages:
            recorder.action = action
            self._begin(action, self._side(action), post)
        flight = post.go()
        if self._queued:
            flight.forget()
            self._sends.append(flight)

    def _begin(self, action: Action, side: RecvLink | SendLink, post: Post) -> None:
        m = action.microbatch
        if not action.kind.is_send:
            side.receive(post, m)
            return
        flight = side.send(post, m)
        if not self._queued:
            self._await_later(side, flight)


def _in_one_order(schedule: Schedule) -> Schedule:
    """Messages placed anew along one order, neighbours batched, those with a header received alone:
    who waits for a header holds back nothing else."""
    programs: list[tuple[Action | Batch, ...]] = []
    for program in add_messages(schedule).programs:
        steps: list[Action | Batch] = []
        for batched, group in groupby(program, _may_be_batched):
            actions = list(group)
            if batched and len(actions) > 1:
                steps.append(Batch(tuple(sorted(actions, key=lambda a: a.kind.is_send))))
            else:
                steps += actions
        programs.append(tuple(steps))
    return replace(schedule, programs=tuple(programs))


def _may_be_batched(action: Action) -> bool:
    return action.kind.is_message and action.kind is not ActionKind.RECV_F


def within(context: Callable[[], AbstractContextManager[object]], step: Step) -> Step:
    """The same step, inside a context."""
    do, m, action, what = step

    def inside(m: int) -> None:
        with context():
            do(m)

    return inside, m, action, what

"""A rank's program as a list of bound functions, made once.

Everything that can be known before a run (peers, the message that a computation waits for, the
links) is resolved when the list is made. A run calls the functions one after another.

There are four lists, and all ranks use the same one:

- learning, while the shapes of messages are not known: one global order of all messages. A rank may
  wait for a header anywhere in it, because its sender waits only for earlier messages.
- batched: the program's own batches.
- ahead, on transports where posting a receive blocks nothing (gloo): each message alone, receives
  early, and one connection for each direction.
- compared, in the debug mode: the global order again, each message alone. A comparison waits for
the
  peer, and within a batch it would delay a message that the peer needs first.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import pairwise

import torch

from torchdistpackage.comm.backends import is_queued
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.groups import connect, connect_pairs, make_duplex_groups, reverse_group
from torchdistpackage.comm.moments import ComputeClock
from torchdistpackage.comm.p2p import P2PChannel, Post
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tensor_channel import SendQueue, TensorChannel
from torchdistpackage.comm.work import Work
from torchdistpackage.parallel.pipeline.links import LocalLink, Output, RecvLink, SendLink
from torchdistpackage.parallel.pipeline.stage_runner import StageRunner
from torchdistpackage.schedule.actions import Action, ActionKind, Batch, Schedule, flatten
from torchdistpackage.schedule.passes import add_messages, fuse_messages, receives_ahead


class StepKind(Enum):
    """Kinds of steps: BEGINS starts messages, WAITS waits for one, COMPUTES runs a stage."""

    BEGINS = "begins"
    WAITS = "waits"
    COMPUTES = "computes"


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One call of a rank's program, `call(number)`.

    The steps of a middle stage for the forward of micro-batch 3:

        kind        call             number     action
        BEGINS      inlet.receive    3          RECV_F 3     posts the receive of its input
        WAITS       inlet.arrive     3          RECV_F 3     waits until it has arrived
        COMPUTES    stage.forward    3          F 3          calls the stage
        BEGINS      send by outlet   3          SEND_F 3     posts the send of its output

    Its backward has the same steps with `outlet` and `inlet` exchanged, RECV_B, B and SEND_B. Steps
    of other micro-batches lie between. If messages go in batches, the two steps that start them are
    one `_exchange`, whose number is that of the batch.
    """

    call: Callable[[int], object]
    number: int
    action: Action | Batch
    kind: StepKind


PREPOST = 2
"""Number of computations by which receives are posted early: the current one and the next."""
PREPOST_BYTES = 2**20
"""Receives of up to this many bytes together are always posted early. Each posted receive notifies
the sender and wakes one of its threads; many notices at a time wake it once."""
SENDS_KEPT = 2
"""Largest number of sends in flight if the host waits for them, so that their memory does not grow.

On a device queue such a wait would stall the computing stream until the peer has received. So
nothing waits there before the end, and the queue keeps the memory until it is sent (NCCL by
`record_stream`)."""


class RankProgram:
    """The stages of this rank, the links between them and to other ranks, and the step lists.

    Links keep messages in flight by micro-batch. `_sends` keeps the works of sends until they are
    done, because a work holds the memory of its message.

    stages: the runner of each stage of this rank, by number; an executor starts their runs.
    timeout_s: limit of a message; `limit` changes it.
    """

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
        self._index = group.rank()  # this rank's pipe index in the schedule
        self._knows = False  # whether a first run has agreed on the shapes of all messages
        self._queued = is_queued(group)
        self._sends = SendQueue(None if self._queued else SENDS_KEPT)
        # one connection in the first run, then one for each direction: see `end`
        self._channel = P2PChannel(group, timeout_s)
        has_messages = any(a != b for a, b in pairwise(schedule.placement))
        if has_messages:  # connect before the first message: see comm/groups.py
            connect(group, neighbours=True)
            connect_pairs(group, pairwise(schedule.placement))
        self._headers = TensorChannel(group, device, timeout_s) if has_messages else None
        self._inlets: dict[int, RecvLink] = {}  # links of stages with input from another rank
        self._outlets: dict[int, SendLink] = {}  # links of stages with output to another rank
        self.stages: dict[int, StageRunner] = {}
        self._join(clock)
        self._batches: list[tuple[Action, ...]] = []  # messages that `_exchange(number)` posts
        # the four lists above, each made when first used
        self._lists: dict[str, list[ProgramStep]] = {}

    def limit(self, timeout_s: float | None) -> None:
        """Set how long a message may take from now on."""
        self.timeout_s = timeout_s
        self._channel.limit(timeout_s)
        if self._headers is not None:
            self._headers.limit(timeout_s)

    # -- one run -------------------------------------------------------------------------

    def begin(self) -> list[ProgramStep]:
        """Return the list of steps for this run."""
        if recorder.checks:
            return self._list("compared", lambda: add_messages(self._schedule), self._add_batch)
        if not self._knows:
            # receives of headers stay alone, so that waiting for one delays no other message
            learning = lambda: fuse_messages(  # noqa: E731
                add_messages(self._schedule), apart=ActionKind.RECV_F
            )
            return self._list("learning", learning, self._add_batch)
        if not self._channel.is_direct:
            return self._list("batched", lambda: self._schedule, self._add_batch)
        ahead = lambda: receives_ahead(self._schedule, self._ahead())  # noqa: E731
        return self._list("ahead", ahead, self._add_early)

    def end(self) -> None:
        """Wait for everything in flight, and learn from a first run.

        After it the shapes of all messages are known, so later runs post receives ahead. For that a
        second connection pays off, because on a single one a send waits while gloo reads from it.
        Creating it needs all ranks at the same point, such as the end of a run.
        """
        self._sends.settle()
        if self._headers is not None:
            self._headers.settle()
        if not self._knows:
            for stage in self.stages.values():
                stage.learned()
            if self._headers is not None and not self._dynamic:
                make_duplex_groups([self._group])
                down = reverse_group(self._group)
                self._channel = P2PChannel(self._group, self.timeout_s, down=down)
        self._knows = not self._dynamic

    def reset(self) -> None:
        """Release everything, and after an exception also messages in flight."""
        self._sends.reset()
        if self._headers is not None:
            self._headers.reset()
        for part in (*self.stages.values(), *self._outlets.values()):
            part.reset()

    def _ahead(self) -> int:
        """Return how many computations ahead to post receives, from the sizes of all messages."""
        sides = (*self._inlets.values(), *self._outlets.values())
        largest = max((t.num_bytes for side in sides for t in side.templates if t), default=0)
        return max(PREPOST, PREPOST_BYTES // max(1, largest))

    # -- stages and boundaries -----------------------------------------------------------

    def _join(self, clock: ComputeClock) -> None:
        """Create the stages of this rank and the links around them."""
        schedule, ranks = self._schedule, ranks_of(self._group)
        num, rank_of, previous_link = schedule.num_microbatches, schedule.placement, None
        dynamic = self._dynamic
        for s in schedule.stages_of(self._index):
            outputs: list[Output] = [None] * num
            input_link = output_link = None
            if s > 0 and rank_of[s - 1] == self._index:
                input_link = previous_link
            elif s > 0:
                peer = ranks[rank_of[s - 1]]
                input_link = RecvLink(num, self._trains, peer, self._headers, dynamic)
                self._inlets[s] = input_link
            if s < schedule.num_stages - 1 and rank_of[s + 1] == self._index:
                previous_link = output_link = LocalLink(num, self._trains, outputs)
            elif s < schedule.num_stages - 1:
                peer = ranks[rank_of[s + 1]]
                output_link = SendLink(s, outputs, self._trains, peer, self._headers, dynamic)
                self._outlets[s] = output_link
            self.stages[s] = StageRunner(s, outputs, input_link, output_link, clock)

    # -- making the lists ----------------------------------------------------------------

    def _list(
        self, name: str, schedule: Callable[[], Schedule], add: Callable[..., None]
    ) -> list[ProgramStep]:
        """Return a list of steps, made from a schedule when first used."""
        if name not in self._lists:
            steps = self._lists[name] = []
            for step in schedule().programs[self._index]:
                messages = tuple(flatten([step]))
                if messages[0].kind.is_message:
                    add(steps, step, messages)
                else:
                    self._add_computation(steps, messages[0])
        return self._lists[name]

    def _add_computation(self, steps: list[ProgramStep], action: Action) -> None:
        """Add a computation, and before it the wait for its message."""
        s, kind, m = action
        stage = self.stages[s]
        if kind is ActionKind.F and s in self._inlets:
            arrive, waited = self._inlets[s].arrive, Action(s, ActionKind.RECV_F, m)
            steps.append(ProgramStep(arrive, m, waited, StepKind.WAITS))
        elif kind.gives_gradient and s in self._outlets:
            arrive, waited = self._outlets[s].arrive, Action(s, ActionKind.RECV_B, m)
            steps.append(ProgramStep(arrive, m, waited, StepKind.WAITS))
        compute = {
            ActionKind.F: stage.forward if self._trains else stage.evaluate,
            ActionKind.B: stage.backward,
            ActionKind.I: stage.backward_input,
            ActionKind.W: stage.backward_weight,
        }[kind]
        steps.append(ProgramStep(compute, m, action, StepKind.COMPUTES))

    def _add_early(self, steps: list[ProgramStep], _: object, messages: Sequence[Action]) -> None:
        """Add a step for each message, which is posted by itself and not in a batch."""
        for action in messages:
            side, sends = self._side(action), action.kind.is_send
            post = partial(self._send, side) if sends else partial(side.receive, self._channel)
            steps.append(ProgramStep(post, action.microbatch, action, StepKind.BEGINS))

    def _add_batch(
        self, steps: list[ProgramStep], step: Action | Batch, messages: tuple[Action, ...]
    ) -> None:
        """Add one step for all messages of a batch."""
        steps.append(ProgramStep(self._exchange, len(self._batches), step, StepKind.BEGINS))
        self._batches.append(messages)

    def _side(self, action: Action) -> RecvLink | SendLink:
        """Return the link that a message uses."""
        is_inlet = action.kind in (ActionKind.RECV_F, ActionKind.SEND_B)
        return (self._inlets if is_inlet else self._outlets)[action.stage]

    # -- messages ------------------------------------------------------------------------

    def _send(self, side: RecvLink | SendLink, m: int) -> None:
        if isinstance(side, SendLink):
            side.announce(m)
        self._await_later(side, side.send(self._channel, m))

    def _await_later(self, side: RecvLink | SendLink, work: Work) -> None:
        """Keep the work of a send, unless the link keeps the output.

        See [Note: What a sent output holds] in links.py.
        """
        if not (isinstance(side, SendLink) and side.keeps_outputs):
            self._sends.add(work)

    def _exchange(self, index: int) -> None:
        """Post all messages of a batch together, after the headers that are due."""
        messages = self._batches[index]
        for action in messages:
            side, m, recorder.action = self._side(action), action.microbatch, action
            if action.kind is ActionKind.SEND_F:
                side.announce(m)
            elif action.kind is ActionKind.RECV_F and not side.knows(m):
                side.learn(m)
        post = Post(self._group, self.timeout_s)
        for action in messages:
            side, m, recorder.action = self._side(action), action.microbatch, action
            if not action.kind.is_send:
                side.receive(post, m)
            elif self._queued:
                side.send(post, m)
            else:
                self._await_later(side, side.send(post, m))
        work = post.go()
        if self._queued:
            # one work for the whole batch: forget its tensors, which the queue keeps until sent
            work.forget()
            self._sends.add(work)


def within(context: Callable[[], AbstractContextManager[object]], step: ProgramStep) -> ProgramStep:
    """Return the same step, inside a context."""

    def inside(number: int) -> None:
        with context():
            step.call(number)

    return replace(step, call=inside)

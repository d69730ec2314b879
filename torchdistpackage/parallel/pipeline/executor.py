"""Runs one rank's program of a checked schedule over real messages.

The program is the one that was checked, step by step. Messages are posted where it says and
waited for only where their content is needed, which is never earlier than the check assumed, so
what could not get stuck on paper cannot get stuck here.

Shapes. In its first run the executor sends a description ahead of each message; later runs
send tensors alone, and a stage whose output then differs is refused before anything is sent.
`dynamic_shapes` sends the description every time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchdistpackage.comm.messages import (
    Description,
    Message,
    describe,
    encode,
    receive_described,
    tensors_of,
)
from torchdistpackage.comm.p2p import Flight, Post
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.record import calls
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.errors import CommError
from torchdistpackage.parallel.pipeline.clock import Clock
from torchdistpackage.schedule.actions import Action, Batch, Kind, Schedule, flatten

Forward = Callable[[int, Message], Message]
"""(microbatch, what the previous stage sent, None on the first) -> what goes on."""
Backward = Callable[[int, Message, tuple[Tensor | None, ...] | None], None]
"""(microbatch, what Forward returned, gradients for its members, None on the last stage)."""


@dataclass
class _Live:
    """What one microbatch keeps between its forward and its backward."""

    received: Message = None
    room: list[Tensor | None] = field(default_factory=list)
    arrival: Flight | None = None
    output: Message = None
    departure: Flight | None = None
    gradients: list[Tensor | None] | None = None
    gradients_arrival: Flight | None = None


class Executor:
    """One rank's side of a schedule with one stage a rank. Reusable step after step.

    schedule: a checked one, with as many programs as the group has ranks.
    group: the pipe group; its order is the order of the stages.
    timeout_s: how long a message may take (gloo; NCCL's watchdog has its own limit).
    """

    def __init__(
        self,
        schedule: Schedule,
        group: Group,
        *,
        device: torch.device,
        timeout_s: float | None = None,
        dynamic_shapes: bool = False,
    ):
        assert len(schedule.programs) == group.size(), "one program for each rank of the group"
        self.schedule, self.clock = schedule, Clock(device)
        self._group, self._device, self.timeout_s = group, device, timeout_s
        self._ranks = ranks_of(group)
        self._stage = group.rank()
        self._program = schedule.programs[self._stage]
        self._dynamic = dynamic_shapes
        self._sent: dict[int, Description] = {}
        self._received: dict[int, Description] = {}
        backwards = [a.microbatch for a in flatten(self._program) if a.kind is Kind.B]
        self.last_backward = backwards[-1] if backwards else None

    @property
    def is_first(self) -> bool:
        return self._stage == 0

    @property
    def is_last(self) -> bool:
        return self._stage == len(self._ranks) - 1

    def run(
        self,
        forward: Forward,
        backward: Backward | None = None,
        *,
        reducer: Reducer | None = None,
        keep: Callable[[int, Message], None] | None = None,
    ) -> None:
        """One pass over all microbatches. Without a backward in the schedule no graph is kept.

        forward, backward: see the types; backward defaults to autograd's.
        reducer: its buckets leave during the last backward; the caller calls `finish()`.
        keep: called with each output of this stage that somebody wants to keep.

        Raises:
            CommError: a peer did not answer in time, or a shape changed with `dynamic_shapes` off.
        """
        self._live: dict[int, _Live] = {}
        self._flights: list[Flight] = []
        self._forward, self._backward = forward, backward or autograd
        self._reducer, self._keep = reducer, keep
        self.clock.restart()
        with torch.set_grad_enabled(self.last_backward is not None):
            for step in self._program:
                calls.action = step
                if isinstance(step, Batch):
                    self._post(step.actions)
                elif step.kind.is_message:
                    self._post((step,))
                elif step.kind is Kind.F:
                    self._run_forward(step.microbatch)
                else:
                    self._run_backward(step.microbatch)
        calls.action = None
        for flight in self._flights:
            flight.wait()
        self._live.clear()
        del self._forward, self._backward, self._reducer, self._keep
        self.clock.stop()

    # -- computation -------------------------------------------------------------------

    def _run_forward(self, m: int) -> None:
        live = self._of(m)
        if live.arrival is not None:
            live.arrival.wait()
            live.received = self._received[m].build(live.room)
            live.arrival = None
        with self.clock:
            output = self._forward(m, live.received)
        if self.last_backward is None:
            live.received, live.room = None, []
        elif m == self.last_backward and self._reducer is not None and _any_grad(output):
            output = self._reducer.watch(output, wait=False)
        if self._keep is not None:
            self._keep(m, output)
        live.output = output

    def _run_backward(self, m: int) -> None:
        live = self._live[m]
        if live.gradients_arrival is not None:
            live.gradients_arrival.wait()
        if live.departure is not None:
            # the next stage has sent the gradient, so it has the output
            live.departure.wait()
        with self.clock:
            gradients = None if live.gradients is None else tuple(live.gradients)
            self._backward(m, live.output, gradients)
        live.output, live.gradients, live.departure = None, None, None
        if self.is_first:
            del self._live[m]

    # -- messages ----------------------------------------------------------------------

    def _post(self, actions: tuple[Action, ...]) -> None:
        """Headers first, where one is due, then all tensors in one batch."""
        sends = [a for a in actions if a.kind is Kind.SEND_F]
        headers = Post(self._group, self.timeout_s)
        for action in sends:
            calls.action = action
            self._describe_output(action.microbatch, headers)
        headers.go().wait()
        post = Post(self._group, self.timeout_s)
        for action in actions:
            calls.action = action
            {
                Kind.RECV_F: self._receive_forward,
                Kind.SEND_F: self._send_forward,
                Kind.RECV_B: self._receive_backward,
                Kind.SEND_B: self._send_backward,
            }[action.kind](action.microbatch, post)
        flight = post.go()
        for action in actions:
            live = self._live.get(action.microbatch)
            match action.kind:
                case Kind.RECV_F:
                    live.arrival = flight
                case Kind.RECV_B:
                    live.gradients_arrival = flight
                case Kind.SEND_F if self.last_backward is not None:
                    live.departure = flight
                case Kind.SEND_F:
                    # nothing comes back for this output: let it go once the one before is gone
                    self._await_older(1)
                    self._flights.append(flight)
                    del self._live[action.microbatch]
                case Kind.SEND_B:
                    self._await_older(2)
                    self._flights.append(flight)
                    del self._live[action.microbatch]

    def _await_older(self, kept: int) -> None:
        """Bound the sends under way, so that what they hold does not grow with microbatches."""
        while len(self._flights) > kept:
            self._flights.pop(0).wait()

    def _describe_output(self, m: int, headers: Post) -> None:
        description = describe(self._live[m].output)
        agreed = self._sent.get(m)
        if agreed is None or self._dynamic:
            headers.send(encode(description, self._device), self._ranks[self._stage + 1])
        elif agreed != description:
            raise CommError(
                f"stage {self._stage} sends {description} for microbatch {m}, but agreed on "
                f"{agreed} in the first step; keep shapes and dtypes, or set dynamic_shapes"
            )
        self._sent[m] = description

    def _receive_forward(self, m: int, post: Post) -> None:
        source = self._ranks[self._stage - 1]
        if m not in self._received or self._dynamic:
            self._received[m] = receive_described(source, self._group, self._device, self.timeout_s)
        live = self._of(m)
        live.room = self._received[m].empty(self._device)
        for room, member in zip(live.room, self._received[m].members, strict=True):
            if room is not None and member is not None and member.wants_gradient:
                room.requires_grad_(self.last_backward is not None)
        post.receive([None if r is None else r.detach() for r in live.room], source)

    def _send_forward(self, m: int, post: Post) -> None:
        post.send(tensors_of(self._live[m].output), self._ranks[self._stage + 1])

    def _receive_backward(self, m: int, post: Post) -> None:
        live = self._live[m]
        live.gradients = self._sent[m].gradient().empty(self._device)
        post.receive(live.gradients, self._ranks[self._stage + 1])

    def _send_backward(self, m: int, post: Post) -> None:
        gradients: list[Tensor | None] = []
        for x, member in zip(self._live[m].room, self._received[m].members, strict=True):
            if x is None or member is None or not member.wants_gradient:
                gradients.append(None)
            else:
                gradients.append(x.grad if x.grad is not None else torch.zeros_like(x))
        post.send(gradients, self._ranks[self._stage - 1])

    def _of(self, m: int) -> _Live:
        return self._live.setdefault(m, _Live())


def autograd(m: int, output: Message, gradients: tuple[Tensor | None, ...] | None) -> None:
    """Backward of what was sent on from its gradients, or of a scalar loss on the last stage."""
    members = tensors_of(output)
    pairs = [
        (x, g)
        for x, g in zip(members, gradients or [None] * len(members), strict=True)
        if x is not None and x.requires_grad and (gradients is None or g is not None)
    ]
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])


def _any_grad(message: Message) -> bool:
    return any(x is not None and x.requires_grad for x in tensors_of(message))

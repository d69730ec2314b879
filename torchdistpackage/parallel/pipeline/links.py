"""Links from one stage to the next, and back: by messages, or in memory on one rank.

What a stage is given has no graph behind it. Members that want a gradient become leaves, whose
gradients go back to the stage they came from, zeros where a microbatch did not use one.

[Note: What a sent output holds]
1F1B keeps as many microbatches in a stage as there are stages after it. Their outputs would add to
that, though the backward needs an output's edge in the graph alone, and not its numbers. So
`SendLink.send` puts that edge in the place of the output (`graph_root`), and the memory is held by
the work of the send, which the program keeps until the message has left. A caller's own backward is
given the output itself, so `keeps_outputs` keeps it then, and its send is waited for together with
the gradient, which comes later anyway.
"""

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchdistpackage.comm.p2p import P2PChannel, Post
from torchdistpackage.comm.tensor_channel import (
    Incoming,
    TensorChannel,
    expect_gradients,
    expect_payload,
    send_gradients,
    send_payload,
)
from torchdistpackage.comm.tensor_meta import Message, MessageSpec, describe, tensors_of
from torchdistpackage.comm.work import Work
from torchdistpackage.errors import CommError

Root = Tensor | GradientEdge
"""A tensor, or an edge of the graph, at which a backward begins."""
Output = Message | tuple[Root | None, ...]
"""Outputs of a stage; once sent, the roots of those members that want a gradient."""

_DONE = Work()
"""A send that has left, or that never was."""
_NOTHING = Incoming((), _DONE)
"""Stands for a message where none is on its way."""


class StageInput:
    """Inputs of a stage, and the gradients that go back for them.

    takes_gradients: whether the schedule has backwards.
    """

    def __init__(self, num_microbatches: int, takes_gradients: bool):
        self.takes_gradients = takes_gradients
        self.leaves: list[list[Tensor]] = [[] for _ in range(num_microbatches)]

    def take(self, m: int) -> Message:
        """The input of microbatch `m`, for its forward."""
        raise NotImplementedError

    def owed(self, m: int) -> list[Tensor]:
        """Gradients of the leaves of `m`, which are released."""
        leaves, self.leaves[m] = self.leaves[m], []
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]

    def reset(self) -> None:
        """Release what an interrupted run has left."""
        self.leaves[:] = [[] for _ in self.leaves]


class LocalLink(StageInput):
    """A link between two stages of one rank: they share the memory, and there is no message."""

    def __init__(self, num_microbatches: int, takes_gradients: bool, outputs: list[Message]):
        super().__init__(num_microbatches, takes_gradients)
        self._outputs = outputs
        self._shapes: list[tuple[int, list[int]]] = [(0, [])] * num_microbatches

    def take(self, m: int) -> Message:
        output = self._outputs[m]
        if not self.takes_gradients:
            self._outputs[m] = None
            return output
        tensors = tensors_of(output)
        wanting = [i for i, x in enumerate(tensors) if x is not None and x.requires_grad]
        members = [None if x is None else x.detach() for x in tensors]
        self._shapes[m] = (len(members), wanting)
        self.leaves[m] = [members[i].requires_grad_() for i in wanting]  # type: ignore[union-attr]
        if isinstance(output, dict):
            return dict(zip(output, members, strict=True))
        return members[0] if isinstance(output, Tensor) else tuple(members)

    def gradients(self, m: int) -> tuple[Tensor | None, ...]:
        """The gradients of `m`, one for each member of what the stage before gave."""
        num, wanting = self._shapes[m]
        back = dict(zip(wanting, self.owed(m), strict=True))
        return tuple(map(back.get, range(num)))


class RecvLink(StageInput):
    """The link from a stage on another rank, `peer`.

    headers: where the descriptions of messages come from. dynamic: each message has one; else the
    first run's are agreed on, and `templates` has them, by microbatch.
    """

    def __init__(
        self,
        num_microbatches: int,
        takes_gradients: bool,
        peer: int,
        headers: TensorChannel,
        dynamic: bool,
    ):
        super().__init__(num_microbatches, takes_gradients)
        self.peer, self._headers, self._dynamic = peer, headers, dynamic
        self.templates: list[MessageSpec | None] = [None] * num_microbatches
        self._incoming: list[Incoming] = [_NOTHING] * num_microbatches

    def knows(self, m: int) -> bool:
        """Whether the form of message `m` is known without a header."""
        return self.templates[m] is not None and not self._dynamic

    def learn(self, m: int) -> None:
        """Wait for the header of `m`."""
        self.templates[m] = self._headers.receive_header(self.peer)

    def receive(self, channel: P2PChannel | Post, m: int) -> None:
        """Begin to receive message `m`."""
        self._incoming[m] = expect_payload(channel, self.templates[m], self.peer)

    def arrive(self, m: int) -> None:
        """Wait for the message."""
        self._incoming[m].work.wait()

    def take(self, m: int) -> Message:
        template, buffers = self.templates[m], self._incoming[m].buffers
        self._incoming[m] = _NOTHING
        if self.takes_gradients:
            wanting = template.wanting
            self.leaves[m] = [buffers[i].requires_grad_() for i in wanting]  # type: ignore[union-attr]
        return template.description.build(buffers)

    def reset(self) -> None:
        super().reset()
        self._incoming[:] = [_NOTHING] * len(self._incoming)

    def send(self, channel: P2PChannel | Post, m: int) -> Work:
        """The gradients of `m` on their way back."""
        return send_gradients(channel, self.templates[m], self.owed(m), self.peer)


class SendLink:
    """The link to a stage on another rank, `peer`; it refuses messages of another form than agreed.

    trains: whether the schedule has backwards. headers, dynamic: as of `RecvLink`.
    keeps_outputs: until their backward, for a caller's own one; see [Note: What a sent output
    holds]. `StageRunner.begin` sets it.
    """

    def __init__(
        self,
        stage: int,
        outputs: list[Output],
        trains: bool,
        peer: int,
        headers: TensorChannel,
        dynamic: bool,
    ):
        self.stage, self.peer, self._headers, self._dynamic = stage, peer, headers, dynamic
        self._outputs, self._trains, self.keeps_outputs = outputs, trains, False
        num = len(outputs)
        self.templates: list[MessageSpec | None] = [None] * num
        self._sends: list[Work] = [_DONE] * num
        self._incoming: list[Incoming] = [_NOTHING] * num

    def announce(self, m: int) -> None:
        """Send the header of `m`, if the peer waits for one.

        Raises CommError: the output is not of the form agreed on, or not where messages are.
        """
        template, output, device = self.templates[m], self._outputs[m], self._headers.device
        if template is None or self._dynamic:
            self.templates[m] = self._headers.send_header(describe(output, device), self.peer)
        elif not template.matches(output):
            agreed, found = template.description, describe(output, device)
            raise CommError(
                f"stage {self.stage} sends {found} for microbatch {m}, but agreed on {agreed} in "
                f"the first step; keep shapes and dtypes, and let what will ever have "
                f"requires_grad=True have it in the first step (to freeze it later is fine), or "
                f"set dynamic_shapes"
            )

    def send(self, channel: P2PChannel | Post, m: int) -> Work:
        """The output of `m` on its way."""
        tensors = tensors_of(self._outputs[m])
        work = send_payload(channel, self.templates[m], tensors, self.peer)
        if self.keeps_outputs:
            self._sends[m] = work
        else:  # see [Note: What a sent output holds]
            self._outputs[m] = tuple(map(graph_root, tensors)) if self._trains else None
        return work

    def reset(self) -> None:
        """Release what an interrupted run has left."""
        num = len(self._incoming)
        self._incoming[:], self._sends[:] = [_NOTHING] * num, [_DONE] * num

    def receive(self, channel: P2PChannel | Post, m: int) -> None:
        """Begin to receive the gradients that come back for `m`."""
        self._incoming[m] = expect_gradients(channel, self.templates[m], self.peer)

    def arrive(self, m: int) -> None:
        """Wait for the gradients; their sender has received the output."""
        self._incoming[m].work.wait()
        self._sends[m].wait()
        self._sends[m] = _DONE

    def gradients(self, m: int) -> tuple[Tensor | None, ...]:
        """The gradients of `m`, one for each member of the output."""
        incoming, self._incoming[m] = self._incoming[m], _NOTHING
        return self.templates[m].scatter_grads(incoming.buffers)


def graph_root(x: Tensor | None) -> Root | None:
    """The root of `x` in its graph, which the root keeps alive."""
    if x is None or not x.requires_grad:
        return None
    edge = get_gradient_edge(x)
    # a Python function's node does not own what is behind it; newer torches add one that does
    owns = not isinstance(edge.node, torch._C._FunctionBase) or any(edge[2:])
    return edge if owns else x

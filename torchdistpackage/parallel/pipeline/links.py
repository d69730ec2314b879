"""Links between adjacent stages, in both directions: by messages, or in memory on one rank.

A stage's input has no graph behind it. Members that need a gradient become leaves, whose gradients
go back to the previous stage, as zeros if a micro-batch did not use one.

[Note: What a sent output holds]
1F1B keeps as many micro-batches in a stage as there are stages after it. Their outputs would take
memory too, although the backward needs only an output's edge in the graph, not its numbers. So
`SendLink.send` replaces the output by that edge (`graph_root`). The work of the send keeps the
memory, and the program keeps the work until the message has been sent. A caller's own backward
needs the output itself. Then `keeps_outputs` keeps it, and `arrive` waits for its send together
with the gradient, which arrives later anyway.
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
"""Outputs of a stage; once sent, the graph roots of the members that need a gradient."""

_DONE = Work()
"""The work of a send that has ended or never began."""
_NOTHING = Incoming((), _DONE)
"""A placeholder for a micro-batch without a message in flight."""


class StageInput:
    """Inputs of a stage, and the gradients that it sends back for them.

    takes_gradients: whether the schedule has backwards.
    """

    def __init__(self, num_microbatches: int, takes_gradients: bool):
        self.takes_gradients = takes_gradients
        self.leaves: list[list[Tensor]] = [[] for _ in range(num_microbatches)]

    def take(self, m: int) -> Message:
        """Return the input of micro-batch `m` for its forward, and release it."""
        raise NotImplementedError

    def owed(self, m: int) -> list[Tensor]:
        """Return the gradients of the leaves of `m`, and release the leaves."""
        leaves, self.leaves[m] = self.leaves[m], []
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]

    def reset(self) -> None:
        """Release what an interrupted run left."""
        self.leaves[:] = [[] for _ in self.leaves]


class LocalLink(StageInput):
    """A link between two stages of one rank, which share memory and need no message."""

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
        """Return the gradients of `m`, one for each member of the previous stage's output."""
        num, wanting = self._shapes[m]
        back = dict(zip(wanting, self.owed(m), strict=True))
        return tuple(map(back.get, range(num)))


class RecvLink(StageInput):
    """The link from the previous stage, on rank `peer`.

    headers: channel for the descriptions of messages.
    dynamic: each message has a description. Otherwise those of the first run hold for later runs;
        `templates` has them, by micro-batch.
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
        """Return whether the shapes of message `m` are known without a header."""
        return self.templates[m] is not None and not self._dynamic

    def learn(self, m: int) -> None:
        """Wait for the header of message `m`."""
        self.templates[m] = self._headers.receive_header(self.peer)

    def receive(self, channel: P2PChannel | Post, m: int) -> None:
        """Start to receive message `m`."""
        self._incoming[m] = expect_payload(channel, self.templates[m], self.peer)

    def arrive(self, m: int) -> None:
        """Wait for message `m`."""
        # the stage computes with it next
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
        """Start to send the gradients of `m` back."""
        return send_gradients(channel, self.templates[m], self.owed(m), self.peer)


class SendLink:
    """The link to the next stage, on rank `peer`; it refuses messages of other shapes than agreed.

    trains: whether the schedule has backwards. headers, dynamic: as in `RecvLink`.
    keeps_outputs: keep outputs until their backward, for a caller's own backward; see [Note: What a
        sent output holds]. `StageRunner.begin` sets it.
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
        """Send the header of `m` if the peer waits for one; otherwise check the output's shapes.

        Raises:
            CommError: the output has other shapes than agreed, or is on another device.
        """
        template, output, device = self.templates[m], self._outputs[m], self._headers.device
        if template is None or self._dynamic:
            self.templates[m] = self._headers.send_header(describe(output, device), self.peer)
        elif not template.matches(output):
            agreed, actual = template.description, describe(output, device)
            raise CommError(
                f"stage {self.stage} sends {actual} for microbatch {m}, but agreed on {agreed} in "
                f"the first step; keep shapes and dtypes, and let what will ever have "
                f"requires_grad=True have it in the first step (to freeze it later is fine), or "
                f"set dynamic_shapes"
            )

    def send(self, channel: P2PChannel | Post, m: int) -> Work:
        """Start to send the output of `m`."""
        tensors = tensors_of(self._outputs[m])
        work = send_payload(channel, self.templates[m], tensors, self.peer)
        if self.keeps_outputs:
            self._sends[m] = work
        else:  # see [Note: What a sent output holds]
            self._outputs[m] = tuple(map(graph_root, tensors)) if self._trains else None
        return work

    def reset(self) -> None:
        """Release what an interrupted run left."""
        num = len(self._incoming)
        self._incoming[:], self._sends[:] = [_NOTHING] * num, [_DONE] * num

    def receive(self, channel: P2PChannel | Post, m: int) -> None:
        """Start to receive the gradients that come back for `m`."""
        self._incoming[m] = expect_gradients(channel, self.templates[m], self.peer)

    def arrive(self, m: int) -> None:
        """Wait for the gradients of `m`; their sender has then received the output."""
        self._incoming[m].work.wait()
        # frees the output: a gradient can only come back once the output has arrived
        self._sends[m].wait()
        self._sends[m] = _DONE

    def gradients(self, m: int) -> tuple[Tensor | None, ...]:
        """Return the gradients of `m`, one for each member of the output."""
        incoming, self._incoming[m] = self._incoming[m], _NOTHING
        return self.templates[m].scatter_grads(incoming.buffers)


def graph_root(x: Tensor | None) -> Root | None:
    """Return the root of `x` in its graph, which keeps the graph alive."""
    if x is None or not x.requires_grad:
        return None
    edge = get_gradient_edge(x)
    # The edge of a Python autograd function does not keep the graph behind it alive, unless a newer
    # torch adds an owner as a third element. Then keep the tensor instead.
    owns = not isinstance(edge.node, torch._C._FunctionBase) or any(edge[2:])
    return edge if owns else x

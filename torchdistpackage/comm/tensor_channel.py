"""Messages of tensors: a header that describes the payload, the payload, and the sends in flight.

    sender      send_header(description) ──► send(spec, tensors) ──► settle()
    receiver    receive_header() ──────────► receive(spec) ────────► wait()

A receiver must know shapes and dtypes before it can post its receive, so a message that is not
agreed on has a header, which the receiver waits for on the host. Headers have a tag of their own on
gloo, and where payloads go from GPU to GPU they go through host memory, so that no rank stops a
device to read one. What they say, and what follows from it, is in tensor_meta.py.

`Pipeline` sends headers in its first run alone, and its payloads by the channels that its program
chooses; a placed program and the messages by hand in compat send both each time.
"""

import sys
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from torchdistpackage.comm.backends import is_queued, require_host_memory
from torchdistpackage.comm.group_state import state_of
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.p2p import P2PChannel, Post
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tensor_meta import (
    HEADER_BYTES,
    Description,
    MessageSpec,
    decode,
    encode,
)
from torchdistpackage.comm.work import Work

TAG = 0x7DC
"""Tag of a pipeline's headers. The debug mode uses 0x7DD and 0x7DE."""
_SPECS_KEPT = 64
"""Largest number of headers, with their specs, that a channel keeps for reuse."""


class Incoming:
    """A payload on its way to this rank: the buffers that it fills, and the work that waits for
    it.
    """

    __slots__ = ("buffers", "work")

    def __init__(self, buffers: Sequence[Tensor | None], work: Work):
        self.buffers, self.work = buffers, work

    def wait(self) -> Sequence[Tensor | None]:
        """Return the buffers, filled; raises CommError as `Work.wait` does."""
        # the buffers have nothing to read before the messages have arrived
        self.work.wait()
        return self.buffers


def send_payload(
    channel: P2PChannel | Post, spec: MessageSpec, tensors: Sequence[Tensor | None], target: int
) -> Work:
    """Send the members of a message to global rank `target`; keep them until it has left."""
    return channel.send(spec.travelling(tensors), target)


def expect_payload(channel: P2PChannel | Post, spec: MessageSpec, source: int) -> Incoming:
    """Make buffers for a message of global rank `source`, and begin to receive."""
    buffers = spec.allocate()
    return Incoming(buffers, channel.receive(spec.travelling(buffers), source))


def send_gradients(
    channel: P2PChannel | Post, spec: MessageSpec, gradients: Sequence[Tensor], target: int
) -> Work:
    """Send back the gradients of a message, in the order of `spec.wanting`."""
    return channel.send(spec.travelling_back(gradients), target)


def expect_gradients(channel: P2PChannel | Post, spec: MessageSpec, source: int) -> Incoming:
    """Allocate buffers for the gradients of a message sent to `source`, and start receiving."""
    buffers = spec.allocate_gradients()
    return Incoming(buffers, channel.receive(spec.travelling_back(buffers), source))


class SendQueue:
    """Sends in flight, oldest first; the queue bounds the memory that they hold.

    max_sends, max_bytes: beyond these, `add` waits for the oldest; None: unlimited.
    """

    __slots__ = ("_bytes", "_max_bytes", "_max_sends", "_works")

    def __init__(self, max_sends: int | None = None, max_bytes: int | None = None):
        self._max_sends = sys.maxsize if max_sends is None else max_sends
        self._max_bytes = sys.maxsize if max_bytes is None else max_bytes
        self._works: deque[tuple[Work, int]] = deque()
        self._bytes = 0

    def add(self, work: Work, num_bytes: int = 0) -> None:
        """Keep `work`, which holds `num_bytes`, until it is done."""
        works = self._works
        works.append((work, num_bytes))
        self._bytes += num_bytes
        # a sender ahead of its receiver would hold the memory of ever more payloads
        while len(works) > self._max_sends or self._bytes > self._max_bytes:
            self._wait_for_oldest()

    def settle(self) -> None:
        """Wait until all sends have left."""
        while self._works:
            self._wait_for_oldest()

    def reset(self) -> None:
        """Drop the sends of an interrupted run."""
        self._works.clear()
        self._bytes = 0

    def _wait_for_oldest(self) -> None:
        work, num_bytes = self._works.popleft()
        self._bytes -= num_bytes
        # the oldest was begun first, so it is the one most likely to be over
        work.wait()


class TensorChannel:
    """Messages to and from the other ranks of a group, in order by pair.

    All ranks of the group make it together.

    device: device of the messages' tensors. tag: separates these messages from those of other tags
    (gloo). max_sends, max_bytes: as `SendQueue`. host: channel for host memory; headers go there,
    on gloo payloads too. sends: the headers that this channel has sent, and additions of its user.

    Raises:
        CommError: messages cannot go from `device` over this group.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        timeout_s: float | None = None,
        *,
        tag: int = TAG,
        max_sends: int | None = None,
        max_bytes: int | None = None,
    ):
        if state_of(group).direct:
            require_host_memory("messages between stages", group, torch.empty(0, device=device))
        self.device = device
        self.host = P2PChannel(on_cpu(group), timeout_s, tag=tag)
        self._payloads = P2PChannel(group, timeout_s) if is_queued(group) else self.host
        self.sends = SendQueue(max_sends, max_bytes)
        self._written: dict[Description, tuple[list[Tensor], MessageSpec]] = {}
        self._read: dict[bytes, MessageSpec] = {}

    def send_header(self, description: Description, target: int) -> MessageSpec:
        """Send a description of the next message to global rank `target`, without waiting."""
        entry = self._written.get(description)
        if entry is None:
            if len(self._written) == _SPECS_KEPT:
                self._written.clear()
            spec = MessageSpec(description, self.device)
            entry = self._written[description] = (encode(description), spec)
        self.sends.add(self.host.send(entry[0], target))
        return entry[1]

    def receive_header(self, source: int) -> MessageSpec:
        """Wait for the description of the next message from global rank `source`."""
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
        # the host reads the header next, to learn how large the payload's buffers must be
        self.host.receive([header], source).wait()
        num_missing = int.from_bytes(header[:8].numpy().tobytes(), "big") + 8 - HEADER_BYTES
        if num_missing > 0:
            rest = torch.empty(num_missing, dtype=torch.uint8, device="cpu")
            # its length is known only from the header that has arrived, so it cannot be asked for
            # earlier
            self.host.receive([rest], source).wait()
            header = torch.cat([header, rest])
        raw = header.numpy().tobytes()
        spec = self._read.get(raw)
        if spec is None:
            if len(self._read) == _SPECS_KEPT:
                self._read.clear()
            spec = self._read[raw] = MessageSpec(decode(raw), self.device)
        return spec

    def send(self, spec: MessageSpec, tensors: Sequence[Tensor | None], target: int) -> None:
        """Send a payload without waiting; `tensors` must not change until it has left."""
        self.sends.add(send_payload(self._payloads, spec, tensors, target), spec.num_bytes)

    def receive(self, spec: MessageSpec, source: int) -> Incoming:
        """Begin to receive a payload."""
        return expect_payload(self._payloads, spec, source)

    def settle(self) -> None:
        """Wait until all sends have left."""
        self.sends.settle()

    def reset(self) -> None:
        """Drop the sends of an interrupted run."""
        self.sends.reset()

    def limit(self, timeout_s: float | None) -> None:
        """Set how many seconds each later message may take."""
        self.host.limit(timeout_s)
        self._payloads.limit(timeout_s)

"""Descriptions that travel ahead of messages, on a road of their own.

One rule: a header is never among the messages of a pair, whatever the order in which those are
posted: on gloo it has a tag, and where messages go from GPU to GPU it goes through host memory, so
that nobody stops a device to read it.
"""

import torch

from torchdistpackage.comm.backends import require_host_memory
from torchdistpackage.comm.companions import on_cpu
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.messages import (
    Description,
    decode,
    encode,
    header_room,
    rest_room,
)
from torchdistpackage.comm.p2p import P2PChannel
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tensor_meta import MessageSpec
from torchdistpackage.comm.work import Work

_CPU = torch.device("cpu")
TAG = 0x7DC
_KEPT = 64
"""Descriptions whose header and template are kept."""


class MetaChannel:
    """Descriptions to and from the ranks of a group, in order by pair; all ranks make it together.

    device: where the messages themselves are. always: each message has one (changing shapes).

    Raises:
        CommError: messages cannot go from there over this group.
    """

    def __init__(
        self, group: Group, device: torch.device, timeout_s: float | None, *, always: bool
    ):
        if recorder.line(group).direct:
            require_host_memory("messages between stages", group, torch.empty(0, device=device))
        self.always, self.device = always, device
        self._wire = P2PChannel(on_cpu(group), timeout_s, tag=TAG)
        self._written: dict[Description, tuple[list[torch.Tensor], MessageSpec]] = {}
        self._read: dict[bytes, MessageSpec] = {}
        self._left: list[Work] = []

    def send(self, description: Description, target: int) -> MessageSpec:
        """Tell global rank `target` what comes next; it need not be there yet."""
        known = self._written.get(description)
        if known is None:
            if len(self._written) == _KEPT:
                self._written.clear()
            template = MessageSpec(description, self.device)
            known = self._written[description] = (encode(description, _CPU), template)
        self._left.append(self._wire.send(known[0], target))
        return known[1]

    def receive(self, source: int) -> MessageSpec:
        """Wait for what global rank `source` says of its next message."""
        header = header_room(_CPU)
        self._wire.receive([header], source).wait()
        rest = rest_room(header)
        if rest is not None:
            self._wire.receive([rest], source).wait()
            return MessageSpec(decode(header, rest), self.device)
        raw = header.numpy().tobytes()
        template = self._read.get(raw)
        if template is None:
            if len(self._read) == _KEPT:
                self._read.clear()
            template = self._read[raw] = MessageSpec(decode(header, None), self.device)
        return template

    def settle(self) -> None:
        """Wait until all have left."""
        while self._left:
            self._left.pop().wait()

    def reset(self) -> None:
        """Let go of what an interrupted run has left."""
        self._left.clear()

    def limit(self, timeout_s: float | None) -> None:
        """How long a header may take from now on."""
        self._wire.limit(timeout_s)

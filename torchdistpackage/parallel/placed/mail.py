"""Messages of a placed program: outputs on their way to other ranks, and gradients back.

One rule: a rank posts its messages in the order of `routes.py`, and waits only for what it is about
to use. A send leaves from a copy, so the program may change its tensors right after.

Each output travels behind a header in host memory, which says its structure, its shapes, and the
number of the operation that it is for. Gradients have the shapes of what was sent: before them go
only the number and which of them there are.
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdistpackage.comm.backends import device_of
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.p2p import P2PChannel, start_receive, start_send
from torchdistpackage.comm.primitives import Group, is_queued
from torchdistpackage.comm.tensor_meta import (
    Description,
    MessageSpec,
    TensorMeta,
    decode,
    encode,
    receive_header,
)
from torchdistpackage.comm.work import Work
from torchdistpackage.errors import CommError, PlacementError
from torchdistpackage.parallel.placed.structure import from_text

log = logging.getLogger(__name__)

TAG = 0x7DD
MAX_UNDER_WAY = 64
"""Messages that a rank may be ahead of those that receive them, in number and in bytes."""
MAX_UNDER_WAY_BYTES = 1 << 30


class Delivery(NamedTuple):
    """What came: the structure, its tensors, and which of them want a gradient."""

    skeleton: Any
    tensors: list[Tensor]
    wants: list[bool]


class ExpectedGrads:
    """Gradients on their way here; `wait()` gives them, None where none was made."""

    __slots__ = ("_flags", "_found", "_room", "_works")

    def __init__(self, works: list[Work], flags: Tensor, room: list[Tensor]):
        self._works, self._flags, self._room = works, flags, room
        self._found: list[Tensor | None] | None = None

    def wait(self, operation: int) -> list[Tensor | None]:
        """The gradients of what was sent to `operation`.

        Raises:
            CommError: they are those of another operation.
        """
        if self._found is None:
            for work in self._works:
                work.wait()
            number, *there = self._flags.tolist()
            _same_operation(operation, number, "gradients")
            self._found = [x if is_there else None for x, is_there in zip(self._room, there)]  # noqa: B905
        return self._found


class Mail:
    """The messages of one rank with the others of a group; all of them make it together."""

    def __init__(self, group: Group):
        self._group, self._queued = group, is_queued(group)
        self.device = device_of(group)
        self._host = P2PChannel(on_cpu(group), tag=TAG)
        self._under_way: deque[tuple[Work, int]] = deque()
        self._bytes_under_way = 0
        self.posted: list[tuple[str, int, int]] | None = None
        """(what, operation, peer) of each message, where a test asks for them."""

    def send(
        self, operation: int, text: str, tensors: Sequence[Tensor], wants: Sequence[bool], to: int
    ) -> None:
        """Send an output, `text` its structure, to rank `to` for `operation`; does not wait."""
        self._note("send", operation, to)
        members = []
        for x, wanted in zip(tensors, wants, strict=True):
            if x.layout is not torch.strided or x.is_quantized or x.is_meta:
                raise PlacementError(
                    f"operation {operation} reads a tensor of layout {x.layout}, device "
                    f"{x.device}, dtype {x.dtype} from another rank; only dense tensors with "
                    f"memory can move: make it dense in the operation before"
                )
            members.append(TensorMeta(tuple(x.shape), x.dtype, wanted))
        description = Description("tuple", (str(operation), text), tuple(members))
        # copies: what was sent is what it was at this call
        copies = [torch.empty(x.shape, dtype=x.dtype, device=self.device) for x in tensors]
        with torch.no_grad():
            for copied, x in zip(copies, tensors, strict=True):
                copied.copy_(x)
        header = self._host.send(encode(description), to)
        spec = MessageSpec(description, self.device)
        self._keep([header, *self._send(spec.travelling(copies), to)], spec.num_bytes)

    def receive(self, operation: int, source: int) -> Delivery:
        """Wait for what rank `source` sends for `operation`.

        Raises:
            CommError: it is at another operation.
        """
        self._note("receive", operation, source)
        description = decode(receive_header(self._host, source))
        number, text = description.keys
        _same_operation(operation, int(number), "an output", source)
        spec = MessageSpec(description, self.device)
        room = [x for x in spec.allocate() if x is not None]
        for work in self._receive(spec.travelling(room), source):
            work.wait()
        wants = [m.requires_grad for m in description.members if m is not None]
        return Delivery(from_text(text), room, wants)

    def send_gradients(
        self,
        operation: int,
        gradients: Sequence[Tensor | None],
        like: Sequence[TensorMeta],
        to: int,
    ) -> None:
        """Send the gradients of what came from rank `to` for `operation`; does not wait."""
        if log.isEnabledFor(logging.DEBUG):
            shapes = [None if x is None else tuple(x.shape) for x in gradients]
            log.debug("sending gradients %s of operation %s to rank %s", shapes, operation, to)
        self._note("send gradients", operation, to)
        there = [int(x is not None) for x in gradients]
        flags = torch.tensor([operation, *there], dtype=torch.int64, device="cpu")
        tensors = []
        for x, meta in zip(gradients, like, strict=True):
            if x is None:  # the peer has posted a receive for it
                x = torch.zeros(meta.shape, dtype=meta.dtype, device=self.device)
            x = x.to_dense() if x.layout is not torch.strided else x
            tensors.append(x.detach().to(self.device).contiguous())
        spec = _spec(like, self.device)
        works = [self._host.send([flags], to), *self._send(spec.travelling(tensors), to)]
        self._keep(works, spec.num_bytes)

    def expect_gradients(
        self, operation: int, like: Sequence[TensorMeta], source: int
    ) -> ExpectedGrads:
        """Post room for the gradients of what rank `source` read in `operation`."""
        if log.isEnabledFor(logging.DEBUG):
            shapes = [meta.shape for meta in like]
            log.debug(
                "expecting gradients %s of operation %s from rank %s", shapes, operation, source
            )
        self._note("receive gradients", operation, source)
        flags = torch.empty(len(like) + 1, dtype=torch.int64, device="cpu")
        spec = _spec(like, self.device)
        room = [x for x in spec.allocate() if x is not None]
        works = [self._host.receive([flags], source)]
        works += self._receive(spec.travelling(room), source)
        return ExpectedGrads(works, flags, room)

    def settle(self) -> None:
        """Wait until all that was sent has left."""
        while self._under_way:
            self._wait_for_oldest()

    def _send(self, tensors: list[Tensor], to: int) -> list[Work]:
        if self._queued:
            return [start_send(x, self._group, to) for x in tensors]
        return [self._host.send(tensors, to)] if tensors else []

    def _receive(self, rooms: list[Tensor], source: int) -> list[Work]:
        if self._queued:
            return [start_receive(x, self._group, source) for x in rooms]
        return [self._host.receive(rooms, source)] if rooms else []

    def _keep(self, works: list[Work], num_bytes: int) -> None:
        self._under_way += [(work, 0) for work in works[:-1]] + [(works[-1], num_bytes)]
        self._bytes_under_way += num_bytes
        while (
            len(self._under_way) > 2 * MAX_UNDER_WAY or self._bytes_under_way > MAX_UNDER_WAY_BYTES
        ) and self._under_way:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        work, num_bytes = self._under_way.popleft()
        self._bytes_under_way -= num_bytes
        work.wait()

    def _note(self, what: str, operation: int, peer: int) -> None:
        if self.posted is not None:
            self.posted.append((what, operation, peer))


def _spec(like: Sequence[TensorMeta], device: torch.device) -> MessageSpec:
    return MessageSpec(Description("tuple", (), tuple(like)), device)


def _same_operation(mine: int, theirs: int, what: str, source: int | None = None) -> None:
    if mine != theirs:
        where = "" if source is None else f" from rank {source}"
        raise CommError(
            f"{what}{where} for operation {theirs} came where operation {mine} waits for its own: "
            f"the ranks did not call the same operations in the same order; debug=True (or "
            f"TDP_PLACED_DEBUG=1) names the first that differs"
        )

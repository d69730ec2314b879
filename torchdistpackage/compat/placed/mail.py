"""Messages of a placed program: outputs to other ranks, and gradients back.

One rule: a rank posts its messages in the order of `routes.py`, and waits only for what it is about
to use. A send reads from a copy, so the program may change its tensors right after.

A header in host memory precedes each output, with its structure, its shapes, and the number of the
operation that reads it. Gradients have the shapes of the tensors that were sent: only the number
and flags that say which gradients exist precede them.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdistpackage.comm.backends import device_of
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tensor_channel import Incoming, TensorChannel
from torchdistpackage.comm.tensor_meta import Description, MessageSpec, TensorMeta
from torchdistpackage.comm.work import Work
from torchdistpackage.compat.placed.structure import from_text
from torchdistpackage.errors import CommError, PlacementError

log = logging.getLogger(__name__)

TAG = 0x7DF
"""The tag of a placed program's messages; pipelines and the debug mode have others."""
MAX_UNDER_WAY = 64
"""Largest number of messages that a rank has sent and nobody has received."""
MAX_UNDER_WAY_BYTES = 1 << 30
"""Largest size of these messages together."""


class Delivery(NamedTuple):
    """A received message: its structure, its tensors, and which of them require a gradient."""

    skeleton: Any
    tensors: list[Tensor]
    wants: list[bool]


class ExpectedGrads:
    """Gradients that another rank sends; `wait()` returns them, None for each that has none."""

    __slots__ = ("_flags", "_flags_work", "_gradients", "_received")

    def __init__(self, flags: Tensor, flags_work: Work, gradients: Incoming):
        self._flags = flags
        self._flags_work = flags_work
        self._gradients = gradients
        self._received: list[Tensor | None] | None = None

    def wait(self, operation: int) -> list[Tensor | None]:
        """Wait for the gradients of the tensors that `operation` read.

        Raises:
            CommError: gradients of another operation came.
        """
        if self._received is None:
            # the flags say which of the gradients were sent and which stay None
            self._flags_work.wait()
            buffers = self._gradients.wait()
            number, *has_gradient = self._flags.tolist()
            _same_operation(operation, number, "gradients")
            self._received = [x if is_there else None for x, is_there in zip(buffers, has_gradient)]  # noqa: B905
        return self._received


class Mail:
    """Exchanges messages with the other ranks of a group; all ranks make it together."""

    def __init__(self, group: Group):
        self.device = device_of(group)
        # a header or flags, and a payload
        bounds = {"max_sends": 2 * MAX_UNDER_WAY, "max_bytes": MAX_UNDER_WAY_BYTES}
        self._channel = TensorChannel(group, self.device, tag=TAG, **bounds)
        self.posted: list[tuple[str, int, int]] | None = None
        """(kind, operation, peer) of each message, if a test sets it to a list."""

    def send(
        self, operation: int, text: str, tensors: Sequence[Tensor], wants: Sequence[bool], to: int
    ) -> None:
        """Send an output to rank `to` for `operation`, without waiting. text: its structure."""
        self._note("send", operation, to)
        members = []
        for x, target in zip(tensors, wants, strict=True):
            if x.layout is not torch.strided or x.is_quantized or x.is_meta:
                raise PlacementError(
                    f"operation {operation} reads a tensor of layout {x.layout}, device "
                    f"{x.device}, dtype {x.dtype} from another rank; only dense tensors with "
                    f"memory can move: make it dense in the operation before"
                )
            members.append(TensorMeta(tuple(x.shape), x.dtype, target))
        description = Description("tuple", (str(operation), text), tuple(members))
        # send copies, as the program may change its tensors before the send has left
        copies = [torch.empty(x.shape, dtype=x.dtype, device=self.device) for x in tensors]
        with torch.no_grad():
            for copied, x in zip(copies, tensors, strict=True):
                copied.copy_(x)
        self._channel.send(self._channel.send_header(description, to), copies, to)

    def receive(self, operation: int, source: int) -> Delivery:
        """Wait for the output that rank `source` sends for `operation`.

        Raises:
            CommError: the rank sent it for another operation.
        """
        self._note("receive", operation, source)
        spec = self._channel.receive_header(source)
        number, text = spec.description.keys
        _same_operation(operation, int(number), "an output", source)
        # the operation reads them at once
        tensors = [x for x in self._channel.receive(spec, source).wait() if x is not None]
        wants = [m.requires_grad for m in spec.description.members if m is not None]
        return Delivery(from_text(text), tensors, wants)

    def send_gradients(
        self,
        operation: int,
        gradients: Sequence[Tensor | None],
        like: Sequence[TensorMeta],
        to: int,
    ) -> None:
        """Send the gradients of what came from rank `to` for `operation`, without waiting."""
        if log.isEnabledFor(logging.DEBUG):
            shapes = [None if x is None else tuple(x.shape) for x in gradients]
            log.debug("sending gradients %s of operation %s to rank %s", shapes, operation, to)
        self._note("send gradients", operation, to)
        has_gradient = [int(x is not None) for x in gradients]
        flags = torch.tensor([operation, *has_gradient], dtype=torch.int64, device="cpu")
        tensors = []
        for x, meta in zip(gradients, like, strict=True):
            if x is None:  # the peer has posted a receive for every gradient
                x = torch.zeros(meta.shape, dtype=meta.dtype, device=self.device)
            x = x.to_dense() if x.layout is not torch.strided else x
            tensors.append(x.detach().to(self.device).contiguous())
        self._channel.sends.add(self._channel.host.send([flags], to))
        self._channel.send(_spec(like, self.device), tensors, to)

    def expect_gradients(
        self, operation: int, like: Sequence[TensorMeta], source: int
    ) -> ExpectedGrads:
        """Begin to receive the gradients of the tensors that rank `source` read in `operation`."""
        if log.isEnabledFor(logging.DEBUG):
            shapes = [meta.shape for meta in like]
            log.debug(
                "expecting gradients %s of operation %s from rank %s", shapes, operation, source
            )
        self._note("receive gradients", operation, source)
        flags = torch.empty(len(like) + 1, dtype=torch.int64, device="cpu")
        flags_work = self._channel.host.receive([flags], source)
        gradients = self._channel.receive(_spec(like, self.device), source)
        return ExpectedGrads(flags, flags_work, gradients)

    def settle(self) -> None:
        """Wait until all messages have left."""
        self._channel.settle()

    def _note(self, kind: str, operation: int, peer: int) -> None:
        if self.posted is not None:
            self.posted.append((kind, operation, peer))


def _spec(like: Sequence[TensorMeta], device: torch.device) -> MessageSpec:
    return MessageSpec(Description("tuple", (), tuple(like)), device)


def _same_operation(
    expected: int, number: int, message_kind: str, source: int | None = None
) -> None:
    if expected != number:
        where = "" if source is None else f" from rank {source}"
        raise CommError(
            f"{message_kind}{where} for operation {number} came where operation {expected} waits "
            f"for its own: the ranks did not call the same operations in the same order; "
            f"debug=True (or TDP_PLACED_DEBUG=1) names the first that differs"
        )

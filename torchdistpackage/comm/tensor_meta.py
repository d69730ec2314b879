"""Descriptions of the messages between stages: what they say, how they travel, and their use.

A message is one tensor, a tuple, or a flat dict of tensors and None. Its `Description` says
structure, shapes, dtypes and which members want a gradient. A receiver must know it before it can
post its receive, so it travels ahead (`MetaChannel`), apart from the messages of a pair, whatever
the order in which those are posted: on gloo it has a tag, and where messages go from GPU to GPU it
goes through host memory, so that no rank stops a device to read it. Gradients go back in the shape
of what was sent, so they need no description.

A `MessageSpec` is a description made ready for use: what follows from it alone is worked out once,
so that a message of known form costs its allocation and its posting alone.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdistpackage.comm.backends import require_host_memory
from torchdistpackage.comm.dtypes import to_bytes
from torchdistpackage.comm.group_state import state_of
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.p2p import P2PChannel
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.work import Work
from torchdistpackage.errors import CommError

Members = dict[str, Tensor | None]
Message = Tensor | None | tuple[Tensor | None, ...] | Members

HEADER_BYTES = 1024
"""A description that does not fit says so in the first header and follows in a second."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        grad = " requires_grad" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{grad}"


@dataclass(frozen=True, slots=True)
class Description:
    """Structure of a message: `tensor`, `tuple` or `dict`, with a TensorMeta or None each."""

    form: str
    keys: tuple[str, ...]
    members: tuple[TensorMeta | None, ...]

    def __str__(self) -> str:
        shown = [str(m) for m in self.members]
        if self.form == "dict":
            shown = [f"{k}: {m}" for k, m in zip(self.keys, shown, strict=True)]
        return shown[0] if self.form == "tensor" else f"{self.form}({', '.join(shown)})"

    def build(self, tensors: Sequence[Tensor | None]) -> Message:
        """The message again, from its members."""
        if self.form == "tensor":
            return tensors[0]
        if self.form == "dict":
            return dict(zip(self.keys, tensors, strict=True))
        return tuple(tensors)


def tensors_of(message: Message) -> tuple[Tensor | None, ...]:
    """The members in order."""
    if isinstance(message, dict):
        return tuple(message.values())
    if isinstance(message, tuple | list):
        return tuple(message)
    return (message,)


def describe(message: Message, device: torch.device | None = None) -> Description:
    """Description of a message about to be sent.

    device: where the receiver makes room, so where all members must be; None: anywhere.

    Raises:
        CommError: a member is no tensor, a key no string, or a member is elsewhere.
    """
    keys = tuple(message) if isinstance(message, dict) else ()
    if any(not isinstance(key, str) for key in keys):
        raise CommError(f"keys of a message between stages must be strings, not {keys}")
    tensors = tensors_of(message)
    for name, x in zip(keys or range(len(tensors)), tensors, strict=True):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise CommError(
                f"member {name!r} of a message between stages is a {type(x).__name__}; a message "
                f"is a tensor, a tuple or a flat dict of tensors and None"
            )
        if device is not None and x.is_cpu is not (device.type == "cpu"):
            raise CommError(
                f"member {name!r} of a message between stages is on {x.device}, but messages of "
                f"this group go from {device.type} to {device.type}; give x.to({device.type!r}), "
                f"or leave it out of the message and make it on the stage that reads it"
            )
    form = "dict" if isinstance(message, dict) else "tensor"
    if isinstance(message, tuple | list):
        form = "tuple"
    members = tuple(
        None if x is None else TensorMeta(tuple(x.shape), x.dtype, x.requires_grad) for x in tensors
    )
    return Description(form, keys, members)


def encode(description: Description) -> list[Tensor]:
    """Header tensors (HEADER_BYTES,) uint8, and a second one for what does not fit."""
    members = [
        m and [list(m.shape), str(m.dtype).removeprefix("torch."), m.requires_grad]
        for m in description.members
    ]
    text = json.dumps([description.form, description.keys, members]).encode()
    raw = len(text).to_bytes(8, "big") + text
    first, rest = raw[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"), raw[HEADER_BYTES:]
    parts = [first, rest] if rest else [first]
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]


def decode(raw: bytes) -> Description:
    """The description that `encode` wrote."""
    form, keys, members = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "big")])
    return Description(
        form,
        tuple(keys),
        tuple(m and TensorMeta(tuple(m[0]), _dtype(m[1]), m[2]) for m in members),
    )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CommError(f"a peer sent a tensor of dtype {name!r}, which this torch does not have")
    return dtype


class MessageSpec:
    """Room for a message, the message from its room, and whether another is of the same form.

    num, num_bytes: of all members. wanting: places of those whose gradient comes back.
    """

    __slots__ = (
        "_device", "_made", "_moving", "_moving_back", "_on_host", "_wanted",
        "description", "num", "num_bytes", "wanting",
    )  # fmt: skip

    def __init__(self, description: Description, device: torch.device):
        self.description, self._device = description, device
        self._on_host = device.type == "cpu"
        members = description.members
        self.num = len(members)
        # empty tensors do not travel: the other side makes its own
        self._moving = [i for i, m in enumerate(members) if m is not None and 0 not in m.shape]
        self._made = [(i, torch.Size(m.shape), m.dtype) for i, m in enumerate(members) if m]
        self.num_bytes = sum(shape.numel() * dtype.itemsize for _, shape, dtype in self._made)
        self.wanting = [i for i, m in enumerate(members) if m is not None and m.requires_grad]
        self._wanted = [made for made in self._made if made[0] in self.wanting]
        self._moving_back = [k for k, i in enumerate(self.wanting) if i in self._moving]

    def allocate(self) -> list[Tensor | None]:
        """New memory for all members."""
        room: list[Tensor | None] = [None] * self.num
        for i, shape, dtype in self._made:
            room[i] = torch.empty(shape, dtype=dtype, device=self._device)
        return room

    def allocate_gradients(self) -> list[Tensor]:
        """New memory for the gradients that come back, in the order of `wanting`."""
        return [torch.empty(shape, dtype=t, device=self._device) for _, shape, t in self._wanted]

    def scatter_grads(self, gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """One place for each member, None where no gradient is wanted."""
        places: list[Tensor | None] = [None] * self.num
        for i, gradient in zip(self.wanting, gradients, strict=True):
            places[i] = gradient
        return tuple(places)

    def travelling(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Those that go over the wire, as they go: of a message, or of `room()` to be filled."""
        return [to_bytes(tensors[i]) for i in self._moving]  # type: ignore[arg-type]

    def travelling_back(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The same of gradients in the order of `wanting`, or of `allocate_gradients()`."""
        return [to_bytes(gradients[i]) for i in self._moving_back]

    def matches(self, message: Message) -> bool:
        """Whether `message` may go as this form: structure, shapes, dtypes, where the other side
        makes room for it, and no member wants a gradient that is not in the form.

        One that does not want its gradient any more (its stage was frozen) gets it, and drops it.
        """
        description = self.description
        if description.form == "tensor":
            tensors: Sequence[Tensor | None] = (message,)  # type: ignore[assignment]
        elif description.form == "dict":
            if not isinstance(message, dict) or tuple(message) != description.keys:
                return False
            tensors = tuple(message.values())
        elif isinstance(message, tuple | list):
            tensors = message
        else:
            return False
        if len(tensors) != self.num:
            return False
        for x, member in zip(tensors, description.members, strict=True):
            if member is None or not isinstance(x, Tensor):
                if x is not member:
                    return False
            elif (
                x.dtype is not member.dtype
                or (x.requires_grad and not member.requires_grad)
                or x.shape != member.shape
                or x.is_cpu is not self._on_host
            ):
                return False
        return True


def receive_header(channel: P2PChannel, source: int) -> bytes:
    """Wait for what `encode` wrote on global rank `source`."""
    header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
    channel.receive([header], source).wait()
    num_more = int.from_bytes(header[:8].numpy().tobytes(), "big") + 8 - HEADER_BYTES
    if num_more > 0:
        rest = torch.empty(num_more, dtype=torch.uint8, device="cpu")
        channel.receive([rest], source).wait()
        header = torch.cat([header, rest])
    return header.numpy().tobytes()


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
        if state_of(group).direct:
            require_host_memory("messages between stages", group, torch.empty(0, device=device))
        self.always, self.device = always, device
        self._wire = P2PChannel(on_cpu(group), timeout_s, tag=TAG)
        self._written: dict[Description, tuple[list[Tensor], MessageSpec]] = {}
        self._read: dict[bytes, MessageSpec] = {}
        self._left: list[Work] = []

    def send(self, description: Description, target: int) -> MessageSpec:
        """Send global rank `target` a description of what comes next, without waiting for it."""
        known = self._written.get(description)
        if known is None:
            if len(self._written) == _KEPT:
                self._written.clear()
            template = MessageSpec(description, self.device)
            known = self._written[description] = (encode(description), template)
        self._left.append(self._wire.send(known[0], target))
        return known[1]

    def receive(self, source: int) -> MessageSpec:
        """Wait for what global rank `source` says of its next message."""
        raw = receive_header(self._wire, source)
        template = self._read.get(raw)
        if template is None:
            if len(self._read) == _KEPT:
                self._read.clear()
            template = self._read[raw] = MessageSpec(decode(raw), self.device)
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


def pack_message(message: Message, more: Members) -> Members:
    """`message` and `more` as one flat dict, whose keys say what the message was.

    `=` a tensor, `(0`, `(1`, ... a tuple, `.name` a dict; `+name` a member of `more`.
    """
    if isinstance(message, dict):
        sealed = {f".{key}": x for key, x in message.items()}
    elif isinstance(message, tuple | list):
        sealed = {f"({i}": x for i, x in enumerate(message)}
    else:
        sealed = {"=": message}
    return sealed | {f"+{key}": x for key, x in more.items()}


def unpack_message(sealed: Members) -> tuple[Message, Members]:
    """What `pack_message` was given; a list comes back as a tuple."""
    more = {key[1:]: x for key, x in sealed.items() if key[0] == "+"}
    kept = {key: x for key, x in sealed.items() if key[0] != "+"}
    form = next(iter(kept), "(")[0]
    if form == ".":
        return {key[1:]: x for key, x in kept.items()}, more
    return kept["="] if form == "=" else tuple(kept.values()), more

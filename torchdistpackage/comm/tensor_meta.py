"""Descriptions of messages of tensors: what they say, how they are written, and their use.

A message is one tensor, a tuple, or a flat dict of tensors and None. Its `Description` says
structure, shapes, dtypes and which members want a gradient. A receiver must know it before it can
post its receive, so it travels ahead (tensor_channel.py). Gradients go back in the shape of what
was sent, so they need no description.

A `MessageSpec` is a description made ready for use: what follows from it alone is worked out once,
so that a message of known form costs its allocation and its posting alone.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdistpackage.comm.dtypes import to_bytes
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

    device: where the receiver makes its buffers, so where all members must be; None: anywhere.

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
    """Buffers for a message, the message from its buffers, and whether another is of the same form.

    num: how many members there are. num_bytes: of all of them together.
    wanting: numbers of the members whose gradient comes back.
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
        buffers: list[Tensor | None] = [None] * self.num
        for i, shape, dtype in self._made:
            buffers[i] = torch.empty(shape, dtype=dtype, device=self._device)
        return buffers

    def allocate_gradients(self) -> list[Tensor]:
        """New memory for the gradients that come back, in the order of `wanting`."""
        return [torch.empty(shape, dtype=t, device=self._device) for _, shape, t in self._wanted]

    def scatter_grads(self, gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """A gradient for each member, None where none is wanted."""
        found: list[Tensor | None] = [None] * self.num
        for i, gradient in zip(self.wanting, gradients, strict=True):
            found[i] = gradient
        return tuple(found)

    def travelling(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """The members that are sent, as they are sent: of a message, or of `allocate()`."""
        return [to_bytes(tensors[i]) for i in self._moving]  # type: ignore[arg-type]

    def travelling_back(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The same of gradients in the order of `wanting`, or of `allocate_gradients()`."""
        return [to_bytes(gradients[i]) for i in self._moving_back]

    def matches(self, message: Message) -> bool:
        """Whether `message` may go as this form: structure, shapes, dtypes, where the other side
        has its buffers, and no member wants a gradient that is not in the form.

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
    """Undo `pack_message`; a list comes back as a tuple."""
    more = {key[1:]: x for key, x in sealed.items() if key[0] == "+"}
    kept = {key: x for key, x in sealed.items() if key[0] != "+"}
    form = next(iter(kept), "(")[0]
    if form == ".":
        return {key[1:]: x for key, x in kept.items()}, more
    return kept["="] if form == "=" else tuple(kept.values()), more

"""Descriptions of messages of tensors: their content, their encoding and their use.

A message is one tensor, a tuple, or a flat dict of tensors and None. Its `Description` gives
structure, shapes, dtypes and which members want a gradient. A receiver needs it before it can post
its receive, so it travels ahead (tensor_channel.py). Gradients return in the shape of the message,
so they need no description.

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
"""Size of a header. A longer description says so in the first header and follows in a second."""


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
    """The structure of a message: `tensor`, `tuple` or `dict`, with a TensorMeta or None for
    each.
    """

    form: str
    keys: tuple[str, ...]
    members: tuple[TensorMeta | None, ...]

    def __str__(self) -> str:
        texts = [str(m) for m in self.members]
        if self.form == "dict":
            texts = [f"{k}: {m}" for k, m in zip(self.keys, texts, strict=True)]
        return texts[0] if self.form == "tensor" else f"{self.form}({', '.join(texts)})"

    def build(self, tensors: Sequence[Tensor | None]) -> Message:
        """Rebuild the message from its members."""
        if self.form == "tensor":
            return tensors[0]
        if self.form == "dict":
            return dict(zip(self.keys, tensors, strict=True))
        return tuple(tensors)


def tensors_of(message: Message) -> tuple[Tensor | None, ...]:
    """Return the members of a message, in order."""
    if isinstance(message, dict):
        return tuple(message.values())
    if isinstance(message, tuple | list):
        return tuple(message)
    return (message,)


def describe(message: Message, device: torch.device | None = None) -> Description:
    """Return the description of a message about to be sent.

    device: where the receiver allocates its buffers, so all members must be on it; None: any.

    Raises:
        CommError: a member is not a tensor, a key is not a string, or a member is elsewhere.
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
    """Return the header as uint8 (HEADER_BYTES,), and a second tensor for the overflow."""
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
    """Return the description that `encode` wrote."""
    form, keys, members = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "big")])
    return Description(
        form,
        tuple(keys),
        tuple(m and TensorMeta(tuple(m[0]), _dtype(m[1]), m[2]) for m in members),
    )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CommError(
            f"a peer sent a tensor of dtype {name!r}, which this torch does not have; use the "
            "same torch on all ranks"
        )
    return dtype


class MessageSpec:
    """A description made ready for use: it allocates buffers, and checks that a message fits.

    num: number of members. num_bytes: of all members together. wanting: indices of the members
    whose gradient is returned.
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
        self._wanted = [entry for entry in self._made if entry[0] in self.wanting]
        self._moving_back = [k for k, i in enumerate(self.wanting) if i in self._moving]

    def allocate(self) -> list[Tensor | None]:
        """Return new buffers for all members."""
        buffers: list[Tensor | None] = [None] * self.num
        for i, shape, dtype in self._made:
            buffers[i] = torch.empty(shape, dtype=dtype, device=self._device)
        return buffers

    def allocate_gradients(self) -> list[Tensor]:
        """Return new buffers for the returning gradients, in the order of `wanting`."""
        return [torch.empty(shape, dtype=t, device=self._device) for _, shape, t in self._wanted]

    def scatter_grads(self, gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Return a gradient for each member, None for members that want none."""
        by_member: list[Tensor | None] = [None] * self.num
        for i, gradient in zip(self.wanting, gradients, strict=True):
            by_member[i] = gradient
        return tuple(by_member)

    def travelling(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the non-empty members of a message, or of `allocate()`, in sending order."""
        return [to_bytes(tensors[i]) for i in self._moving]  # type: ignore[arg-type]

    def travelling_back(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the non-empty gradients in sending order, that of `wanting`."""
        return [to_bytes(gradients[i]) for i in self._moving_back]

    def matches(self, message: Message) -> bool:
        """Return True if `message` may be sent in this form.

        It needs the same structure, shapes and dtypes, and the device kind of the receiver's
        buffers. No member may want a gradient unless the form says so. A member that no longer
        wants its gradient (its stage was frozen) gets it, and drops it.
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
    """Return `message` and `more` as one flat dict, whose keys encode the structure of the message.

    `=` a tensor, `(0`, `(1`, ... a tuple, `.name` a dict; `+name` a member of `more`.
    """
    if isinstance(message, dict):
        packed = {f".{key}": x for key, x in message.items()}
    elif isinstance(message, tuple | list):
        packed = {f"({i}": x for i, x in enumerate(message)}
    else:
        packed = {"=": message}
    return packed | {f"+{key}": x for key, x in more.items()}


def unpack_message(sealed: Members) -> tuple[Message, Members]:
    """Undo `pack_message`; a list comes back as a tuple."""
    more = {key[1:]: x for key, x in sealed.items() if key[0] == "+"}
    members = {key: x for key, x in sealed.items() if key[0] != "+"}
    form = next(iter(members), "(")[0]
    if form == ".":
        return {key[1:]: x for key, x in members.items()}, more
    return members["="] if form == "=" else tuple(members.values()), more

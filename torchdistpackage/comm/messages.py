"""Descriptions of what travels between stages, and how they travel themselves.

A message is one tensor, a tuple, or a flat dict of tensors and None. Its `Description` says
structure, shapes, dtypes and which members want a gradient. A receiver must know it before
it can post its receive (meta_channel.py). Gradients go back in the shape of what was sent, so they
need no description ever.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdistpackage.errors import CommError

Message = Tensor | None | tuple[Tensor | None, ...] | dict[str, Tensor | None]

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
    """Structure of a message: `tensor`, `tuple` or `dict`, with a Member or None each."""

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
    tensors = tensors_of(message)
    for position, x in enumerate(tensors):
        if x is not None and not isinstance(x, Tensor):
            raise CommError(
                f"member {position} of a message between stages is a {type(x).__name__}; a message "
                f"is a tensor, a tuple or a flat dict of tensors and None"
            )
    keys = tuple(message) if isinstance(message, dict) else ()
    if any(not isinstance(key, str) for key in keys):
        raise CommError(f"keys of a message between stages must be strings, not {keys}")
    for name, x in zip(keys or range(len(tensors)), tensors, strict=True):
        if device is not None and x is not None and x.is_cpu is not (device.type == "cpu"):
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


def encode(description: Description, device: torch.device) -> list[Tensor]:
    """Header tensors (HEADER_BYTES,) uint8, and a second one for what does not fit."""
    members = [
        None if m is None else [list(m.shape), str(m.dtype).removeprefix("torch."), m.requires_grad]
        for m in description.members
    ]
    text = json.dumps([description.form, list(description.keys), members]).encode()
    first = bytearray(HEADER_BYTES)
    first[:8] = len(text).to_bytes(8, "big")
    fits = text[: HEADER_BYTES - 8]
    first[8 : 8 + len(fits)] = fits
    rest = text[HEADER_BYTES - 8 :]
    parts = [first, bytearray(rest)] if rest else [first]
    return [torch.frombuffer(part, dtype=torch.uint8).to(device) for part in parts]


def header_room(device: torch.device) -> Tensor:
    return torch.empty(HEADER_BYTES, dtype=torch.uint8, device=device)


def rest_room(header: Tensor) -> Tensor | None:
    """Room for the second header, where the first announces one."""
    length = int.from_bytes(bytes(header[:8].tolist()), "big")
    more = length - (HEADER_BYTES - 8)
    return torch.empty(more, dtype=torch.uint8, device=header.device) if more > 0 else None


def decode(header: Tensor, rest: Tensor | None) -> Description:
    """The description that `encode` wrote."""
    raw = bytes(header.tolist())
    text = raw[8 : 8 + int.from_bytes(raw[:8], "big")]
    if rest is not None:
        text += bytes(rest.tolist())
    form, keys, members = json.loads(text)
    return Description(
        form,
        tuple(keys),
        tuple(None if m is None else TensorMeta(tuple(m[0]), _dtype(m[1]), m[2]) for m in members),
    )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CommError(f"a peer sent a tensor of dtype {name!r}, which this torch does not have")
    return dtype

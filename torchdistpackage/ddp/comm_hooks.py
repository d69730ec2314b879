"""Buckets that travel in fewer bytes: communication hooks for NaiveDDP.

One rule: a hook gives back in the bucket what the plain reduction would, only less exactly. It is
`start(flat, group, op)`, which begins, and the `wait()` of what that returns, both called in the
same order on all ranks. A hook that must know what lies in a bucket has a method `bind` besides,
called for each bucket that is made, which returns that bucket's own `start`.

Behind its last member a bucket holds marks, which count users: they arrive zero or positive, as
they were.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group


class CommWork(Protocol):
    """A reduction under way."""

    def wait(self) -> object:
        """Return when the bucket holds the result; on CUDA the current stream waits."""
        ...


Start = Callable[..., CommWork]
"""(flat, group, op) -> CommWork: begins to reduce `flat` in place."""


class BucketMember(NamedTuple):
    """A gradient in a bucket: `flat.as_strided(shape, stride, offset)`, all in elements.

    parameter: whose it is, by which it is known again when buckets are packed anew.
    """

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    parameter: Tensor


class BindableHook(Protocol):
    """A hook with something to keep for each bucket."""

    def bind(self, members: Sequence[BucketMember], num_elements: int) -> Start:
        """The `start` of one bucket of `num_elements`, marks included."""
        ...


CommHook = Start | BindableHook


def bind(hook: CommHook, members: Sequence[BucketMember], num_elements: int) -> Start:
    """What begins the reductions of one bucket under `hook`."""
    make = getattr(hook, "bind", None)
    return hook if make is None else make(members, num_elements)  # type: ignore[return-value]


def bf16_compress(flat: Tensor, group: Group, op: object = primitives.SUM) -> CommWork:
    """Half the bytes of fp32: numbers are rounded to 8 bits, and so are their sums."""
    return _narrow(flat, group, op, torch.bfloat16)


def fp16_compress(flat: Tensor, group: Group, op: object = primitives.SUM) -> CommWork:
    """Half the bytes of fp32, in 11 bits: smaller rounding than bf16, and a smaller range.

    It overflows beyond 65504, where the result does: a mean is divided before it is summed.
    """
    return _narrow(flat, group, op, torch.float16)


def _narrow(flat: Tensor, group: Group, op: object, dtype: torch.dtype) -> CommWork:
    narrower = flat.is_floating_point() and flat.element_size() > dtype.itemsize
    if group.size() == 1 or not narrower:
        return primitives.start_all_reduce(flat, group, op)
    wire = flat.to(dtype)
    return _Narrowed(flat, wire, primitives.start_all_reduce(wire, group, op))


class _Narrowed:
    """Rounded numbers on their way."""

    __slots__ = ("_flat", "_pending", "_wire")

    def __init__(self, flat: Tensor, wire: Tensor, pending: CommWork):
        self._flat, self._wire, self._pending = flat, wire, pending

    def wait(self) -> None:
        self._pending.wait()
        self._flat.copy_(self._wire)

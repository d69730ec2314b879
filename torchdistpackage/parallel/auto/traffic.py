"""Count the bytes that forwards send, at the place where they are sent.

An all-reduce counts the bytes of the reduced tensor, a gather those of the joined tensor. How many
of them a link carries depends on the algorithm: about twice (n - 1) / n of an all-reduce, (n - 1) /
n of a gather.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchdistpackage.comm.flight_recorder import DTYPE, GROUP, OPERATION, SHAPE, recorder
from torchdistpackage.comm.primitives import Group

_KINDS = {"all_reduce": "sum", "reduce_scatter": "sum", "all_gather": "gather"}
SENT = ("sum", "gather")
"""Kinds that communicate in a forward; "copy" and "split" communicate only in the backward."""


@dataclass
class Traffic:
    """Calls and bytes by kind, of one device."""

    calls: dict[str, int]
    num_bytes: dict[str, int]

    def add(self, kind: str, num_bytes: int) -> None:
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.num_bytes[kind] = self.num_bytes.get(kind, 0) + num_bytes


counts: Traffic | None = None
"""Counts to which forwards of all shards of this process add, or None."""


@contextmanager
def count_traffic(rank: int = 0) -> Iterator[Traffic]:
    """Count what shard `rank` sends in forwards inside the block. Only one block at a time in a
    process.
    """
    global counts, _rank
    counts, _rank = Traffic({}, {}), rank
    try:
        yield counts
    finally:
        counts = None


@contextmanager
def counted_forward(group: Group) -> Iterator[None]:
    """Count the collectives of a forward on this rank, as recorded by the flight recorder.

    Slices of other ranks in a gather are assumed to be as large as this rank's.
    """
    if counts is None or group.rank() != _rank:
        yield
        return
    previous, recorder.ended = recorder.ended, []
    try:
        yield
    finally:
        noted, recorder.ended = recorder.ended, previous
        if previous is not None:
            previous += noted
        for call, _, _ in noted:
            kind, shape = _KINDS.get(call[OPERATION]), call[SHAPE]
            if kind is not None and shape is not None:
                times = len(call[GROUP].ranks) if kind == "gather" else 1
                counts.add(kind, times * math.prod(shape) * call[DTYPE].itemsize)


@contextmanager
def uncounted() -> Iterator[None]:
    """Leave forwards inside the block out of the count."""
    global counts
    saved, counts = counts, None
    try:
        yield
    finally:
        counts = saved


_rank = 0


def note(action: Any, value: Any, result: Any, rank: int) -> None:
    """Count one action of a wrapped module, if it communicates."""
    kind = getattr(action, "kind", "")
    if counts is not None and rank == _rank and kind in SENT and isinstance(value, Tensor):
        counts.add(kind, size_bytes(value if kind == "sum" else result))


def size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

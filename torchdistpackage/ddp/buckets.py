"""Which gradients travel together: a plan that is the same on every rank.

Parameters are taken in reverse order of registration, roughly the order in which a backward
finishes them, and packed into flat buckets by (dtype, device, group). A bucket ends with one
extra element for each member: the mark by which ranks tell each other whom they used. This
file is arithmetic on sizes and imports no torch.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

ALIGN_BYTES = 64
"""Members start on a cache line, so that copies and kernels run at full width."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter: its place in the module, its size, and what it may share a bucket with."""

    index: int
    num_elements: int
    element_bytes: int
    key: Hashable


@dataclass(frozen=True, slots=True)
class Bucket:
    """Members in order, where each starts, where the marks start, and the length of it all.

    All in elements.
    """

    key: Hashable
    members: tuple[int, ...]
    offsets: tuple[int, ...]
    marks: int
    num_elements: int


def plan(entries: Sequence[Entry], cap_bytes: int) -> tuple[Bucket, ...]:
    """Pack entries, last first, into buckets of at most `cap_bytes`.

    A larger entry has a bucket of its own. Buckets are ordered by their last member, which is
    when they can leave.
    """
    open_buckets: dict[Hashable, list[Entry]] = {}
    closed: list[list[Entry]] = []
    used_bytes: dict[Hashable, int] = {}
    for entry in reversed(entries):
        size = _aligned(entry) * entry.element_bytes
        held = open_buckets.setdefault(entry.key, [])
        if held and used_bytes[entry.key] + size > cap_bytes:
            closed.append(held)
            held = open_buckets[entry.key] = []
        if not held:
            used_bytes[entry.key] = 0
        held.append(entry)
        used_bytes[entry.key] += size
    closed += [held for held in open_buckets.values() if held]
    closed.sort(key=lambda held: -held[-1].index)
    return tuple(_bucket(held) for held in closed)


def _bucket(entries: Sequence[Entry]) -> Bucket:
    offsets: list[int] = []
    end = 0
    for entry in entries:
        offsets.append(end)
        end += _aligned(entry)
    members = tuple(entry.index for entry in entries)
    return Bucket(entries[0].key, members, tuple(offsets), end, end + len(entries))


def _aligned(entry: Entry) -> int:
    step = max(1, ALIGN_BYTES // entry.element_bytes)
    return -(-entry.num_elements // step) * step

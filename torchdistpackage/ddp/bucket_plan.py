"""Which gradients share a bucket, and how large buckets are: a plan that is equal on all ranks.

Parameters are taken in the order in which a backward finishes them, roughly the reverse of that
of registration, and packed into flat buckets by (dtype, device, group). A bucket ends with one
extra element for each member, its used flag. This file is arithmetic and imports no torch.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

MIB = 2**20

ALIGN_BYTES = 64
"""Members start on a cache line, so that copies and kernels run at full width."""

SLIGHT = 1 / 16
"""Part of the cap up to which what lies in a bucket waits for one more, of whatever size."""


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """default_bytes: where nothing is measured, or not yet. candidates_bytes: what
    `BucketTuner` chooses from."""

    default_bytes: int
    candidates_bytes: tuple[int, ...]


_SMALL = tuple(n * MIB for n in (1, 2, 4, 8, 16, 32))
"""Below these the processor's work for one more call costs what its bytes save."""
HOST = BucketSizes(4 * MIB, _SMALL)
QUEUED = BucketSizes(32 * MIB, (*_SMALL, 64 * MIB, 128 * MIB))
"""A link between devices carries 4 MiB in less time than the host takes to issue the call."""


def bucket_sizes(*, queued: bool) -> BucketSizes:
    """queued: whether calls run on a stream of their group, as NCCL's do (`Transport.queued`)."""
    return QUEUED if queued else HOST


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """One parameter: its place in the module, its size, and what it may share a bucket with."""

    index: int
    num_elements: int
    element_bytes: int
    key: Hashable


@dataclass(frozen=True, slots=True)
class Bucket:
    """Members in order, and in elements: where each and the used flags start, and the length."""

    key: Hashable
    members: tuple[int, ...]
    offsets: tuple[int, ...]
    used_flags: int
    num_elements: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Arguments of `plan_buckets`. order: indices, first gradient first; None: as registered."""

    cap_bytes: int
    first_bytes: int | None = None
    order: tuple[int, ...] | None = None


class BucketPlanner(Protocol):
    """Chooses plans by what it sees of reductions; bucket_tuning.py has one.

    is_over: it needs to see no more. begin: a reduction begins. came: the gradient of parameter
    `index` is there. arrived: all buckets were launched, if `num_bytes` is 0; then, for each in
    order: its sum has arrived. decide: after a reduction, the plan from here on, the same on all
    ranks, None as it is; `late` are indices whose gradients may come again until the end of a
    backward.
    """

    @property
    def is_over(self) -> bool: ...
    def begin(self) -> None: ...
    def came(self, index: int) -> None: ...
    def arrived(self, num_bytes: int) -> None: ...
    def decide(self, late: Collection[int]) -> BucketPlan | None: ...


def plan_buckets(
    entries: Sequence[BucketEntry],
    cap_bytes: int,
    *,
    order: Sequence[int] | None = None,
    first_bytes: int | None = None,
) -> tuple[Bucket, ...]:
    """Pack entries, as their gradients come, into buckets of at most `cap_bytes`.

    order: indices of the entries, the first gradient first; by default the last entry's is.
    first_bytes: cap of the very first bucket. A larger entry has a bucket of its own, but for
    slight ones that come just before: the bias of a matrix would else cost a call. Buckets are
    ordered by their last member, which is when they can leave.
    """
    by_index = {entry.index: entry for entry in entries}
    coming = list(entries)[::-1] if order is None else [by_index[index] for index in order]
    place = {entry.index: n for n, entry in enumerate(coming)}
    found: list[list[BucketEntry]] = []
    last: dict[Hashable, list[BucketEntry]] = {}  # those that still take members
    used_bytes: dict[Hashable, int] = {}
    for entry in coming:
        size, members = _aligned(entry) * entry.element_bytes, last.get(entry.key)
        used = used_bytes.get(entry.key, 0)
        is_first = bool(found) and members is found[0]
        limit = first_bytes if is_first and first_bytes is not None else cap_bytes
        if members is None or (used + size > limit and used > limit * SLIGHT):
            members, used = last[entry.key], used_bytes[entry.key] = [], 0
            found.append(members)
        members.append(entry)
        used_bytes[entry.key] = used + size
    found.sort(key=lambda members: place[members[-1].index])
    return tuple(_bucket(members) for members in found)


def _bucket(entries: Sequence[BucketEntry]) -> Bucket:
    offsets: list[int] = []
    end = 0
    for entry in entries:
        offsets.append(end)
        end += _aligned(entry)
    members = tuple(entry.index for entry in entries)
    return Bucket(entries[0].key, members, tuple(offsets), end, end + len(entries))


def _aligned(entry: BucketEntry) -> int:
    step = max(1, ALIGN_BYTES // entry.element_bytes)
    return -(-entry.num_elements // step) * step

"""The plan of buckets: which gradients share one, and how large they are. It is equal on all ranks.

`plan_buckets` takes parameters in the order in which a backward finishes them, roughly the reverse
of registration, and packs them into flat buckets by (dtype, device, group). A bucket ends with one
used flag for each member. This file is arithmetic and imports no torch.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

MIB = 2**20

ALIGN_BYTES = 64
"""Members start on a cache line, so that copies and kernels run at full width."""

SLIGHT = 1 / 16
"""Fraction of the cap below which a bucket takes one more member, however large."""


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """Bucket sizes for one kind of link.

    default_bytes: size without, or before, a measurement.
    candidates_bytes: sizes that `BucketTuner` chooses from.
    """

    default_bytes: int
    candidates_bytes: tuple[int, ...]


_SMALL = tuple(n * MIB for n in (1, 2, 4, 8, 16, 32))
"""Smallest useful bucket: smaller ones cost more processor time for calls than they save in
waiting.
"""
HOST = BucketSizes(4 * MIB, _SMALL)
QUEUED = BucketSizes(32 * MIB, (*_SMALL, 64 * MIB, 128 * MIB))
"""Bucket size on a queue: a link between devices carries 4 MiB faster than the host issues the
call.
"""


SLICE_BYTES = MIB
"""Smallest slice of a bucket that one rank of a large group reduces on a queue."""
_LARGEST_BYTES = 512 * MIB
"""Largest bucket: a gather of ZeRO 3 holds a full bucket, so larger ones cost more memory than they
save time.
"""


def bucket_sizes(*, queued: bool, num_ranks: int = 1) -> BucketSizes:
    """Return the sizes of buckets that `num_ranks` ranks sum.

    On a queue the bucket of a large group is larger: each hop of a ring carries one rank's slice,
    and a small one takes as long as an empty message. Megatron-LM's rule is max(40M, 1M x ranks)
    elements.

    queued: calls run on a stream of their group, as NCCL's do (`Transport.queued`).
    """
    if not queued:
        return HOST
    default_bytes = min(num_ranks * SLICE_BYTES, _LARGEST_BYTES)
    if default_bytes <= QUEUED.default_bytes:
        return QUEUED
    candidates = sorted({*QUEUED.candidates_bytes, default_bytes})
    return BucketSizes(default_bytes, tuple(candidates))


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """One parameter to pack: its index in the module, its size, and its key.

    key: entries with equal keys may share a bucket.
    """

    index: int
    num_elements: int
    element_bytes: int
    key: Hashable


@dataclass(frozen=True, slots=True)
class Bucket:
    """One planned bucket: its members in order, and offsets in elements.

    used_flags: offset of the used flags. num_elements: length, with the flags.
    """

    key: Hashable
    members: tuple[int, ...]
    offsets: tuple[int, ...]
    used_flags: int
    num_elements: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Arguments of `plan_buckets`.

    order: indices, the first gradient first; None: the reverse of registration.
    """

    cap_bytes: int
    first_bytes: int | None = None
    order: tuple[int, ...] | None = None


class BucketPlanner(Protocol):
    """An object that watches reductions and chooses a plan; bucket_tuning.py has one.

    is_over: it needs no more reductions.
    begin: a reduction begins.
    came: the gradient of parameter `index` is computed.
    arrived: with `num_bytes` 0, all buckets were launched; then, called for each bucket in order,
        its sum has arrived.
    decide: called after a reduction; returns the plan from now on, the same on all ranks, or None
        to keep it. `late`: indices whose gradients may change until the end of a backward.
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
    """Pack entries, in the order of their gradients, into buckets of at most `cap_bytes`.

    A larger entry gets its own bucket, together with slight ones just before it: otherwise the bias
    of a matrix would cost a call. Buckets are ordered by their last member, after which they can be
    launched.

    order: indices of the entries, the first gradient first; default: the last entry first.
    first_bytes: cap of the very first bucket.
    """
    by_index = {entry.index: entry for entry in entries}
    coming = list(entries)[::-1] if order is None else [by_index[index] for index in order]
    position = {entry.index: n for n, entry in enumerate(coming)}
    packed: list[list[BucketEntry]] = []
    open_members: dict[Hashable, list[BucketEntry]] = {}  # the bucket of each key to fill next
    used_bytes: dict[Hashable, int] = {}
    for entry in coming:
        size, members = _aligned(entry) * entry.element_bytes, open_members.get(entry.key)
        used = used_bytes.get(entry.key, 0)
        is_first = bool(packed) and members is packed[0]
        limit = first_bytes if is_first and first_bytes is not None else cap_bytes
        if members is None or (used + size > limit and used > limit * SLIGHT):
            members, used = open_members[entry.key], used_bytes[entry.key] = [], 0
            packed.append(members)
        members.append(entry)
        used_bytes[entry.key] = used + size
    packed.sort(key=lambda members: position[members[-1].index])
    return tuple(_bucket(members) for members in packed)


def _bucket(entries: Sequence[BucketEntry]) -> Bucket:
    """Lay out entries one after another, aligned, with their used flags at the end."""
    offsets: list[int] = []
    end = 0
    for entry in entries:
        offsets.append(end)
        end += _aligned(entry)
    members = tuple(entry.index for entry in entries)
    return Bucket(entries[0].key, members, tuple(offsets), end, end + len(entries))


def _aligned(entry: BucketEntry) -> int:
    """Return the elements of an entry, rounded up to whole cache lines."""
    step = max(1, ALIGN_BYTES // entry.element_bytes)
    return -(-entry.num_elements // step) * step

"""Which gradients share a bucket, and how large buckets are: a plan that is equal on all ranks.

Parameters are taken in the order in which a backward finishes them, roughly the reverse of that
of registration, and packed into flat buckets by (dtype, device, group). A bucket ends with one
extra element for each member: the mark by which ranks tell each other whom they used.

`NaiveDDP`, `ZeroOptimizer` and `tdp train` take their sizes from `bucket_sizes`, by the transport
of the job's default group. This file is arithmetic on sizes and imports no torch.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

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
    """Members in order, where each starts, where the marks start, and the length of it all.

    All in elements.
    """

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
    open_buckets: dict[Hashable, list[BucketEntry]] = {}
    closed: list[list[BucketEntry]] = []
    used_bytes: dict[Hashable, int] = {}
    first_key = coming[0].key if coming and first_bytes is not None else None
    for entry in coming:
        size = _aligned(entry) * entry.element_bytes
        is_first = first_key is not None and entry.key == first_key
        limit = first_bytes if is_first and first_bytes is not None else cap_bytes
        held = open_buckets.setdefault(entry.key, [])
        used = used_bytes.get(entry.key, 0)
        if held and used + size > limit and used > limit * SLIGHT:
            closed.append(held)
            held = open_buckets[entry.key] = []
            if is_first:
                first_key = None
        if not held:
            used_bytes[entry.key] = 0
        held.append(entry)
        used_bytes[entry.key] += size
    closed += [held for held in open_buckets.values() if held]
    closed.sort(key=lambda held: place[held[-1].index])
    return tuple(_bucket(held) for held in closed)


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

"""How gradients are best packed, from when they came and how fast they travel. No torch.

One rule: a step ends when the last bucket has arrived, buckets travel one after another, and each
can begin when its last gradient is there. Small buckets begin early and cost a call each; the best
sizes are found by trying them on paper.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from torchdistpackage.ddp.bucket_plan import Bucket, BucketEntry, plan_buckets

NOT_WORTH_IT = 0.005
"""Part of the time by which fewer buckets may be slower and still be taken."""


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Arguments of `plan_buckets`. order: indices, first gradient first; None: as registered."""

    cap_bytes: int
    first_bytes: int | None = None
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class LinkModel:
    """What travels over it takes call_s + bytes / bytes_per_s."""

    bytes_per_s: float
    call_s: float


def arrival_order(
    indices: Sequence[int], ready_s: Mapping[int, float], late: Collection[int]
) -> tuple[int, ...]:
    """`indices` in the order in which their gradients came.

    ready_s: when, of those that came. late: those that may come again until the end of a backward.
    These and the ones that did not come go last: they hold up their bucket and all behind it.
    """

    def key(index: int) -> tuple[bool, bool, float, int]:
        return index not in ready_s, index in late, ready_s.get(index, 0.0), -index

    return tuple(sorted(indices, key=key))


def end_s(
    buckets: Sequence[Bucket],
    entries: Sequence[BucketEntry],
    ready_s: Mapping[int, float],
    wire: LinkModel,
) -> float:
    """When the last bucket has arrived, on the clock of `ready_s`; what never came is last."""
    element_bytes = {entry.index: entry.element_bytes for entry in entries}
    last_s = max(ready_s.values(), default=0.0)
    free_s = -inf
    for bucket in buckets:
        begin_s = max(ready_s.get(i, last_s) for i in bucket.members)
        size = bucket.num_elements * element_bytes[bucket.members[0]]
        free_s = max(free_s, begin_s) + wire.call_s + size / wire.bytes_per_s
    return free_s


def choose_plan(
    entries: Sequence[BucketEntry],
    ready_s: Mapping[int, float],
    order: Sequence[int],
    wire: LinkModel,
    candidates_bytes: Sequence[int],
) -> BucketPlan:
    """Bucket size and first bucket with which the last gradient arrives earliest."""
    begin_s = min(ready_s.values(), default=0.0)
    tried: list[tuple[float, int, BucketPlan]] = []
    for cap in candidates_bytes:
        for first in (size for size in candidates_bytes if size <= cap):
            buckets = plan_buckets(entries, cap, order=order, first_bytes=first)
            took_s = end_s(buckets, entries, ready_s, wire) - begin_s
            tried.append((took_s, len(buckets), BucketPlan(cap, first, tuple(order))))
    best_s = min(took_s for took_s, _, _ in tried)
    enough = [t for t in tried if t[0] <= best_s * (1 + NOT_WORTH_IT)]
    return min(enough, key=lambda t: (t[1], t[0]))[2]

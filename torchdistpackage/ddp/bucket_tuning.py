"""A tuner that measures a run's first reductions and chooses the order and sizes of its buckets.

Ranks measure different times, so the first rank of the largest group decides for all ranks whose
gradients meet. If that group does not contain all groups of its ranks, the order stays that of
registration.

The first reduction launches nothing early, and shows the order of gradients and the rate of the
link. Then `choose_plan` finds the sizes from the earliest time of each gradient in a few steps,
because other work on the machine can only delay one. It assumes that a step ends when the last
bucket has arrived, that buckets travel one after another, and that a bucket can start when its last
gradient is computed. Small buckets start early, but each costs a call.
"""

import zlib
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from math import inf

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.moments import Moment, clock_of, seconds
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.ddp.bucket_plan import Bucket, BucketEntry, BucketPlan, plan_buckets
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.predict.links import LinkModel

ORDERED, SIZED = 1, 3
"""Numbers of reductions after which the order and the sizes are settled."""

NUM_CALLS = 8
"""Number of small calls that are timed; the shortest is the cost of a call."""

NOT_WORTH_IT = 0.005
"""Fraction of the time by which a plan with fewer buckets may be slower and still be chosen."""


class BucketTuner:
    """The tuner of one reducer. Only `decide` makes collective calls, at the end of a reduction.

    cap_bytes: bucket size before the measurement.
    candidates_bytes: sizes to choose from; with none, `cap_bytes` stays.
    """

    def __init__(self, specs: Sequence[ParamSpec], cap_bytes: int, candidates_bytes: Sequence[int]):
        self._specs = [(i, s) for i, s in enumerate(specs) if s.is_early]
        self._device = self._specs[0][1].parameter.device
        self._now = clock_of(self._device)
        self._cap_bytes, self._candidates_bytes = cap_bytes, candidates_bytes
        self._rounds = 0
        self._group: Group | None = None
        self._link = LinkModel()
        self._order: tuple[int, ...] = ()
        self._soonest_s: dict[int, float] = {}
        self.begin()

    @property
    def is_over(self) -> bool:
        return self._rounds >= (SIZED if self._candidates_bytes else ORDERED)

    def begin(self) -> None:
        """Forget the times of the last reduction, because a new one begins."""
        self._came: dict[int, Moment] = {}
        self._stops: list[tuple[Moment, int]] = []

    def came(self, index: int) -> None:
        """Note the time at which the gradient of parameter `index` was computed."""
        self._came[index] = self._now()

    def arrived(self, num_bytes: int) -> None:
        """Note the time at which a bucket's sum arrived, or with 0 bytes all were launched."""
        self._stops.append((self._now(), num_bytes))

    def decide(self, late: Collection[int]) -> BucketPlan | None:
        """Return the plan from now on, the same on all ranks, or None to keep the current one.

        late: indices whose gradients may change until the end of a backward.
        """
        self._rounds += 1
        self._note_soonest()
        if self._rounds == ORDERED:
            self._group = self._largest()
            if self._group is None:
                self._rounds = SIZED
                return None
            self._link = self._measure(self._group)
            order = arrival_order([i for i, _ in self._specs], self._soonest_s, late)
            self._order = self._agreed(order)
            return BucketPlan(self._cap_bytes, order=self._order)
        if self._rounds == SIZED:
            plan = BucketPlan(self._cap_bytes)
            if self._group is not None and self._group.rank() == 0:
                entries = [s.entry(i) for i, s in self._specs]
                sizes = self._candidates_bytes
                plan = choose_plan(entries, self._soonest_s, self._order, self._link, sizes)
            cap, first = self._agreed((plan.cap_bytes, plan.first_bytes or plan.cap_bytes))
            return BucketPlan(cap, first, self._order)
        return None

    def _agreed(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of the group's first rank."""
        assert self._group is not None
        message = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        return tuple(primitives.broadcast(message, self._group).tolist())

    # -- which group decides -------------------------------------------------------------

    def _largest(self) -> Group | None:
        """Return the largest group, if it contains all other groups of all its ranks; else None.

        It makes one all-reduce over every group of this rank, in the same order on all ranks.
        """
        groups: dict[tuple[int, ...], Group] = {ranks_of(s.group): s.group for _, s in self._specs}
        largest = max(groups, key=lambda ranks: (len(ranks), [-r for r in ranks]))
        is_inside = all(set(largest).issuperset(ranks) for ranks in groups)
        numbers = {key: number for number, key in enumerate(groups)}
        facts = [
            (i, s.name, s.parameter.numel(), numbers[ranks_of(s.group)]) for i, s in self._specs
        ]
        digest = zlib.crc32(repr(facts).encode())
        is_same: dict[tuple[int, ...], bool] = {}
        for ranks, group in sorted(groups.items(), key=lambda item: item[0]):
            agrees = is_inside and ranks == largest
            message = torch.tensor(
                [agrees, digest, -digest], dtype=torch.int64, device=self._device
            )
            answer = primitives.all_reduce(message, group, primitives.MIN).tolist()
            is_same[ranks] = answer[0] == 1 and answer[1] == -answer[2]
        return groups[largest] if is_same[largest] else None

    # -- measurement --------------------------------------------------------------------

    def _note_soonest(self) -> None:
        """Keep the earliest time of each gradient, relative to the first gradient of its
        reduction.
        """
        begin = next(iter(self._came.values()), 0.0)
        for index, moment in self._came.items():
            took_s = seconds(begin, moment)
            self._soonest_s[index] = min(took_s, self._soonest_s.get(index, took_s))

    def _measure(self, group: Group) -> LinkModel:
        """Return the rate of buckets that were all launched at once, and the cost of a
        small call.
        """
        # count from the arrival of the first bucket, which shows that all ranks have launched
        stops = self._stops[1:] if len(self._stops) > 2 else self._stops
        took_s = seconds(stops[0][0], stops[-1][0])
        num_bytes = sum(size for _, size in stops[1:])
        number = torch.zeros(1, device=self._device)
        times = [self._now()]
        for _ in range(NUM_CALLS):
            primitives.all_reduce(number, group)
            times.append(self._now())
        # take the minimum: other work on the machine can only lengthen a call
        call_s = min(seconds(start, stop) for start, stop in pairwise(times))
        return LinkModel(call_s, max(num_bytes, 1) / max(took_s, 1e-6))


def arrival_order(
    indices: Sequence[int], ready_s: Mapping[int, float], late: Collection[int]
) -> tuple[int, ...]:
    """Return `indices` in the order of their gradients, with late and missing ones last.

    Late and missing ones delay their bucket and all later buckets.

    ready_s: time of each gradient that was computed.
    late: indices whose gradients may change until the end of a backward.
    """

    def key(index: int) -> tuple[bool, bool, float, int]:
        return index not in ready_s, index in late, ready_s.get(index, 0.0), -index

    return tuple(sorted(indices, key=key))


def end_s(
    buckets: Sequence[Bucket],
    entries: Sequence[BucketEntry],
    ready_s: Mapping[int, float],
    link: LinkModel,
) -> float:
    """Return the arrival time of the last bucket, on the clock of `ready_s`.

    Gradients that were not computed count as ready last.
    """
    element_bytes = {entry.index: entry.element_bytes for entry in entries}
    last_s = max(ready_s.values(), default=0.0)
    free_s = -inf
    for bucket in buckets:
        begin_s = max(ready_s.get(i, last_s) for i in bucket.members)
        size = bucket.num_elements * element_bytes[bucket.members[0]]
        # not link.seconds(size): this order of additions decides between plans of equal time
        free_s = max(free_s, begin_s) + link.latency_s + size / link.bytes_per_s
    return free_s


def choose_plan(
    entries: Sequence[BucketEntry],
    ready_s: Mapping[int, float],
    order: Sequence[int],
    link: LinkModel,
    candidates_bytes: Sequence[int],
) -> BucketPlan:
    """Return the sizes of buckets, and of the first one, with which the last gradient arrives
    earliest.
    """
    begin_s = min(ready_s.values(), default=0.0)
    tried: list[tuple[float, int, BucketPlan]] = []
    for cap in candidates_bytes:
        for first in (size for size in candidates_bytes if size <= cap):
            buckets = plan_buckets(entries, cap, order=order, first_bytes=first)
            took_s = end_s(buckets, entries, ready_s, link) - begin_s
            tried.append((took_s, len(buckets), BucketPlan(cap, first, tuple(order))))
    best_s = min(took_s for took_s, _, _ in tried)
    enough = [t for t in tried if t[0] <= best_s * (1 + NOT_WORTH_IT)]
    return min(enough, key=lambda t: (t[1], t[0]))[2]

"""Bucket order and sizes that fit a run: measured in its first reductions, chosen by a model.

Ranks measure different times, so one of them decides for all whose gradients meet: the first rank
of the largest group. Where that group does not contain all groups of all its ranks, the order stays
that of registration.

The first reduction, in which nothing leaves early, shows the order of gradients and the rate of the
link. From when gradients are there, at the soonest of a few (other work on the machine only makes
them late), `choose_plan` finds the sizes: a step ends when the last bucket has arrived, buckets
travel one after another, and each can begin when its last gradient is there. Small buckets begin
early and cost a call each.
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
"""After how many reductions the order, and the sizes, are settled."""

NUM_CALLS = 8
"""Small calls that are timed; the shortest is what a call takes."""

NOT_WORTH_IT = 0.005
"""Part of the time by which fewer buckets may be slower and still be taken."""


class BucketTuner:
    """The tuner of one reducer. Collective calls are those of `decide`, at the end of a reduction.

    cap_bytes: bucket size until something is known. candidates_bytes: others to choose from; none:
    that size stays.
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
        """A reduction begins."""
        self._came: dict[int, Moment] = {}
        self._stops: list[tuple[Moment, int]] = []

    def came(self, index: int) -> None:
        """The gradient of parameter `index` is there."""
        self._came[index] = self._now()

    def arrived(self, num_bytes: int) -> None:
        """All buckets have been sent, if 0; then, for each in order: its sum has arrived."""
        self._stops.append((self._now(), num_bytes))

    def decide(self, late: Collection[int]) -> BucketPlan | None:
        """The packing from here on, the same on all ranks; None: as it is.

        late: indices whose gradients may come again until the end of a backward.
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
            mine = BucketPlan(self._cap_bytes)
            if self._group is not None and self._group.rank() == 0:
                entries = [s.entry(i) for i, s in self._specs]
                sizes = self._candidates_bytes
                mine = choose_plan(entries, self._soonest_s, self._order, self._link, sizes)
            cap, first = self._agreed((mine.cap_bytes, mine.first_bytes or mine.cap_bytes))
            return BucketPlan(cap, first, self._order)
        return None

    def _agreed(self, mine: Sequence[int]) -> tuple[int, ...]:
        """The numbers of the group's first rank."""
        assert self._group is not None
        words = torch.tensor(mine, dtype=torch.int64, device=self._device)
        return tuple(primitives.broadcast(words, self._group).tolist())

    # -- which group decides -------------------------------------------------------------

    def _largest(self) -> Group | None:
        """The largest group, if for all its ranks it has all their others inside.

        Collective over every group of this rank, in one order.
        """
        groups: dict[tuple[int, ...], Group] = {ranks_of(s.group): s.group for _, s in self._specs}
        largest = max(groups, key=lambda ranks: (len(ranks), [-r for r in ranks]))
        is_inside = all(set(largest).issuperset(ranks) for ranks in groups)
        places = {key: place for place, key in enumerate(groups)}
        facts = [
            (i, s.name, s.parameter.numel(), places[ranks_of(s.group)]) for i, s in self._specs
        ]
        digest = zlib.crc32(repr(facts).encode())
        is_same: dict[tuple[int, ...], bool] = {}
        for ranks, group in sorted(groups.items(), key=lambda item: item[0]):
            says = is_inside and ranks == largest
            words = torch.tensor([says, digest, -digest], dtype=torch.int64, device=self._device)
            said = primitives.all_reduce(words, group, primitives.MIN).tolist()
            is_same[ranks] = said[0] == 1 and said[1] == -said[2]
        return groups[largest] if is_same[largest] else None

    # -- what was measured ---------------------------------------------------------------

    def _note_soonest(self) -> None:
        zero = next(iter(self._came.values()), 0.0)
        for index, at in self._came.items():
            took_s = seconds(zero, at)
            self._soonest_s[index] = min(took_s, self._soonest_s.get(index, took_s))

    def _measure(self, group: Group) -> LinkModel:
        """The rate of buckets that were all sent at once, and what a small call takes."""
        # when the first has arrived, all ranks are there
        stops = self._stops[1:] if len(self._stops) > 2 else self._stops
        took_s = seconds(stops[0][0], stops[-1][0])
        num_bytes = sum(size for _, size in stops[1:])
        word = torch.zeros(1, device=self._device)
        times = [self._now()]
        for _ in range(NUM_CALLS):
            primitives.all_reduce(word, group)
            times.append(self._now())
        # other work on the machine only makes a call longer
        call_s = min(seconds(before, after) for before, after in pairwise(times))
        return LinkModel(call_s, max(num_bytes, 1) / max(took_s, 1e-6))


def arrival_order(
    indices: Sequence[int], ready_s: Mapping[int, float], late: Collection[int]
) -> tuple[int, ...]:
    """`indices` in the order in which their gradients came.

    ready_s: when, of those that came. late: those that may come again until the end of a backward.
    These and the ones that did not come go last: they hold up their bucket and all after it.
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
    """When the last bucket has arrived, on the clock of `ready_s`; what never came is last."""
    element_bytes = {entry.index: entry.element_bytes for entry in entries}
    last_s = max(ready_s.values(), default=0.0)
    free_s = -inf
    for bucket in buckets:
        begin_s = max(ready_s.get(i, last_s) for i in bucket.members)
        size = bucket.num_elements * element_bytes[bucket.members[0]]
        # not link.seconds(size): plans of equal time are told apart by this order of the sums
        free_s = max(free_s, begin_s) + link.latency_s + size / link.bytes_per_s
    return free_s


def choose_plan(
    entries: Sequence[BucketEntry],
    ready_s: Mapping[int, float],
    order: Sequence[int],
    link: LinkModel,
    candidates_bytes: Sequence[int],
) -> BucketPlan:
    """Bucket size and first bucket with which the last gradient arrives earliest."""
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

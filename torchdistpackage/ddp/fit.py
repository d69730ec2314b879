"""Fits the buckets to a run: watches its first reductions and says how to pack the later ones.

One rule: ranks measure different times, so one of them decides for all whose gradients meet: the
first of the widest group. Where that does not have all groups of all its ranks inside, nobody
decides, and the order stays that of registration.

The first reduction, in which nothing leaves early, shows the order of gradients and the rate of the
wire. From when gradients are there, at the soonest of a few, sizes are chosen (bucket_tuning.py):
what else the machine does only makes them late.
"""

import time
import zlib
from collections.abc import Collection, Sequence
from itertools import pairwise

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.ddp.bucket_tuning import BucketPlan, LinkModel, arrival_order, choose_plan
from torchdistpackage.ddp.param_spec import ParamSpec

ORDERED, SIZED = 1, 3
"""After how many reductions the order, and the sizes, are settled."""

NUM_CALLS = 8
"""Of which the shortest is what a call takes."""

Stamp = float | torch.cuda.Event


class BucketTuner:
    """Of one reducer. Collective calls are those of `decide`, at the end of a reduction.

    cap_bytes: bucket size until something is known. candidates_bytes: others to choose from; none:
    that size stays.
    """

    def __init__(
        self, shared: Sequence[ParamSpec], cap_bytes: int, candidates_bytes: Sequence[int]
    ):
        self._shared = [(i, s) for i, s in enumerate(shared) if s.is_early]
        self._cap_bytes, self._candidates_bytes = cap_bytes, candidates_bytes
        self._rounds = 0
        self._group: Group | None = None
        self._wire = LinkModel(1.0, 0.0)
        self._order: tuple[int, ...] = ()
        self._soonest_s: dict[int, float] = {}
        self.begin()

    @property
    def is_over(self) -> bool:
        return self._rounds >= (SIZED if self._candidates_bytes else ORDERED)

    def begin(self) -> None:
        """A reduction begins."""
        self._came: dict[int, Stamp] = {}
        self._stops: list[tuple[Stamp, int]] = []

    def came(self, index: int) -> None:
        """The gradient of parameter `index` is there."""
        self._came[index] = self._stamp()

    def arrived(self, num_bytes: int) -> None:
        """All buckets have been sent, if 0; then, for each in order: its sum has arrived."""
        self._stops.append((self._stamp(), num_bytes))

    def decide(self, late: Collection[int]) -> BucketPlan | None:
        """The packing from here on, the same on all ranks; None: as it is.

        late: indices whose gradients may come again until the end of a backward.
        """
        self._rounds += 1
        self._note_soonest()
        if self._rounds == ORDERED:
            self._group = self._widest()
            if self._group is None:
                self._rounds = SIZED
                return None
            self._wire = self._measure(self._group)
            order = arrival_order([i for i, _ in self._shared], self._soonest_s, late)
            self._order = self._agreed(order)
            return BucketPlan(self._cap_bytes, order=self._order)
        if self._rounds == SIZED:
            mine = BucketPlan(self._cap_bytes)
            if self._group is not None and self._group.rank() == 0:
                entries = [s.entry(i) for i, s in self._shared]
                sizes = self._candidates_bytes
                mine = choose_plan(entries, self._soonest_s, self._order, self._wire, sizes)
            cap, first = self._agreed((mine.cap_bytes, mine.first_bytes or mine.cap_bytes))
            return BucketPlan(cap, first, self._order)
        return None

    def _agreed(self, mine: Sequence[int]) -> tuple[int, ...]:
        """The numbers of the group's first rank."""
        assert self._group is not None
        words = torch.tensor(mine, dtype=torch.int64, device=self._device)
        return tuple(primitives.broadcast(words, self._group).tolist())

    # -- who decides ---------------------------------------------------------------------

    def _widest(self) -> Group | None:
        """The widest group, if for all its ranks it has all their others inside.

        Collective over every group of this rank, in one order.
        """
        groups: dict[tuple[int, ...], Group] = {ranks_of(s.group): s.group for _, s in self._shared}
        widest = max(groups, key=lambda ranks: (len(ranks), [-r for r in ranks]))
        is_inside = all(set(widest).issuperset(ranks) for ranks in groups)
        places = {key: place for place, key in enumerate(groups)}
        facts = [
            (i, s.name, s.parameter.numel(), places[ranks_of(s.group)]) for i, s in self._shared
        ]
        digest = zlib.crc32(repr(facts).encode())
        is_same: dict[tuple[int, ...], bool] = {}
        for ranks, group in sorted(groups.items(), key=lambda item: item[0]):
            says = is_inside and ranks == widest
            words = torch.tensor([says, digest, -digest], dtype=torch.int64, device=self._device)
            said = primitives.all_reduce(words, group, primitives.MIN).tolist()
            is_same[ranks] = said[0] == 1 and said[1] == -said[2]
        return groups[widest] if is_same[widest] else None

    # -- what was measured ---------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return self._shared[0][1].parameter.device

    def _stamp(self) -> Stamp:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def _note_soonest(self) -> None:
        zero = next(iter(self._came.values()), 0.0)
        for index, at in self._came.items():
            took_s = _between_s(zero, at)
            self._soonest_s[index] = min(took_s, self._soonest_s.get(index, took_s))

    def _measure(self, group: Group) -> LinkModel:
        """The rate of buckets that were all sent at once, and what a small call takes."""
        # when the first has arrived, all ranks are there
        stops = self._stops[1:] if len(self._stops) > 2 else self._stops
        took_s = _between_s(stops[0][0], stops[-1][0])
        num_bytes = sum(size for _, size in stops[1:])
        word = torch.zeros(1, device=self._device)
        times = [self._stamp()]
        for _ in range(NUM_CALLS):
            primitives.all_reduce(word, group)
            times.append(self._stamp())
        # other work on the machine only makes a call longer
        call_s = min(_between_s(before, after) for before, after in pairwise(times))
        return LinkModel(max(num_bytes, 1) / max(took_s, 1e-6), call_s)


def _between_s(begin: Stamp, end: Stamp) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return begin.elapsed_time(end) / 1000
    assert isinstance(begin, float) and isinstance(end, float)
    return end - begin

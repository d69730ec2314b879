"""Where each gradient lives: a slot for each parameter, in buckets that can be packed anew.

One rule: gradients are in memory once. Those that must move go through memory of their own while
the old buckets go one by one, and give it back as the new ones come; small fresh ones are copied
many at a time, and only so many wait.
"""

from collections.abc import Collection, Sequence

from torch import Tensor, nn

from torchdistpackage.ddp.buckets import plan
from torchdistpackage.ddp.carrier import Carrier, Carry
from torchdistpackage.ddp.gradients import move
from torchdistpackage.ddp.order import Packing
from torchdistpackage.ddp.shared import Shared

SMALL_BYTES, FRESH_BYTES = 8 * 2**10, 64 * 2**10
"""Fresh gradients up to the one size are copied to their buckets when they reach the other."""


class Slot:
    """One parameter: its bucket and place in it, the view that is its `.grad`, what was seen of it.

    fired: it has a gradient since the last reduction. late: its gradients may come again.
    """

    __slots__ = (
        "bucket", "carrier", "fired", "home", "index",
        "is_small", "late", "num_bytes", "place", "shared",
    )  # fmt: skip
    carrier: Carrier
    home: Tensor | None

    def __init__(self, index: int, shared: Shared):
        self.index, self.shared, self.fired, self.late = index, shared, False, False
        self.bucket = self.place = 0
        self.home = None
        # what must be added up in fp32 goes to its bucket at once
        self.num_bytes = shared.parameter.numel() * shared.parameter.element_size()
        self.is_small = self.num_bytes <= SMALL_BYTES and not (shared.is_wider or shared.rows)


class Packed:
    """Slots in the order of `shared`, buckets and their carriers in that of leaving.

    num_early: how many of these may leave while a backward runs. after: carriers without
    parameters, behind all others. fresh: slots whose small gradients wait to be copied with others,
    and their bytes; whoever adds some brings all in where they reach FRESH_BYTES.
    """

    def __init__(
        self,
        shared: Sequence[Shared],
        packing: Packing,
        carry: Carry,
        after: Sequence[Carrier] = (),
        moving: Collection[nn.Parameter] = (),
    ):
        self._shared, self._carry, self._after = shared, carry, after
        self.fresh: list[Slot] = []
        self.fresh_bytes = 0
        self.slots = [Slot(i, s) for i, s in enumerate(shared)]
        if len({s.parameter.device for s in shared}) > 1:  # gradients come in a thread for each
            for slot in self.slots:
                slot.is_small = False
        self._pack(packing, set(moving))

    def repack(self, packing: Packing) -> None:
        """Go over to another packing, between two reductions."""
        self._pack(packing, self.leave())

    def leave(self) -> set[nn.Parameter]:
        """Give up all buckets; those of the parameters whose gradients were in them."""
        moving: set[nn.Parameter] = set()
        self.carriers.clear()
        for bucket in self.buckets:
            slots = [self.slots[i] for i in bucket.members]
            left = slots[0].carrier.gradients.leave()
            moving.update(slots[place].shared.parameter for place in left)
            for slot in slots:
                del slot.carrier
                slot.home = None
        return moving

    def num_bytes(self, b: int) -> int:
        """Of bucket `b`."""
        bucket = self.buckets[b]
        return bucket.num_elements * self._shared[bucket.members[0]].sum_dtype.itemsize

    def take_fired(self) -> list[bool]:
        """Whether each parameter got a gradient since this was asked last; rows count as if."""
        fired = [slot.fired or slot.shared.rows for slot in self.slots]
        for slot in self.slots:
            slot.fired = False
        return fired

    def bring_in(self) -> None:
        """Copy what waits for it, so that every gradient is in its bucket."""
        if self.fresh:
            slots, self.fresh, self.fresh_bytes = self.fresh, [], 0
            for carrier in {slot.carrier for slot in slots}:
                carrier.gradients.open()  # ZeRO's memory goes between reductions
            move([slot.home for slot in slots], [slot.shared for slot in slots])

    def forget_fresh(self) -> None:
        """After a backward that failed: what waits stays where it is."""
        self.fresh.clear()
        self.fresh_bytes = 0

    def _pack(self, packing: Packing, moving: set[nn.Parameter]) -> None:
        """moving: those who bring a gradient."""
        entries = [s.entry(i) for i, s in enumerate(self._shared)]
        early = [entry for entry in entries if self._shared[entry.index].is_early]
        later = [entry for entry in entries if not self._shared[entry.index].is_early]
        order, first_bytes = packing.order, packing.first_bytes
        first = plan(early, packing.cap_bytes, order=order, first_bytes=first_bytes)
        self.num_early = len(first)
        self.buckets = [*first, *plan(later, packing.cap_bytes)]
        self.carriers: list[Carrier] = []
        for b, bucket in enumerate(self.buckets):
            carrier = self._carry(bucket, [self._shared[i] for i in bucket.members])
            self.carriers.append(carrier)
            views = carrier.gradients.views
            for place, (i, view) in enumerate(zip(bucket.members, views, strict=True)):
                slot = self.slots[i]
                slot.bucket, slot.carrier, slot.place, slot.home = b, carrier, place, view
                if self._shared[i].parameter in moving:
                    carrier.gradients.adopt(place)
        self.carriers += self._after

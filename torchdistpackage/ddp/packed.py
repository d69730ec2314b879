"""Where each gradient lives: a slot for each parameter, in buckets that can be packed anew.

One rule: gradients are in memory once. Those that must move go through memory of their own while
the old buckets go one by one, and give it back as the new ones come; small fresh ones are copied
many at a time, and only so many wait.
"""

from collections.abc import Collection, Sequence

from torch import Tensor, nn

from torchdistpackage.ddp.bucket_comm import BucketComm, MakeBucketComm
from torchdistpackage.ddp.bucket_plan import plan_buckets
from torchdistpackage.ddp.bucket_tuning import BucketPlan
from torchdistpackage.ddp.grad_bucket import move
from torchdistpackage.ddp.param_spec import ParamSpec

SMALL_BYTES, STAGED_BYTES = 8 * 2**10, 64 * 2**10
"""Fresh gradients up to the one size are copied to their buckets when they reach the other."""


class GradSlot:
    """One parameter: its bucket and place in it, the view that is its `.grad`, what was seen of it.

    has_grad: it has a gradient since the last reduction. may_repeat: its gradients may come again.
    """

    __slots__ = (
        "bucket", "carrier", "has_grad", "home", "index",
        "is_small", "may_repeat", "num_bytes", "place", "shared",
    )  # fmt: skip
    carrier: BucketComm
    home: Tensor | None

    def __init__(self, index: int, shared: ParamSpec):
        self.index, self.shared, self.has_grad, self.may_repeat = index, shared, False, False
        self.bucket = self.place = 0
        self.home = None
        # what must be added up in fp32 goes to its bucket at once
        self.num_bytes = shared.parameter.numel() * shared.parameter.element_size()
        self.is_small = self.num_bytes <= SMALL_BYTES and not (
            shared.is_wider or shared.sparse_rows
        )


class GradBuckets:
    """Slots in the order of `shared`, buckets and their carriers in that of leaving.

    num_early: how many of these may leave while a backward runs. after: carriers without
    parameters, behind all others. staged: slots whose small gradients wait to be copied with
    others, and their bytes; whoever adds some brings all in where they reach STAGED_BYTES.
    """

    def __init__(
        self,
        shared: Sequence[ParamSpec],
        packing: BucketPlan,
        make_bucket_comm: MakeBucketComm,
        after: Sequence[BucketComm] = (),
        moving: Collection[nn.Parameter] = (),
    ):
        self._shared, self._make_bucket_comm, self._after = shared, make_bucket_comm, after
        self.staged: list[GradSlot] = []
        self.staged_bytes = 0
        self.slots = [GradSlot(i, s) for i, s in enumerate(shared)]
        if len({s.parameter.device for s in shared}) > 1:  # gradients come in a thread for each
            for slot in self.slots:
                slot.is_small = False
        self._pack(packing, set(moving))

    def repack(self, packing: BucketPlan) -> None:
        """Go over to another packing, between two reductions."""
        self._pack(packing, self.leave())

    def leave(self) -> set[nn.Parameter]:
        """Give up all buckets; those of the parameters whose gradients were in them."""
        moving: set[nn.Parameter] = set()
        self.carriers.clear()
        for bucket in self.buckets:
            slots = [self.slots[i] for i in bucket.members]
            left = slots[0].carrier.gradients.detach_views()
            moving.update(slots[place].shared.parameter for place in left)
            for slot in slots:
                del slot.carrier
                slot.home = None
        return moving

    def num_bytes(self, b: int) -> int:
        """Of bucket `b`."""
        bucket = self.buckets[b]
        return bucket.num_elements * self._shared[bucket.members[0]].sum_dtype.itemsize

    def take_has_grad(self) -> list[bool]:
        """Whether each parameter got a gradient since this was asked last; rows count as if."""
        fired = [slot.has_grad or slot.shared.sparse_rows for slot in self.slots]
        for slot in self.slots:
            slot.has_grad = False
        return fired

    def flush_staged(self) -> None:
        """Copy what waits for it, so that every gradient is in its bucket."""
        if self.staged:
            slots, self.staged, self.staged_bytes = self.staged, [], 0
            for carrier in {slot.carrier for slot in slots}:
                carrier.gradients.allocate()  # ZeRO's memory goes between reductions
            move([slot.home for slot in slots], [slot.shared for slot in slots])

    def discard_staged(self) -> None:
        """After a backward that failed: what waits stays where it is."""
        self.staged.clear()
        self.staged_bytes = 0

    def _pack(self, packing: BucketPlan, moving: set[nn.Parameter]) -> None:
        """moving: those who bring a gradient."""
        entries = [s.entry(i) for i, s in enumerate(self._shared)]
        early = [entry for entry in entries if self._shared[entry.index].is_early]
        later = [entry for entry in entries if not self._shared[entry.index].is_early]
        order, first_bytes = packing.order, packing.first_bytes
        first = plan_buckets(early, packing.cap_bytes, order=order, first_bytes=first_bytes)
        self.num_early = len(first)
        self.buckets = [*first, *plan_buckets(later, packing.cap_bytes)]
        self.carriers: list[BucketComm] = []
        for b, bucket in enumerate(self.buckets):
            carrier = self._make_bucket_comm(bucket, [self._shared[i] for i in bucket.members])
            self.carriers.append(carrier)
            views = carrier.gradients.views
            for place, (i, view) in enumerate(zip(bucket.members, views, strict=True)):
                slot = self.slots[i]
                slot.bucket, slot.carrier, slot.place, slot.home = b, carrier, place, view
                if self._shared[i].parameter in moving:
                    carrier.gradients.absorb(place)
        self.carriers += self._after

"""Buckets of gradients: what becomes of each, and the slots in which gradients lie.

The reducer says when a bucket is launched; its `BucketComm` says how, and how its sum arrives.
`AllReduceBucket` leaves the mean in every rank's bucket.

Narrow or wide. Gradients of bf16 and fp16 parameters are summed in fp32; with `keep_wide` their
`.grad` stays so, else it becomes a copy in the parameter's dtype as its bucket arrives.

Used or not. A parameter without gradient contributes zeros and an unset mark at the bucket's
end. After the sum the mark tells whether any rank used it; if none did, `.grad` stays
None, as in one process. Marks are read only for parameters this rank did not use, those of all
buckets at once: the usual step has no device synchronisation, and any other has one.

In memory once. Gradients that must move when buckets are packed anew go through memory of their own
while the old buckets go one by one, and give it back as the new ones come; small fresh ones are
copied many at a time, and only so many wait.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.ddp.bucket_plan import Bucket, BucketPlan, plan_buckets
from torchdistpackage.ddp.comm_hooks import BucketMember, CommHook, CommWork, bind
from torchdistpackage.ddp.grad_bucket import GradBucket, move
from torchdistpackage.ddp.param_spec import ParamSpec

SMALL_BYTES, STAGED_BYTES = 8 * 2**10, 64 * 2**10
"""Fresh gradients up to the one size are copied to their buckets when they reach the other."""


class BucketComm(Protocol):
    """One bucket under way. All ranks of its group launch the same ones in the same order."""

    gradients: GradBucket

    @property
    def launched(self) -> bool:
        """Whether it has left and not been settled."""
        ...

    def launch(self) -> None:
        """Begin the sum; the gradients are as complete as they will be."""
        ...

    def wait(self) -> None:
        """Wait for the sum and leave it where it belongs."""
        ...

    def abandon(self) -> None:
        """The backward failed: let what has left arrive, and forget it."""
        ...


MakeBucketComm = Callable[[Bucket, Sequence[ParamSpec]], BucketComm]


class AllReduceBucket:
    """Each rank gets the whole sum, in the bucket itself.

    hook: begins the reduction (comm_hooks.py).
    """

    def __init__(
        self,
        bucket: Bucket,
        members: Sequence[ParamSpec],
        *,
        hook: CommHook = primitives.start_all_reduce,
        keep_wide: bool = False,
    ):
        self._group: Group = members[0].group
        divide = members[0].divide
        # NCCL takes the mean on the way
        averages = primitives.transport_of(self._group).averages
        self._averages = divide == self._group.size() > 1 and averages
        self.gradients = GradBucket(
            members, bucket.offsets, bucket.num_elements, divide=1 if self._averages else divide
        )
        self._start = bind(hook, _facts(bucket, self.gradients), bucket.num_elements)
        self._narrows = self.gradients.is_wider and not keep_wide
        self._marks = self.gradients.flat[bucket.used_flags :]
        self._without: list[int] = []
        self._pending: CommWork | None = None

    @property
    def launched(self) -> bool:
        return self._pending is not None

    def launch(self) -> None:
        without = self.gradients.complete()
        if self._group.size() > 1:
            self._without = without
            self._marks.fill_(1)
            if without:
                is_pinned = self._marks.is_cuda  # so that the host does not wait for the copy
                places = torch.tensor(without, pin_memory=is_pinned)
                self._marks.index_fill_(0, places.to(self._marks.device, non_blocking=True), 0)
        op = primitives.AVG if self._averages else primitives.SUM
        self._pending = self._start(self.gradients.flat, self._group, op)

    def wait(self) -> None:
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        if self._narrows and not self._without:
            self.gradients.cast_grads()

    @property
    def unread(self) -> Tensor | None:
        """The marks, once settled, if some of them must be read for `learn`."""
        return self._marks if self._without else None

    def learn(self, marks: Sequence[complex]) -> None:
        """Whom any rank used; the others are left without gradient."""
        for place in self._without:
            if marks[place] != 0:
                self.gradients.members[place].parameter.grad = self.gradients.views[place]
        self._without = []
        if self._narrows:
            self.gradients.cast_grads()

    def abandon(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self.gradients.undivide()


def wait_all(
    carriers: Sequence[BucketComm], settled: Callable[[int], object] | None = None
) -> None:
    """Settle them in order, then read all marks that must be: the host waits at most once.

    settled: called with the number of each.
    """
    for b, carrier in enumerate(carriers):
        carrier.wait()
        if settled is not None:
            settled(b)
    unread: dict[torch.device, list[tuple[AllReduceBucket, Tensor]]] = {}
    for carrier in carriers:
        if isinstance(carrier, AllReduceBucket) and (marks := carrier.unread) is not None:
            unread.setdefault(marks.device, []).append((carrier, marks))
    for on_device in unread.values():
        read = torch.cat([marks for _, marks in on_device]).tolist()
        for carrier, marks in on_device:
            carrier.learn(read[: len(marks)])
            del read[: len(marks)]


def _facts(bucket: Bucket, gradients: GradBucket) -> list[BucketMember]:
    return [
        BucketMember(shared.name, view.shape, view.stride(), offset, shared.parameter)
        for shared, view, offset in zip(
            gradients.members, gradients.views, bucket.offsets, strict=True
        )
    ]


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
    others, and their bytes; where they reach STAGED_BYTES, all are copied.
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

"""Buckets of gradients: what becomes of each, and the slots in which gradients lie.

The reducer says when a bucket is launched; its `BucketComm` says how, and how its sum arrives.
`AllReduceBucket` leaves the mean in every rank's bucket, by a communication hook.

A parameter without gradient contributes zeros, and an unset flag at the bucket's end. After the sum
the flag says whether any rank used it; if none did, `.grad` stays None, as in one process. Flags
are read only where this rank did not use one, those of all buckets at once: the usual step has no
device synchronisation, and any other has one.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.ddp.bucket_plan import Bucket, BucketPlan, BucketPlanner, plan_buckets
from torchdistpackage.ddp.grad_bucket import GradBucket, move
from torchdistpackage.ddp.param_spec import ParamSpec

SMALL_BYTES, STAGED_BYTES = 8 * 2**10, 64 * 2**10
"""Fresh gradients up to the one size are copied to their buckets when they reach the other."""


class CommWork(Protocol):
    """A reduction under way. wait: until the bucket holds the result; on CUDA, the stream waits."""

    def wait(self) -> object: ...


Start = Callable[..., CommWork]
"""(flat, group, op) -> CommWork: begins to reduce `flat` in place."""


class BucketMember(NamedTuple):
    """A gradient in a bucket: `flat.as_strided(shape, stride, offset)`, all in elements.

    parameter: by which it is known again when buckets are packed anew.
    """

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    parameter: Tensor


class BindableHook(Protocol):
    """A hook that makes the `start` of each bucket, of `num_elements` with used flags."""

    def bind(self, members: Sequence[BucketMember], num_elements: int) -> Start: ...


CommHook = Start | BindableHook
"""How buckets travel: all ranks start, and wait for, the same ones in the same order."""


def bind(hook: CommHook, members: Sequence[BucketMember], num_elements: int) -> Start:
    """The function that begins the reductions of one bucket under `hook`."""
    make = getattr(hook, "bind", None)
    return hook if make is None else make(members, num_elements)  # type: ignore[return-value]


class BucketComm(Protocol):
    """One bucket under way. All ranks of its group launch the same ones in the same order.

    launch: begin the sum of the gradients as they are. wait: for the sum, and leave it where it
    belongs. abandon: the backward failed; wait for what was launched, and forget it.
    holders: tensors whose `.grad` becomes the sum, where these are not the parameters themselves.
    """

    gradients: GradBucket
    holders: Sequence[Tensor]

    def launch(self) -> None: ...
    def wait(self) -> None: ...
    def abandon(self) -> None: ...


class AllReduceBucket:
    """All ranks get the sum, in the bucket itself, by `hook`.

    without: numbers of members without gradient here; after the sum `learn` needs their `flags`.
    """

    holders: Sequence[Tensor] = ()

    def __init__(
        self,
        bucket: Bucket,
        members: Sequence[ParamSpec],
        *,
        hook: CommHook = primitives.start_all_reduce,
        keep_wide: bool = False,
    ):
        group, divide = members[0].group, members[0].divide
        # NCCL takes the mean on the way
        averages = divide == group.size() > 1 and primitives.transport_of(group).averages
        self._group, self._op = group, primitives.AVG if averages else primitives.SUM
        divide, offsets = 1 if averages else divide, bucket.offsets
        self.gradients = GradBucket(members, offsets, bucket.num_elements, divide=divide)
        facts = [
            BucketMember(member.name, view.shape, view.stride(), offset, member.parameter)
            for member, view, offset in zip(members, self.gradients.views, offsets, strict=True)
        ]
        self._start = bind(hook, facts, bucket.num_elements)
        self._narrows = self.gradients.is_wider and not keep_wide
        self._flags = self.gradients.flat[bucket.used_flags :]
        self._without: list[int] = []
        self._work: CommWork | None = None

    def launch(self) -> None:
        without = self.gradients.complete()
        if self._group.size() > 1:
            self._without = without
            set_used_flags(self._flags, without)
        self._work = self._start(self.gradients.flat, self._group, self._op)

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._work = None
        if self._narrows and not self._without:
            self.gradients.cast_grads()

    def learn(self, flags: Sequence[complex]) -> None:
        """Which members any rank used; the others are left without gradient."""
        for member in self._without:
            if flags[member] != 0:
                self.gradients.members[member].parameter.grad = self.gradients.views[member]
        self._without = []
        if self._narrows:
            self.gradients.cast_grads()

    def abandon(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
        self.gradients.undivide()


def set_used_flags(flags: Tensor, without: Sequence[int]) -> None:
    """Set these to 1, and to 0 of the members `without` gradient; the host waits for no device."""
    flags.fill_(1)
    if without:
        members = torch.tensor(without, pin_memory=flags.is_cuda)
        flags.index_fill_(0, members.to(flags.device, non_blocking=True), 0)


def read_used_flags(bucket_comms: Sequence[BucketComm]) -> None:
    """Read the flags that must be, of buckets whose sums are there: the host waits at most once."""
    unread: dict[torch.device, list[AllReduceBucket]] = {}
    for bucket_comm in bucket_comms:
        if isinstance(bucket_comm, AllReduceBucket) and bucket_comm._without:
            unread.setdefault(bucket_comm._flags.device, []).append(bucket_comm)
    for on_device in unread.values():
        read = torch.cat([bucket_comm._flags for bucket_comm in on_device]).tolist()
        for bucket_comm in on_device:
            bucket_comm.learn(read[: len(bucket_comm._flags)])
            del read[: len(bucket_comm._flags)]


class ReducerParts(NamedTuple):
    """The parts of a reducer that its owner makes of the owner's options.

    make_bucket_comm: makes what becomes of a bucket. planner: chooses order and sizes of buckets.
    check_used: called after each reduction with the parameters and whether each got a gradient
    here. scheduled_ready: makes the `ScheduledReady` of `Reducer.scheduled`; a class of
    scheduled_ready.py, which imports the reducer.
    """

    make_bucket_comm: Callable[[Bucket, Sequence[ParamSpec]], BucketComm] = AllReduceBucket
    planner: BucketPlanner | None = None
    check_used: Callable[[Sequence[ParamSpec], Sequence[bool]], object] | None = None
    scheduled_ready: Callable[[Any], Any] | None = None


class GradSlot:
    """One parameter: its bucket, which `member` of it, and `home`, the view that is its `.grad`.

    bucket: number of the bucket. bucket_comm: what becomes of that. is_small: its gradient is
    copied to the bucket together with others (`GradBuckets.flush_staged`).
    has_grad: a gradient came since the last reduction; `Reducer` alone sets it, in the hook.
    may_repeat: more may come in a backward; `Reducer.mark_repeating` alone sets it.
    """

    __slots__ = (
        "bucket", "bucket_comm", "has_grad", "home", "index",
        "is_small", "may_repeat", "member", "num_bytes", "spec",
    )  # fmt: skip
    bucket_comm: BucketComm
    home: Tensor | None

    def __init__(self, index: int, spec: ParamSpec):
        self.index, self.spec, self.has_grad, self.may_repeat = index, spec, False, False
        self.bucket = self.member = 0
        self.num_bytes = spec.parameter.numel() * spec.parameter.element_size()
        # what must be added up in fp32 goes to its bucket at once
        waits = not (spec.is_wider or spec.sparse_rows)
        self.is_small = waits and self.num_bytes <= SMALL_BYTES


class GradBuckets:
    """Slots in the order of `specs`; buckets, and the `BucketComm` of each, in that of leaving.

    num_early: how many of these may leave while a backward runs. staged: slots of small gradients
    that came and wait to be copied together, staged_bytes of them; the hook of `Reducer` adds
    them.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        parts: ReducerParts,
        packing: BucketPlan,
        moving: Collection[nn.Parameter],
    ):
        self._specs, self._parts = specs, parts
        self.staged: list[GradSlot] = []
        self.staged_bytes = 0
        self.slots = [GradSlot(i, s) for i, s in enumerate(specs)]
        if len({s.parameter.device for s in specs}) > 1:  # gradients come in a thread for each
            for slot in self.slots:
                slot.is_small = False
        self.pack(packing, moving)

    def leave(self) -> set[nn.Parameter]:
        """Give up all buckets, one by one; returns the parameters whose gradients were in them."""
        moving: set[nn.Parameter] = set()
        self.bucket_comms.clear()
        for bucket in self.buckets:
            slots = [self.slots[i] for i in bucket.members]
            left = slots[0].bucket_comm.gradients.detach_views()
            moving.update(slots[member].spec.parameter for member in left)
            for slot in slots:
                del slot.bucket_comm, slot.home
        return moving

    def num_bytes(self, b: int) -> int:
        """Bytes of the gradients of bucket `b`."""
        bucket = self.buckets[b]
        return bucket.num_elements * self._specs[bucket.members[0]].sum_dtype.itemsize

    def take_has_grad(self) -> list[bool]:
        """Whether each parameter got a gradient since this was asked last; rows count as if."""
        fired = [slot.has_grad or slot.spec.sparse_rows for slot in self.slots]
        for slot in self.slots:
            slot.has_grad = False
        return fired

    def drop_staged(self) -> None:
        """The backward failed: gradients that wait to be copied stay where they came."""
        self.staged, self.staged_bytes = [], 0

    def flush_staged(self) -> None:
        """Copy what waits for it, so that every gradient is in its bucket."""
        if self.staged:
            slots, self.staged, self.staged_bytes = self.staged, [], 0
            for bucket_comm in {slot.bucket_comm for slot in slots}:
                bucket_comm.gradients.allocate()  # ZeRO's memory goes between reductions
            move([slot.home for slot in slots], [slot.spec for slot in slots])

    def pack(self, packing: BucketPlan, moving: Collection[nn.Parameter]) -> None:
        """Make buckets by this plan, between two reductions. moving: those with a gradient."""
        early = [s.entry(i) for i, s in enumerate(self._specs) if s.is_early]
        later = [s.entry(i) for i, s in enumerate(self._specs) if not s.is_early]
        cap, order, first_bytes = packing.cap_bytes, packing.order, packing.first_bytes
        first = plan_buckets(early, cap, order=order, first_bytes=first_bytes)
        self.num_early = len(first)
        self.buckets = [*first, *plan_buckets(later, cap)]
        self.bucket_comms: list[BucketComm] = []
        for b, bucket in enumerate(self.buckets):
            members = [self._specs[i] for i in bucket.members]
            bucket_comm = self._parts.make_bucket_comm(bucket, members)
            self.bucket_comms.append(bucket_comm)
            views = bucket_comm.gradients.views
            # a slot is looked up on every gradient's way, so it holds what it would have to search
            for member, (i, view) in enumerate(zip(bucket.members, views, strict=True)):
                slot = self.slots[i]
                slot.bucket, slot.bucket_comm, slot.member, slot.home = b, bucket_comm, member, view
                if self._specs[i].parameter in moving:
                    bucket_comm.gradients.absorb(member)

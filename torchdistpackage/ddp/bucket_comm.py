"""Communication of gradient buckets, and the slots that map gradients to buckets.

The reducer decides when a bucket is launched; its `BucketComm` decides how, and where the sum goes.
`AllReduceBucket` leaves the mean in every rank's bucket, by a communication hook.

A parameter without a gradient contributes zeros, and an unset flag at the bucket's end. After the
sum the flag tells whether any rank used the parameter; if none did, its `.grad` stays None, as in
one process. A rank reads flags only if it has parameters without gradient, and then those of all
buckets at once. So the usual step has no device synchronisation, and any other step has one.
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
"""Gradients of at most SMALL_BYTES are copied to their buckets once STAGED_BYTES of them wait."""


class CommWork(Protocol):
    """A reduction in flight. `wait` returns once the bucket holds the result; on CUDA the current
    stream waits instead of the host."""

    def wait(self) -> object: ...


Start = Callable[..., CommWork]
"""A function (flat, group, op) -> CommWork that starts to reduce `flat` in place."""


class BucketMember(NamedTuple):
    """A gradient in a bucket: `flat.as_strided(shape, stride, offset)`, all in elements.

    parameter: identifies the gradient when the buckets are packed again.
    """

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    parameter: Tensor


class BindableHook(Protocol):
    """A hook that creates the start function of each bucket.

    num_elements: length of the bucket, with its used flags.
    """

    def bind(self, members: Sequence[BucketMember], num_elements: int) -> Start: ...


CommHook = Start | BindableHook
"""A hook that reduces buckets. All ranks start and wait for the same buckets in the same order."""


def bind(hook: CommHook, members: Sequence[BucketMember], num_elements: int) -> Start:
    """Return the function that starts the reductions of one bucket under `hook`."""
    make = getattr(hook, "bind", None)
    return hook if make is None else make(members, num_elements)  # type: ignore[return-value]


class BucketComm(Protocol):
    """The communication of one bucket. All ranks launch the same buckets in the same order.

    launch: start to sum the gradients as they are.
    wait: wait for the sum, and leave it where it belongs.
    abandon: after a failed backward, wait for what was launched, and drop it.
    holders: tensors whose `.grad` becomes the sum, if these are not the parameters themselves.
    """

    gradients: GradBucket
    holders: Sequence[Tensor]

    def launch(self) -> None: ...
    def wait(self) -> None: ...
    def abandon(self) -> None: ...


class AllReduceBucket:
    """A bucket that `hook` reduces in place, so that all ranks get the sum.

    Members without a gradient on this rank are kept until `learn` gets their all-reduced flags.
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
        # NCCL can average during the sum, which saves the division
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
        unused = self.gradients.complete()
        if self._group.size() > 1:
            self._without = unused
            set_used_flags(self._flags, unused)
        self._work = self._start(self.gradients.flat, self._group, self._op)

    def wait(self) -> None:
        assert self._work is not None
        # after it the host, or the stream of a device, may read the sums
        self._work.wait()
        self._work = None
        if self._narrows and not self._without:
            self.gradients.cast_grads()

    def learn(self, flags: Sequence[complex]) -> None:
        """Give members that another rank used their gradient; the others stay without one.

        flags: the summed used flags of all members.
        """
        for member in self._without:
            if flags[member] != 0:
                self.gradients.members[member].parameter.grad = self.gradients.views[member]
        self._without = []
        if self._narrows:
            self.gradients.cast_grads()

    def abandon(self) -> None:
        if self._work is not None:
            self._work.wait()  # the collective still writes to the bucket
            self._work = None
        self.gradients.undivide()


def set_used_flags(flags: Tensor, unused: Sequence[int]) -> None:
    """Set all used flags to 1, and those of the members in `unused` to 0."""
    flags.fill_(1)
    if unused:
        # pinned and non-blocking, so that the host does not wait for the device
        members = torch.tensor(unused, pin_memory=flags.is_cuda)
        flags.index_fill_(0, members.to(flags.device, non_blocking=True), 0)


def read_used_flags(bucket_comms: Sequence[BucketComm]) -> None:
    """Read the used flags of arrived buckets that need them; the host waits at most once."""
    unread: dict[torch.device, list[AllReduceBucket]] = {}
    for bucket_comm in bucket_comms:
        if isinstance(bucket_comm, AllReduceBucket) and bucket_comm._without:
            unread.setdefault(bucket_comm._flags.device, []).append(bucket_comm)
    for on_device in unread.values():
        flags = torch.cat([bucket_comm._flags for bucket_comm in on_device]).tolist()
        for bucket_comm in on_device:
            bucket_comm.learn(flags[: len(bucket_comm._flags)])
            del flags[: len(bucket_comm._flags)]


class ReducerParts(NamedTuple):
    """Objects for a reducer that its owner creates from the owner's options.

    make_bucket_comm: creates the communication of a bucket.
    planner: chooses the order and sizes of buckets.
    check_used: called after each reduction with the parameters, and whether each got a gradient on
        this rank.
    scheduled_ready: creates the `ScheduledReady` of `Reducer.scheduled`. It is passed in because
        scheduled_ready.py imports the reducer.
    """

    make_bucket_comm: Callable[[Bucket, Sequence[ParamSpec]], BucketComm] = AllReduceBucket
    planner: BucketPlanner | None = None
    check_used: Callable[[Sequence[ParamSpec], Sequence[bool]], object] | None = None
    scheduled_ready: Callable[[Any], Any] | None = None


class GradSlot:
    """The slot of one parameter: its place in a bucket, and `home`, the view that is its `.grad`.

    bucket: number of the bucket. bucket_comm: communication of that bucket. member: its number in
        the bucket.
    is_small: its gradient is copied to the bucket together with others
        (`GradBuckets.flush_staged`).
    has_grad: a gradient arrived since the last reduction; only `Reducer` sets it, in the hook.
    may_repeat: a backward may add to the gradient again; only `Reducer.mark_repeating` sets it.
    """

    __slots__ = (
        "bucket", "bucket_comm", "has_grad", "home", "index",
        "is_small", "may_repeat", "member", "num_bytes", "spec",
    )  # fmt: skip
    bucket_comm: BucketComm
    home: Tensor | None

    def __init__(self, index: int, spec: ParamSpec):
        self.index, self.spec = index, spec
        self.has_grad = self.may_repeat = False
        self.bucket = self.member = 0
        self.num_bytes = spec.parameter.numel() * spec.parameter.element_size()
        # a gradient that must accumulate in fp32 goes to its bucket at once
        waits = not (spec.is_wider or spec.sparse_rows)
        self.is_small = waits and self.num_bytes <= SMALL_BYTES


class GradBuckets:
    """All slots, in the order of `specs`, and all buckets with their communication, as launched.

    num_early: number of buckets that may be launched while a backward runs.
    staged: slots of small gradients that wait to be copied together; the hook of `Reducer` adds
        them. staged_bytes: bytes of these gradients.
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
        # autograd runs one thread for each device, and these would add to `staged` at once
        if len({s.parameter.device for s in specs}) > 1:
            for slot in self.slots:
                slot.is_small = False
        self.pack(packing, moving)

    def leave(self) -> set[nn.Parameter]:
        """Release all buckets, and return the parameters whose gradients were in them."""
        moving: set[nn.Parameter] = set()
        self.bucket_comms.clear()
        for bucket in self.buckets:
            slots = [self.slots[i] for i in bucket.members]
            detached = slots[0].bucket_comm.gradients.detach_views()
            moving.update(slots[member].spec.parameter for member in detached)
            for slot in slots:
                del slot.bucket_comm, slot.home
        return moving

    def num_bytes(self, b: int) -> int:
        """Return the bytes of the gradients of bucket `b`."""
        bucket = self.buckets[b]
        return bucket.num_elements * self._specs[bucket.members[0]].sum_dtype.itemsize

    def take_has_grad(self) -> list[bool]:
        """Return whether each parameter got a gradient since the last call, and reset that.

        Parameters with sparse gradients always count as having one.
        """
        fired = [slot.has_grad or slot.spec.sparse_rows for slot in self.slots]
        for slot in self.slots:
            slot.has_grad = False
        return fired

    def drop_staged(self) -> None:
        """After a failed backward, leave staged gradients where autograd put them."""
        self.staged, self.staged_bytes = [], 0

    def flush_staged(self) -> None:
        """Copy the staged gradients, so that every gradient is in its bucket."""
        if self.staged:
            slots, self.staged, self.staged_bytes = self.staged, [], 0
            for bucket_comm in {slot.bucket_comm for slot in slots}:
                bucket_comm.gradients.allocate()  # ZeRO frees this memory between reductions
            move([slot.home for slot in slots], [slot.spec for slot in slots])

    def pack(self, packing: BucketPlan, moving: Collection[nn.Parameter]) -> None:
        """Make buckets by this plan, between two reductions.

        moving: parameters with a gradient, which moves to the new buckets.
        """
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
            # every gradient's hook reads its slot, so the slot stores all that the hook needs
            for member, (i, view) in enumerate(zip(bucket.members, views, strict=True)):
                slot = self.slots[i]
                slot.bucket, slot.bucket_comm, slot.member, slot.home = b, bucket_comm, member, view
                if self._specs[i].parameter in moving:
                    bucket_comm.gradients.absorb(member)

"""A bucket's gradients: those of this rank, and the slice of their sum that it owns.

A gradient is in the buffer, with `.grad` as its view, from its completion until the bucket is sent;
then `.grad` is None. The slice is valid until the optimizer has stepped: sums of several backwards
before the step add up, and the first one after it starts from zero. `ParamShard.tensor.grad` is a
view of the slice for every shard that some rank used, and None for the others, as in one process.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import torch
from torch import Tensor

from torchdistpackage.comm.primitives import SUM, Group, Work, start_all_reduce
from torchdistpackage.comm.transport.sharded_flat import posts_ahead, prepost_reduce_scatter_v
from torchdistpackage.ddp.bucket_comm import CommWork, Start, set_used_flags
from torchdistpackage.ddp.comm_hooks import narrowed
from torchdistpackage.ddp.grad_bucket import GradBucket
from torchdistpackage.ddp.sharded import ParamShard
from torchdistpackage.ddp.zero.options import ZeroOptions
from torchdistpackage.ddp.zero.param_buffer import MasterStore
from torchdistpackage.ddp.zero.param_shard import FlatLayout

UNDER_WAY = 2
"""Number of buckets in flight or expected ahead, if memory is saved and the back end can post
receives early (`posts_ahead`)."""
EXPECTED = 16
"""Number of buckets expected ahead if memory is not saved. Posting a receive waits while gloo reads
from that connection, so it is done early."""


class SumPhase(Enum):
    """Phase of a bucket's sum.

    IDLE: nothing is in flight. EXPECTED: this rank can receive what others send. SENT: the sum over
    the group is in flight. LANDED: it has arrived, and the sum over replicas, if any, is in flight.
    """

    IDLE, EXPECTED, SENT, LANDED = "idle", "expected", "sent", "landed"


class ReduceScatterBucket:
    """The communication of a bucket whose sum is scattered, so that each rank gets its own slice.

    layout: the place of each parameter, and the elements that each rank owns.
    options: the options of the optimizer.
    shards: the shards that this rank owns; their `.grad` becomes the sum.
    flags: the used flags of all buckets over the group.
    store: the place for sums, if not beside the parameters.

    Other objects set these four attributes before the first backward, and no others:

    left, settled: called when the gradients are sent, and when the shards have their sum.
    following: the buckets that are sent next, as many as are expected ahead.
    frees_first: the bucket whose memory must be free before this one is sent.
    """

    left: Callable[[], object] = staticmethod(lambda: None)
    settled: Callable[[], object] = staticmethod(lambda: None)

    def __init__(
        self,
        layout: FlatLayout,
        options: ZeroOptions,
        shards: Sequence[ParamShard],
        flags: "UsedFlags",
        store: MasterStore | None = None,
    ):
        first, frees = layout.members[0], options.frees_gradients
        dtype, reduce_dtype = options.shard_dtype(first), options.grad_dtype(first)
        self.layout, self.shards = layout, shards
        self.holders = [shard.tensor for shard in shards]
        self.following: Sequence[ReduceScatterBucket] = ()
        self.frees_first: ReduceScatterBucket | None = None
        self.gradients = GradBuffer(layout, frees, self._first_gradient)
        self._slice = layout.mine(self.gradients.flat)
        self.gradients.free()
        # the sum arrives in a slice of the buffer; True if it is kept in other memory
        self._is_apart = frees or store is not None or dtype != self._slice.dtype
        self._store = store or MasterStore()
        self.total = self._store.allocate(self._slice, dtype) if self._is_apart else self._slice
        self._views = [shard.view(self.total) for shard in shards]
        self._flags, self._first_flag = flags, flags.add(len(layout.members))
        self._reduce_dtype, self._replicas = reduce_dtype, flags.replicas
        narrow = None if reduce_dtype is None else narrowed(reduce_dtype)
        self._start_over_replicas: Start = narrow or start_all_reduce
        self._posts_ahead = posts_ahead(layout.group)
        self.phase = SumPhase.IDLE
        self._start_sum: Callable[[], Work] | None = None  # while EXPECTED
        self._work: CommWork | None = None  # while SENT or LANDED
        self._without: list[int] = []  # members without a gradient when it was sent last
        # A backward failed after other buckets of it were sent: the next sum is dropped, because
        # ranks keep the sums of all buckets or of none.
        self._is_lost = False
        # `total` has a sum since the last step, to which those of further backwards are added.
        self._has_sum = False
        # The optimizer has used the shards' `.grad`; the next sum replaces them.
        self._was_stepped = False
        # If `total` is the slice of the buffer: a copy of it while new gradients overwrite it.
        self._total_before: Tensor | None = None

    @property
    def launched(self) -> bool:
        """True if its gradients were sent and nothing has waited for their sum."""
        return self._work is not None

    def launch(self) -> None:
        self._without = self.gradients.complete()
        # If memory is saved, at most UNDER_WAY buffers may be full. So this waits for the sum of
        # the bucket that many before, which frees its buffer, before it is sent.
        if self.frees_first is not None:
            self.frees_first.land()
        self.expect()
        if self._posts_ahead:
            for bucket_comm in self.following:
                bucket_comm.expect()
        assert self._start_sum is not None
        self._work, self._start_sum = self._start_sum(), None
        self.phase = SumPhase.SENT
        self.gradients.release()
        self._flags.leave(self._first_flag, self._without)
        self.left()

    def expect(self) -> None:
        """Post the receives of this bucket, so that other ranks can send."""
        if self.phase is SumPhase.IDLE:
            layout, flat = self.layout, self.gradients.flat
            self.gradients.have_memory()
            self._start_sum = prepost_reduce_scatter_v(
                flat, layout.bounds, layout.group, wire_dtype=self._reduce_dtype
            )
            self.phase = SumPhase.EXPECTED

    def land(self) -> None:
        """Wait for the sum over the group, and start the sum over replicas, if there are any."""
        if self.phase is not SumPhase.SENT:
            return
        assert self._work is not None
        # the sum over replicas reads this one
        self._work.wait()
        self.phase = SumPhase.LANDED
        if self._replicas is not None:
            # only now: this sum reads what the sum over the group has written
            self._work = self._start_over_replicas(self._slice, self._replicas, SUM)
        else:
            self._add_to_total()

    def wait(self) -> None:
        self.land()
        if self._replicas is not None:
            assert self._work is not None
            self._work.wait()
            # the sum over replicas is a second collective, and its result is what is added
            self._add_to_total()
            self._flags.land()
        self._work, self.phase = None, SumPhase.IDLE
        # land the next sums now, so that their copies to the store run during this bucket's step
        for bucket_comm in self.following[: self._store.ahead]:
            bucket_comm.land()
        for shard, view in zip(self.shards, self._views, strict=True):
            if shard.member not in self._without or self._flags.used(
                self._first_flag + shard.member
            ):
                shard.tensor.grad = view
            elif self._was_stepped:
                shard.tensor.grad = None
        self._was_stepped = False
        self.settled()

    def abandon(self) -> None:
        # the failed backward may leave a reduction in flight, which still writes to this memory
        self.gradients.undivide()
        if self._work is not None:
            self._work.wait()
            self._work, self.phase, self._is_lost = None, SumPhase.IDLE, True
        self.wait_offloaded()
        if self._is_lost:
            self.drop()
            self._is_lost = False
            for bucket_comm in self.following:
                bucket_comm._is_lost = True
        self._flags.forget()

    def wait_offloaded(self) -> None:
        """Wait until the host may read and write the sum."""
        self._store.wait(self.total)

    def stepped(self) -> None:
        """Record that the optimizer has used the gradients."""
        self._has_sum, self._was_stepped = False, True

    def drop(self) -> None:
        """Drop all gradients, of the shards and of the parameters."""
        for shard in self.shards:
            shard.tensor.grad = None
        if not self.gradients.empty:
            self.gradients.release()
            if self.phase is not SumPhase.EXPECTED:  # otherwise other ranks send to this memory
                self.gradients.free()
        self._has_sum, self._total_before = False, None

    def zero(self) -> None:
        """Set all existing gradients to zero."""
        self.wait_offloaded()
        for shard in self.shards:
            if shard.tensor.grad is not None:
                shard.tensor.grad.zero_()
        if not self.gradients.empty:
            self.gradients.zero()
        self._was_stepped, self._total_before = False, None

    def _first_gradient(self) -> None:
        """Prepare the empty buffer for the first gradient of a backward."""
        if self._is_apart:
            self._store.free(self.total)
        elif self._has_sum:
            self._zero_dropped(self.total)
            # the next reduction overwrites the sum, to which it is added again afterwards
            self._total_before = self.total.clone()

    def _zero_dropped(self, total: Tensor) -> None:
        """Set the sum to zero for shards whose `.grad` the user set to None.

        total: `self.total`, or a copy of it. It does not touch parameters, which may be absent.
        """
        offset = total.storage_offset() - self.total.storage_offset()
        for shard, view in zip(self.shards, self._views, strict=True):
            if shard.tensor.grad is None:
                total.as_strided(view.shape, view.stride(), view.storage_offset() + offset).zero_()

    def _add_to_total(self) -> None:
        """Add the sum of this backward, which is in the slice, to those since the last step."""
        if self._total_before is not None:
            self._slice.add_(self._total_before)
            self._total_before = None
        elif self._is_apart and self._has_sum:
            total = self._store.here(self.total)
            self._zero_dropped(total)
            # the total over several backwards may be wider than what one backward sends
            total.add_(self._slice.to(total.dtype))
            self._store.offload(self.total, total)
        elif self._is_apart:
            self._store.offload(self.total, self._slice)
        self.gradients.free()
        self._has_sum = True


def line_up(bucket_comms: Sequence[ReduceScatterBucket], *, saves_memory: bool) -> None:
    """Link buckets, in the order in which they are sent, to those they expect and wait for."""
    for i, bucket_comm in enumerate(bucket_comms):
        bucket_comm.following = bucket_comms[i + 1 :][: UNDER_WAY if saves_memory else EXPECTED]
        if saves_memory and i >= UNDER_WAY:
            bucket_comm.frees_first = bucket_comms[i - UNDER_WAY]


class GradBuffer(GradBucket):
    """This rank's gradients of one bucket, laid out as the parameters are.

    freed: free the memory while it is empty. begins: called before the first gradient.
    """

    def __init__(self, layout: FlatLayout, freed: bool, begins: Callable[[], object]):
        divide = layout.members[0].divide
        super().__init__(layout.members, layout.offsets, layout.num_elements, divide=divide)
        self._freed, self._at_first = freed, begins
        self.empty = True

    def allocate(self) -> None:
        if self.empty:
            self.empty = False
            self._at_first()
            self.have_memory()

    def have_memory(self) -> None:
        """Allocate the memory; gaps between members stay uninitialised, as nothing reads
        their sum.
        """
        if self._freed:
            self.flat.untyped_storage().resize_(self._num_bytes)

    def release(self) -> None:
        """Take the memory away from every `.grad`, once the gradients are sent."""
        for spec in self.members:
            spec.parameter.grad = None
        self._divided.clear()
        self.empty = True

    def free(self) -> None:
        """Free the memory, once the sum has arrived."""
        if self._freed:
            self.flat.untyped_storage().resize_(0)

    def zero(self) -> None:
        """Set the gradients in this buffer to zero."""
        for spec, view in zip(self.members, self.views, strict=True):
            if spec.parameter.grad is view:
                view.zero_()


class UsedFlags:
    """Flags of the parameters that some rank used in a backward, for all buckets over one group.

    There is one small all-reduce after the last bucket. A rank reads it only if it left a parameter
    unused, once for all flags, so the usual step does not wait for it.
    """

    def __init__(self, group: Group, replicas: Group | None, device: torch.device):
        self._group, self.replicas, self._device = group, replicas, device
        self._num_flags = self._num_buckets = self._num_left = 0
        self._without: list[int] = []  # flags of members without gradient, of buckets already sent
        self._flags: torch.Tensor | None = None
        self._work: Work | None = None
        self._num_sums = 0
        self._read: list[int] | None = None  # the sum, once read

    def add(self, num_members: int) -> int:
        """Add a bucket, and return the index of its first flag."""
        first = self._num_flags
        self._num_flags += num_members
        self._num_buckets += 1
        self._num_left = self._num_buckets
        return first

    def leave(self, first: int, unused: Iterable[int]) -> None:
        """Record the unused members of a bucket that was sent; the last bucket starts the
        all-reduce.
        """
        self._without += [first + member for member in unused]
        self._num_left -= 1
        if self._num_left == 0:
            self._num_left, self._num_sums, self._read = self._num_buckets, 1, None
            self._work = start_all_reduce(self._mine(), self._group)

    def land(self) -> None:
        """Start the sum over replicas, if there are any; every rank calls it before it settles."""
        if self.replicas is not None and self._num_sums == 1 and self._work is not None:
            self._num_sums = 2
            # the second sum reads the result of the first
            self._work = start_all_reduce(self._work.wait(), self.replicas)

    def used(self, flag: int) -> bool:
        """Return whether some rank had a gradient; the first call waits for the device."""
        assert self._work is not None
        if self._read is None:
            # on the host, which decides with them what to step; one copy brings all flags
            self._read = self._work.wait().tolist()
        return self._read[flag] != 0

    def forget(self) -> None:
        """After a failed backward, wait for an all-reduce in flight, and start over."""
        if self._work is not None:
            # the all-reduce still writes to the flags, which the next backward fills anew
            self._work.wait()
            self._work = None
        self._without.clear()
        self._num_left = self._num_buckets

    def _mine(self) -> torch.Tensor:
        """Return this rank's flags on the device, without letting the host wait."""
        if self._work is not None:
            self._work.wait()  # last step's sum uses the same memory
        if self._flags is None:
            self._flags = torch.empty(self._num_flags, dtype=torch.int32, device=self._device)
        set_used_flags(self._flags, self._without)
        self._without.clear()
        return self._flags

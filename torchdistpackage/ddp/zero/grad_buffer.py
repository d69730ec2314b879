"""A bucket's gradients: this rank's own on their way in, and the slice of their sum that it owns.

A gradient is in the buffer, with `.grad` as its view, from when it is complete until the bucket
leaves; then `.grad` is None. The slice counts until the optimizer has stepped: sums of several
backwards before that add up, and the first after it begins anew. `ParamShard.tensor.grad` is a view
of it for every shard that some rank used, None for the others, as one process has it.
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
"""Where memory is saved: how many buckets may still be under way when another leaves, and how many
are expected ahead, where the back end can say so (`posts_ahead`)."""
EXPECTED = 16
"""Elsewhere: how many are expected ahead. To say so waits while gloo reads from that connection, so
it is said early."""


class SumPhase(Enum):
    """Where the sum of a bucket is.

    IDLE: nothing is under way. EXPECTED: this rank can receive what others send of it. SENT: the
    sum over the group is under way. LANDED: it has come; that over replicas, if any, is under way.
    """

    IDLE, EXPECTED, SENT, LANDED = "idle", "expected", "sent", "landed"


class ReduceScatterBucket:
    """The gradients of `layout`, of whose sum each rank ends with its own slice.

    layout: which parameter lies where, and which rank owns what.
    options: of the optimizer; this reads them where it does what they ask for.
    shards: what this rank owns; their `.grad` becomes the sum.
    flags: which parameters were used, of all buckets over the group.
    store: where sums are kept, if not beside the parameters.

    Other objects set these four before the first backward, and nothing else:

    left, settled: called when the gradients have left, and when the shards have their sum.
    following: the buckets that leave next, as many as are expected ahead.
    frees_first: the bucket whose memory must be free before this one leaves.
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
        # whether the sum is kept elsewhere than in the slice of the buffer that it arrives in
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
        self._without: list[int] = []  # places of members without gradient, of what was sent last
        # A backward failed after other buckets of it had left: what comes next is dropped here,
        # since ranks keep the sums of all buckets or of none.
        self._is_lost = False
        # Between two steps sums of several backwards add up in `total`.
        self._has_sum = False
        # The `.grad` of the shards are of a step that is over; the next sum replaces them all.
        self._was_stepped = False
        # Where total is the slice of the buffer: a copy, while gradients come in over it.
        self._total_before: Tensor | None = None

    @property
    def launched(self) -> bool:
        """Whether its gradients have left and their sum has not been waited for."""
        return self._work is not None

    def launch(self) -> None:
        self._without = self.gradients.complete()
        # What waits for what: at most UNDER_WAY buffers are full where memory is saved, so the sum
        # of the bucket that many before must have come, and its buffer be free, before this leaves.
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
        """Be ready for what others send of this bucket."""
        if self.phase is SumPhase.IDLE:
            layout, flat = self.layout, self.gradients.flat
            self.gradients.have_memory()
            self._start_sum = prepost_reduce_scatter_v(
                flat, layout.bounds, layout.group, wire_dtype=self._reduce_dtype
            )
            self.phase = SumPhase.EXPECTED

    def land(self) -> None:
        """Wait for the sum over the group; if there are replicas, begin that over them."""
        if self.phase is not SumPhase.SENT:
            return
        assert self._work is not None
        self._work.wait()
        self.phase = SumPhase.LANDED
        if self._replicas is not None:
            self._work = self._start_over_replicas(self._slice, self._replicas, SUM)
        else:
            self._add_to_total()

    def wait(self) -> None:
        self.land()
        if self._replicas is not None:
            assert self._work is not None
            self._work.wait()
            self._add_to_total()
            self._flags.land()
        self._work, self.phase = None, SumPhase.IDLE
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
        """Wait until the host may read the sum, and write it."""
        self._store.wait(self.total)

    def stepped(self) -> None:
        """The optimizer has used the gradients."""
        self._has_sum, self._was_stepped = False, True

    def drop(self) -> None:
        """Forget all gradients, of the shards and of the parameters."""
        for shard in self.shards:
            shard.tensor.grad = None
        if not self.gradients.empty:
            self.gradients.release()
            if self.phase is not SumPhase.EXPECTED:  # else its memory is what others send to
                self.gradients.free()
        self._has_sum, self._total_before = False, None

    def zero(self) -> None:
        """Set all gradients to zero that there are."""
        self.wait_offloaded()
        for shard in self.shards:
            if shard.tensor.grad is not None:
                shard.tensor.grad.zero_()
        if not self.gradients.empty:
            self.gradients.zero()
        self._was_stepped, self._total_before = False, None

    def _first_gradient(self) -> None:
        """A gradient is about to come into the empty buffer."""
        if self._is_apart:
            self._store.free(self.total)
        elif self._has_sum:
            self._zero_dropped(self.total)
            self._total_before = self.total.clone()

    def _zero_dropped(self, total: Tensor) -> None:
        """Begin anew where the user threw away what there was, by `.grad = None` of a shard.

        total: `self.total`, or a copy; parameters, which may be absent, are not asked.
        """
        by = total.storage_offset() - self.total.storage_offset()
        for shard, v in zip(self.shards, self._views, strict=True):
            if shard.tensor.grad is None:
                total.as_strided(v.shape, v.stride(), v.storage_offset() + by).zero_()

    def _add_to_total(self) -> None:
        """The slice has the sum of this backward: add it to those since the last step."""
        if self._total_before is not None:
            self._slice.add_(self._total_before)
            self._total_before = None
        elif self._is_apart and self._has_sum:
            total = self._store.here(self.total)
            self._zero_dropped(total)
            total.add_(self._slice.to(total.dtype))
            self._store.offload(self.total, total)
        elif self._is_apart:
            self._store.offload(self.total, self._slice)
        self.gradients.free()
        self._has_sum = True


def line_up(bucket_comms: Sequence[ReduceScatterBucket], *, saves_memory: bool) -> None:
    """Set, of buckets in the order in which they leave, what is expected and waited for."""
    for i, bucket_comm in enumerate(bucket_comms):
        bucket_comm.following = bucket_comms[i + 1 :][: UNDER_WAY if saves_memory else EXPECTED]
        if saves_memory and i >= UNDER_WAY:
            bucket_comm.frees_first = bucket_comms[i - UNDER_WAY]


class GradBuffer(GradBucket):
    """This rank's own gradients of one bucket, laid out as the parameters are.

    freed: give the memory back while it is empty. begins: called before the first gradient.
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
        """Gaps between members stay as they are: their sum is not read."""
        if self._freed:
            self.flat.untyped_storage().resize_(self._num_bytes)

    def release(self) -> None:
        """They have left: no `.grad` shows the memory any more."""
        for spec in self.members:
            spec.parameter.grad = None
        self._divided.clear()
        self.empty = True

    def free(self) -> None:
        """The sum has been made, so the memory may go."""
        if self._freed:
            self.flat.untyped_storage().resize_(0)

    def zero(self) -> None:
        """Set to zero what is here."""
        for spec, view in zip(self.members, self.views, strict=True):
            if spec.parameter.grad is view:
                view.zero_()


class UsedFlags:
    """Which parameters some rank used in a backward, of all buckets over one group.

    One small sum after the last bucket, which a rank reads only where it left something unused
    itself, once for all, so that the usual step does not wait for it.
    """

    def __init__(self, group: Group, replicas: Group | None, device: torch.device):
        self._group, self.replicas, self._device = group, replicas, device
        self._num_flags = self._num_buckets = self._num_left = 0
        self._without: list[int] = []  # flags of members without gradient, of buckets that left
        self._flags: torch.Tensor | None = None
        self._work: Work | None = None
        self._num_sums = 0
        self._read: list[int] | None = None  # the sum, once read

    def add(self, num_members: int) -> int:
        """Another bucket; returns the place of its first flag."""
        first = self._num_flags
        self._num_flags += num_members
        self._num_buckets += 1
        self._num_left = self._num_buckets
        return first

    def leave(self, first: int, without: Iterable[int]) -> None:
        """A bucket leaves, `without` gradients at these places; the last of all begins the sum."""
        self._without += [first + member for member in without]
        self._num_left -= 1
        if self._num_left == 0:
            self._num_left, self._num_sums, self._read = self._num_buckets, 1, None
            self._work = start_all_reduce(self._mine(), self._group)

    def land(self) -> None:
        """If flags go on to replicas, let them; every rank calls it before it settles."""
        if self.replicas is not None and self._num_sums == 1 and self._work is not None:
            self._num_sums = 2
            self._work = start_all_reduce(self._work.wait(), self.replicas)

    def used(self, flag: int) -> bool:
        """Whether some rank had a gradient; the first to ask waits for the device, for all."""
        assert self._work is not None
        if self._read is None:
            self._read = self._work.wait().tolist()
        return self._read[flag] != 0

    def forget(self) -> None:
        """The backward failed: let what has left arrive, and begin anew."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._without.clear()
        self._num_left = self._num_buckets

    def _mine(self) -> torch.Tensor:
        """My flags, on the device without a wait of the host."""
        if self._work is not None:
            self._work.wait()  # last step's, in the same memory
        if self._flags is None:
            self._flags = torch.empty(self._num_flags, dtype=torch.int32, device=self._device)
        set_used_flags(self._flags, self._without)
        self._without.clear()
        return self._flags

"""A bucket's gradients: this rank's own on their way in, and the slice of their sum that it owns.

A gradient is in the buffer, with `.grad` as its view, from when it is complete until the bucket
leaves; then `.grad` is None. The slice counts until the optimizer has stepped: sums of several
backwards before that add up, and the first after it begins anew. `ParamShard.tensor.grad` is a view
of it for every shard that some rank used, None for the others, as one process has it.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from torchdistpackage.comm.primitives import Group, Work, start_all_reduce
from torchdistpackage.comm.transport.sharded_flat import posts_ahead, prepost_reduce_scatter_v
from torchdistpackage.ddp.bucket_comm import set_used_flags
from torchdistpackage.ddp.grad_bucket import GradBucket
from torchdistpackage.ddp.zero.param_buffer import MasterStore
from torchdistpackage.ddp.zero.param_shard import FlatLayout, ParamShard

UNDER_WAY = 2
"""Of those that save memory, how many are expected, if any are (`posts_ahead`), or still under way,
when another leaves."""
EXPECTED = 16
"""Of others. Saying so waits while gloo reads from that connection, so it is said early."""


class ReduceScatterBucket:
    """The gradients on `line`, of whose sum each rank ends with its own slice.

    shards: mine, whose gradients these become. flags: of all buckets over the group. dtype: of the
    shards. freed: keep the slice alone once it is made (stages 2 and 3). copies: where slices are
    kept, if elsewhere. wire: dtype in which gradients travel. left, settled: called when they
    leave, and when the shards have their sum.
    """

    left: Callable[[], object] = staticmethod(lambda: None)
    settled: Callable[[], object] = staticmethod(lambda: None)

    def __init__(
        self,
        line: FlatLayout,
        shards: Sequence[ParamShard],
        flags: "UsedFlags",
        dtype: torch.dtype,
        freed: bool = False,
        copies: MasterStore | None = None,
        wire: torch.dtype | None = None,
    ):
        self.line, self.shards = line, shards
        self.next: Sequence[ReduceScatterBucket] = ()  # leave after it, as many as are expected
        self.before: ReduceScatterBucket | None = None  # whose memory is free before this leaves
        self.gradients = GradBuffer(line, freed, self._begin)
        self._slice = line.mine(self.gradients.flat)
        self.gradients.free()
        self._apart = freed or copies is not None or dtype != self._slice.dtype
        self._copies = copies or MasterStore()
        self.total = self._copies.allocate(self._slice, dtype) if self._apart else self._slice
        self._views = [shard.view(self.total) for shard in shards]
        self._flags, self._first_flag = flags, flags.add(len(line.members))
        self._wire, self._replicas = wire, flags.replicas
        self._posts_ahead = posts_ahead(line.group)
        self._without: list[int] = []
        self._go: Callable[[], Work] | None = None  # begins the sum that is expected
        self._pending: Work | None = None
        self._landed = self._is_lost = False  # lost: the backward that failed had sent others
        self._counts = False  # total is a sum that has not been stepped
        self._stepped = False  # gradients of the shards are of a step that is over
        self._before: Tensor | None = None  # the total, while its memory is used otherwise

    @property
    def launched(self) -> bool:
        return self._pending is not None

    def launch(self) -> None:
        self._without = self.gradients.complete()
        if self.before is not None:
            self.before.land()
        self.expect()
        if self._posts_ahead:
            for carrier in self.next:
                carrier.expect()
        assert self._go is not None
        self._pending, self._go = self._go(), None
        self.gradients.release()
        self._flags.leave(self._first_flag, self._without)
        self.left()

    def expect(self) -> None:
        """Be ready for what others send of this bucket."""
        if self._go is None:
            line, flat = self.line, self.gradients.flat
            self.gradients.have_memory()
            self._go = prepost_reduce_scatter_v(flat, line.bounds, line.group, wire=self._wire)

    def land(self) -> None:
        """Wait for the sum over the group; if there are replicas, begin that over them."""
        if self._pending is None or self._landed:
            return
        self._pending.wait()
        self._landed = True
        if self._replicas is not None:
            self._pending = start_all_reduce(self._slice, self._replicas)
        else:
            self._add_up()

    def wait(self) -> None:
        self.land()
        if self._replicas is not None:
            assert self._pending is not None
            self._pending.wait()
            self._add_up()
            self._flags.land()
        self._pending, self._landed = None, False
        for carrier in self.next[: self._copies.ahead]:
            carrier.land()
        for shard, view in zip(self.shards, self._views, strict=True):
            if shard.place not in self._without or self._flags.used(self._first_flag + shard.place):
                shard.tensor.grad = view
            elif self._stepped:
                shard.tensor.grad = None
        self._stepped = False
        self.settled()

    def abandon(self) -> None:
        self.gradients.undivide()
        if self._pending is not None:
            self._pending.wait()
            self._pending, self._landed, self._is_lost = None, False, True
        self.wait_offloaded()
        if self._is_lost:  # and with it what has not left: ranks keep all sums or none
            self.drop()
            self._is_lost = False
            for carrier in self.next:
                carrier._is_lost = True
        self._flags.forget()

    def wait_offloaded(self) -> None:
        """Until the host may read the sum, and write it."""
        self._copies.wait(self.total)

    def stepped(self) -> None:
        """The optimizer has used the gradients."""
        self._counts, self._stepped = False, True

    def drop(self) -> None:
        """Forget all gradients, of the shards and of the parameters."""
        for shard in self.shards:
            shard.tensor.grad = None
        if not self.gradients.empty:
            self.gradients.release()
            if self._go is None:
                self.gradients.free()
        self._counts, self._before = False, None

    def zero(self) -> None:
        """Set all gradients to zero that there are."""
        self.wait_offloaded()
        for shard in self.shards:
            if shard.tensor.grad is not None:
                shard.tensor.grad.zero_()
        if not self.gradients.empty:
            self.gradients.zero()
        self._stepped, self._before = False, None

    def _begin(self) -> None:
        """A gradient is about to come in."""
        if self._apart:
            self._copies.free(self.total)
        elif self._counts:
            self._begin_anew(self.total)
            self._before = self.total.clone()

    def _begin_anew(self, total: Tensor) -> None:
        """Where the user threw away what there was, by `.grad = None` of a shard.

        total: `self.total`, or a copy; parameters, which may be absent, are not asked.
        """
        by = total.storage_offset() - self.total.storage_offset()
        for shard, v in zip(self.shards, self._views, strict=True):
            if shard.tensor.grad is None:
                total.as_strided(v.shape, v.stride(), v.storage_offset() + by).zero_()

    def _add_up(self) -> None:
        if self._before is not None:
            self._slice.add_(self._before)
            self._before = None
        elif self._apart and self._counts:
            total = self._copies.here(self.total)
            self._begin_anew(total)
            total.add_(self._slice.to(total.dtype))
            self._copies.offload(self.total, total)
        elif self._apart:
            self._copies.offload(self.total, self._slice)
        self.gradients.free()
        self._counts = True


def line_up(carriers: Sequence[ReduceScatterBucket], *, saves_memory: bool) -> None:
    """Set, of carriers in the order in which they leave, what is expected and waited for."""
    for i, carrier in enumerate(carriers):
        carrier.next = carriers[i + 1 :][: UNDER_WAY if saves_memory else EXPECTED]
        if saves_memory and i >= UNDER_WAY:
            carrier.before = carriers[i - UNDER_WAY]


class GradBuffer(GradBucket):
    """This rank's own gradients of one bucket, on the `line` that the parameters are on.

    freed: give the memory back while it is empty. begins: called before the first gradient.
    """

    def __init__(self, line: FlatLayout, freed: bool, begins: Callable[[], object]):
        divide = line.members[0].divide
        super().__init__(line.members, line.offsets, line.num_elements, divide=divide)
        self._freed, self._at_first = freed, begins
        self.empty = True

    def allocate(self) -> None:
        if self.empty:
            self.empty = False
            self._at_first()
            self.have_memory()

    def have_memory(self) -> None:
        """What lies between members stays as it is: its sum is not read."""
        if self._freed:
            self.flat.untyped_storage().resize_(self._num_bytes)

    def release(self) -> None:
        """They have left: no `.grad` shows the memory any more."""
        for shared in self.members:
            shared.parameter.grad = None
        self._divided.clear()
        self.empty = True

    def free(self) -> None:
        """The sum has been made, so the memory may go."""
        if self._freed:
            self.flat.untyped_storage().resize_(0)

    def zero(self) -> None:
        """Set to zero what is here."""
        for shared, view in zip(self.members, self.views, strict=True):
            if shared.parameter.grad is view:
                view.zero_()


class UsedFlags:
    """Which parameters some rank used in a backward, of all buckets over one group.

    One small sum after the last bucket, which a rank reads only where it left something unused
    itself, once for all, so that the usual step does not wait for it.
    """

    def __init__(self, group: Group, replicas: Group | None, device: torch.device):
        self._group, self.replicas, self._device = group, replicas, device
        self._num_flags = self._num_buckets = self._num_left = 0
        self._without: list[int] = []  # of the buckets that have left
        self._flags: torch.Tensor | None = None
        self._pending: Work | None = None
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
        self._without += [first + place for place in without]
        self._num_left -= 1
        if self._num_left == 0:
            self._num_left, self._num_sums, self._read = self._num_buckets, 1, None
            self._pending = start_all_reduce(self._mine(), self._group)

    def land(self) -> None:
        """If flags go on to replicas, let them; every rank calls it before it settles."""
        if self.replicas is not None and self._num_sums == 1 and self._pending is not None:
            self._num_sums = 2
            self._pending = start_all_reduce(self._pending.wait(), self.replicas)

    def used(self, flag: int) -> bool:
        """Whether some rank had a gradient; the first to ask waits for the device, for all."""
        assert self._pending is not None
        if self._read is None:
            self._read = self._pending.wait().tolist()
        return self._read[flag] != 0

    def forget(self) -> None:
        """The backward failed: let what has left arrive, and begin anew."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self._without.clear()
        self._num_left = self._num_buckets

    def _mine(self) -> torch.Tensor:
        """My flags, on the device without a wait of the host."""
        if self._pending is not None:
            self._pending.wait()  # last step's, in the same memory
        if self._flags is None:
            self._flags = torch.empty(self._num_flags, dtype=torch.int32, device=self._device)
        set_used_flags(self._flags, self._without)
        self._without.clear()
        return self._flags

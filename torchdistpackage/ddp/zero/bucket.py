"""The buckets of a ZeroOptimizer, and an optimizer's step a few buckets at a time.

During a step the optimizer sees its own groups with some of their parameters. So options that a
scheduler changed, and the state of each parameter, are in their usual places.

A call costs the host 0.1 to 0.4 ms. If the host only issues a device's work, a thousand buckets
must not become a thousand calls. But the first call must not wait for the last sum, nor the first
gather for the last call. So while sums arrive each call takes half of the remaining buckets, and
while parameters are sent each call takes as many as were done before.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchdistpackage.comm.groups import for_each_group
from torchdistpackage.comm.primitives import ranks_of
from torchdistpackage.ddp.bucket_plan import Bucket
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.sharded import ParamPartition, ParamShard
from torchdistpackage.ddp.zero.grad_buffer import ReduceScatterBucket, UsedFlags
from torchdistpackage.ddp.zero.options import ZeroOptions
from torchdistpackage.ddp.zero.param_buffer import MasterStore, Need, ParamBuffer
from torchdistpackage.ddp.zero.param_shard import (
    FlatLayout,
    make_shards,
    shard_by_owner,
    shard_evenly,
)
from torchdistpackage.ddp.zero.sharing import ReplicaGroups, parameters_of
from torchdistpackage.layout.mark import layout_of
from torchdistpackage.layout.partition import greedy_partition

MakeStore = Callable[[torch.device], MasterStore]

AT_ONCE_BYTES = 128 * 2**20
"""Most bytes of parameters in one call, because a `foreach` step copies all its arguments."""


@dataclass(frozen=True)
class ShardedBucket:
    """One bucket: its parameters, its gradients, and the shards that this rank owns.

    is_whole: each member has one owner. is_rounded: parameters have fewer digits than their
    masters. gathers: parameters are gathered only where they are used (stage 3).
    """

    layout: FlatLayout
    parameters: ParamBuffer
    bucket_comm: ReduceScatterBucket
    shards: list[ParamShard]
    is_whole: bool
    is_rounded: bool
    gathers: bool

    def wait(self) -> None:
        """Wait until the host may read the summed gradients and write the parameters it steps."""
        # both waits do nothing unless gradients and masters are offloaded to the host's memory
        self.bucket_comm.wait_offloaded()
        self.parameters.wait()

    def partitions(self) -> list[ParamPartition]:
        """Return the partition of each member: which rank owns which elements."""
        layout, own_tensors = self.layout, {shard.member: shard.tensor for shard in self.shards}
        kind = self.is_whole, self.is_rounded
        return [
            ParamPartition(spec, layout.bounds_of(member), own_tensors.get(member), *kind)
            for member, spec in enumerate(layout.members)
        ]


@dataclass
class BucketSharder:
    """A maker of the buckets of one optimizer.

    on_read: as in ParamBuffer.
    owner_of: name -> index in its group, if each parameter has one owner.
    make_store: creates the store for copies of a device's slices, if they are kept elsewhere.
    """

    options: ZeroOptions
    sharing: ReplicaGroups
    on_read: Need
    owner_of: Mapping[str, int] | None
    make_store: MakeStore | None
    _flags: dict[object, UsedFlags] = field(default_factory=dict)
    _stores: dict[torch.device, MasterStore] = field(default_factory=dict)

    @contextmanager
    def stepping(self, buckets: Sequence[ShardedBucket], numbers: Sequence[int]) -> Iterator[None]:
        """Surround a call that steps the buckets with these numbers."""
        # an optimizer on the host reads the memory at once, and does not know the copies' stream
        for b in numbers:
            buckets[b].wait()
        with ExitStack() as around:
            for store in self._stores.values():
                around.enter_context(store.stepping())
            yield
        for b in numbers:
            buckets[b].bucket_comm.stepped()

    def cut(self, bucket: Bucket, members: Sequence[ParamSpec]) -> ShardedBucket:
        """Create one bucket, with its parameters cut into shards."""
        options, first, is_whole = self.options, members[0], self.owner_of is not None
        replicas, itemsize = first.replicas, options.narrowest_bytes(first)
        if self.owner_of is not None:
            layout = shard_by_owner(members, self.owner_of, itemsize)
        else:
            layout = shard_evenly(bucket, members, itemsize)
        device = first.parameter.device
        if self.make_store is not None and device not in self._stores:
            self._stores[device] = self.make_store(device)
        store = self._stores.get(device)
        parameters = ParamBuffer(layout, options, replicas, store, self.on_read)
        shards = make_shards(layout, parameters.values, self.sharing.layouts, is_whole)
        others = () if replicas is None else ranks_of(replicas)
        key = ranks_of(first.group), others, first.deferred, device
        if key not in self._flags:
            self._flags[key] = UsedFlags(first.group, replicas, device)
        bucket_comm = ReduceScatterBucket(layout, options, shards, self._flags[key], store)
        kind = is_whole, options.is_rounded(first), options.gathers(first)
        return ShardedBucket(layout, parameters, bucket_comm, shards, *kind)


def whole_owners(specs: Iterable[ParamSpec]) -> dict[str, int]:
    """Return name -> index of the rank in its group that owns the full parameter, assigned by size.

    The size is that over all ranks of the model, so all of them give a parameter to the same index,
    whatever shard of it they hold.
    """
    owner_of: dict[str, int] = {}
    for group, members in for_each_group(specs):
        shares = greedy_partition([_full_size(s.parameter) for s in members], group.size())
        owner_of |= {members[i].name: owner for owner, share in enumerate(shares) for i in share}
    return owner_of


def _full_size(parameter: Tensor) -> int:
    layout = layout_of(parameter)
    return parameter.numel() if layout is None else math.prod(layout.shape)


def held_by_group(
    optimizer: Optimizer,
    buckets: Sequence[ShardedBucket],
    alone: Iterable[ParamShard],
    sharing: ReplicaGroups,
) -> list[list[ParamPartition]]:
    """Return the partition of each parameter, in the user's groups; no rank owns frozen ones.

    alone: parameters that are in no bucket.
    """
    partitions = {
        id(partition.spec.parameter): partition
        for bucket in buckets
        for partition in bucket.partitions()
    }
    for shard in alone:
        bounds, own_tensor = (shard.start, shard.stop), shard.tensor
        partitions[id(own_tensor)] = ParamPartition(shard.spec, bounds, own_tensor, shard.whole)
    for p in parameters_of(optimizer):
        if id(p) not in partitions:
            spec = sharing.of(p)
            partitions[id(p)] = ParamPartition(spec, (0,) * (spec.group.size() + 1), None)
    return [[partitions[id(p)] for p in group["params"]] for group in optimizer.param_groups]


class PartialStep:
    """A step of `inner` in parts, each with some of its parameters.

    Parameters in no part wait for no sum (`step_rest`).

    one_by_one: step each part in a call of its own, because the host waits for sums or computes.
    around: a context for each call, which gets the numbers of its parts.
    """

    def __init__(
        self,
        inner: Optimizer,
        parts: Sequence[Sequence[Tensor]],
        *,
        one_by_one: bool,
        around: Callable[[Sequence[int]], AbstractContextManager[object]] = nullcontext,
    ):
        self._inner, self._around = inner, around
        self._at_once_bytes = 0 if one_by_one else AT_ONCE_BYTES
        self._num_bytes = [sum(p.nbytes for p in members) for members in parts]
        self._landed: list[int] = []
        self._num_left = len(parts)
        part_of = {id(p): part for part, members in enumerate(parts) for p in members}
        self._parts: list[dict[int, list[Tensor]]] = [{} for _ in parts]
        self._rest: dict[int, list[Tensor]] = {}
        for number, group in enumerate(inner.param_groups):
            for p in group["params"]:
                part = part_of.get(id(p))
                by_group = self._rest if part is None else self._parts[part]
                by_group.setdefault(number, []).append(p)

    @contextmanager
    def once(self) -> Iterator[None]:
        """Run users' step hooks once around the block, in which all parts are stepped."""
        inner = self._inner
        pre_hooks, post_hooks = inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks
        for hook in pre_hooks.values():
            hook(inner, (), {})
        inner._optimizer_step_pre_hooks = OrderedDict()
        inner._optimizer_step_post_hooks = OrderedDict()
        self._landed, self._num_left = [], len(self._parts)
        try:
            yield
        finally:
            inner._optimizer_step_pre_hooks = pre_hooks
            inner._optimizer_step_post_hooks = post_hooks
        for hook in post_hooks.values():
            hook(inner, (), {})

    def landed(self, part: int) -> None:
        """Step `part`, whose gradients have arrived, or delay it until more parts have arrived."""
        self._landed.append(part)
        if self._is_enough(self._landed, -(-self._num_left // 2)):
            ready, self._landed = self._landed, []
            self._num_left -= len(ready)
            self.step(ready)

    def in_turn(self, parts: Iterable[int]) -> Iterator[int]:
        """Step `parts`, whose gradients have all arrived, in this order; yield each once
        stepped.
        """
        batch: list[int] = []
        num_done, parts = 0, list(parts)
        for part in parts:
            batch.append(part)
            if part == parts[-1] or self._is_enough(batch, num_done):
                self.step(batch)
                yield from batch
                num_done += len(batch)
                batch = []

    def all_at_once(self) -> None:
        """Step everything in one call, for a class that computes across parameters."""
        with self._around(range(len(self._parts))):
            self._inner.step()

    def step_rest(self) -> None:
        """Step the parameters that are in no part."""
        if self._rest:
            self._step_only(self._rest)

    def step(self, parts: Sequence[int]) -> None:
        """Step the parameters of `parts` that have gradients, in one call."""
        by_group: dict[int, list[Tensor]] = {}
        for part in parts:
            for number, params in self._parts[part].items():
                by_group[number] = by_group[number] + params if number in by_group else params
        with self._around(parts):
            if by_group:
                self._step_only(by_group)

    def _step_only(self, by_group: Mapping[int, list[Tensor]]) -> None:
        """Step these parameters, given by the number of their group."""
        inner, groups = self._inner, self._inner.param_groups
        all_params = {number: groups[number]["params"] for number in by_group}
        inner.param_groups = [groups[number] for number in by_group]
        try:
            for number, params in by_group.items():
                groups[number]["params"] = params
            inner.step()
        finally:
            inner.param_groups = groups
            for number, params in all_params.items():
                groups[number]["params"] = params

    def _is_enough(self, parts: Sequence[int], num_parts: int) -> bool:
        """Return whether these parts are worth a call."""
        if len(parts) >= num_parts:
            return True
        return sum(self._num_bytes[part] for part in parts) >= self._at_once_bytes

"""The buckets of a ZeroOptimizer, and an optimizer's step a few of them at a time.

What the optimizer sees while it steps are its own groups with a part of their parameters, so
options that a scheduler changed, and per-parameter state, are where they always are.

A call costs the host 0.1 to 0.4 ms, so where the host only issues what a device does, a thousand
buckets must not be a thousand calls; yet the first call must not wait for the last sum, nor the
first gather for the last call. So calls halve what is left while sums come in, and double what is
done while parameters go out.
"""

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
from torchdistpackage.layout.partition import greedy_partition

MakeStore = Callable[[torch.device], MasterStore]

AT_ONCE_BYTES = 128 * 2**20
"""Bytes of parameters that may wait for a call: a step by `foreach` copies all it is given."""


@dataclass(frozen=True)
class ShardedBucket:
    """Its parameters, its gradients, and what of them this rank owns.

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
        """Wait until the host may read the sum and write what is stepped, where it keeps them."""
        self.bucket_comm.wait_offloaded()
        self.parameters.wait()

    def partitions(self) -> list[ParamPartition]:
        """For each member, who owns what of it."""
        layout, mine = self.layout, {shard.member: shard.tensor for shard in self.shards}
        kind = self.is_whole, self.is_rounded
        return [
            ParamPartition(spec, layout.bounds_of(member), mine.get(member), *kind)
            for member, spec in enumerate(layout.members)
        ]


@dataclass
class BucketSharder:
    """Makes the buckets of one optimizer.

    on_read: as ParamBuffer has it.
    owner_of: name -> index in its group, where each parameter has one owner. make_store: for copies
    of slices of a device, if they are elsewhere.
    """

    options: ZeroOptions
    sharing: ReplicaGroups
    on_read: Need
    owner_of: Mapping[str, int] | None
    make_store: MakeStore | None
    _flags: dict[object, UsedFlags] = field(default_factory=dict)
    _stores: dict[torch.device, MasterStore] = field(default_factory=dict)

    @contextmanager
    def stepping(self, buckets: Sequence[ShardedBucket], some: Sequence[int]) -> Iterator[None]:
        """Around a call that steps those of these numbers."""
        for b in some:
            buckets[b].wait()
        with ExitStack() as around:
            for store in self._stores.values():
                around.enter_context(store.stepping())
            yield
        for b in some:
            buckets[b].bucket_comm.stepped()

    def cut(self, bucket: Bucket, members: Sequence[ParamSpec]) -> ShardedBucket:
        options, first, is_whole = self.options, members[0], self.owner_of is not None
        replicas, itemsize = self.sharing.replicas_of(first), options.narrowest_bytes(first)
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
        key = ranks_of(first.group), first.deferred, device
        if key not in self._flags:
            self._flags[key] = UsedFlags(first.group, replicas, device)
        bucket_comm = ReduceScatterBucket(layout, options, shards, self._flags[key], store)
        kind = is_whole, options.is_rounded(first), options.gathers(first)
        return ShardedBucket(layout, parameters, bucket_comm, shards, *kind)


def whole_owners(specs: Iterable[ParamSpec]) -> dict[str, int]:
    """name -> index in its group of the rank that owns it all; each owns about as much."""
    owner_of: dict[str, int] = {}
    for group, members in for_each_group(specs):
        shares = greedy_partition([s.parameter.numel() for s in members], group.size())
        owner_of |= {members[i].name: owner for owner, some in enumerate(shares) for i in some}
    return owner_of


def held_by_group(
    optimizer: Optimizer,
    buckets: Sequence[ShardedBucket],
    alone: Iterable[ParamShard],
    sharing: ReplicaGroups,
) -> list[list[ParamPartition]]:
    """Of each parameter of the user's groups, in their order; no rank owns what is frozen.

    alone: parameters that are in no bucket.
    """
    partitions = {id(h.spec.parameter): h for bucket in buckets for h in bucket.partitions()}
    for shard in alone:
        bounds, mine = (shard.start, shard.stop), shard.tensor
        partitions[id(mine)] = ParamPartition(shard.spec, bounds, mine, shard.whole)
    for p in parameters_of(optimizer):
        if id(p) not in partitions:
            spec = sharing.of(p)
            partitions[id(p)] = ParamPartition(spec, (0,) * (spec.group.size() + 1), None)
    return [[partitions[id(p)] for p in group["params"]] for group in optimizer.param_groups]


class PartialStep:
    """Steps `inner` by parts, each some of its parameters.

    one_by_one: each in a call of its own, where the host itself waits for sums, or steps. around:
    each call, given its parts. What is in no part waits for nobody (`step_rest`).
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
                of = self._rest if part is None else self._parts[part]
                of.setdefault(number, []).append(p)

    @contextmanager
    def once(self) -> Iterator[None]:
        """All parts are stepped inside: hooks that users put on the step run once, around them."""
        inner = self._inner
        before, after = inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks
        for hook in before.values():
            hook(inner, (), {})
        inner._optimizer_step_pre_hooks = OrderedDict()
        inner._optimizer_step_post_hooks = OrderedDict()
        self._landed, self._num_left = [], len(self._parts)
        try:
            yield
        finally:
            inner._optimizer_step_pre_hooks = before
            inner._optimizer_step_post_hooks = after
        for hook in after.values():
            hook(inner, (), {})

    def landed(self, part: int) -> None:
        """The gradients of `part` are there: step it, or let it wait for more."""
        self._landed.append(part)
        if self._is_enough(self._landed, -(-self._num_left // 2)):
            some, self._landed = self._landed, []
            self._num_left -= len(some)
            self.step(some)

    def in_turn(self, parts: Iterable[int]) -> Iterator[int]:
        """Step `parts`, all of which are there, in this order; each comes back once it is."""
        some: list[int] = []
        num_done, parts = 0, list(parts)
        for part in parts:
            some.append(part)
            if part == parts[-1] or self._is_enough(some, num_done):
                self.step(some)
                yield from some
                num_done += len(some)
                some = []

    def all_at_once(self) -> None:
        """Of what a class does across parameters no part may be left out."""
        with self._around(range(len(self._parts))):
            self._inner.step()

    def step_rest(self) -> None:
        """Step what is in no part."""
        if self._rest:
            self._step_only(self._rest)

    def step(self, parts: Sequence[int]) -> None:
        """Step the parameters of `parts` that have gradients, in one call."""
        some: dict[int, list[Tensor]] = {}
        for part in parts:
            for number, params in self._parts[part].items():
                some[number] = some[number] + params if number in some else params
        with self._around(parts):
            if some:
                self._step_only(some)

    def _step_only(self, some: Mapping[int, list[Tensor]]) -> None:
        """Step these of the groups of these numbers."""
        inner, groups = self._inner, self._inner.param_groups
        whole = {number: groups[number]["params"] for number in some}
        inner.param_groups = [groups[number] for number in some]
        try:
            for number, params in some.items():
                groups[number]["params"] = params
            inner.step()
        finally:
            inner.param_groups = groups
            for number, params in whole.items():
                groups[number]["params"] = params

    def _is_enough(self, parts: Sequence[int], num_parts: int) -> bool:
        if len(parts) >= num_parts:
            return True
        return sum(self._num_bytes[part] for part in parts) >= self._at_once_bytes

"""One bucket of ZeRO: its line, its parameters, the carrier of its gradients, my shards of both."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from torchdistpackage.comm.primitives import ranks_of
from torchdistpackage.ddp.bucket_plan import Bucket
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.zero.grad_buffer import ReduceScatterBucket, UsedFlags
from torchdistpackage.ddp.zero.offload import MasterStore
from torchdistpackage.ddp.zero.param_buffer import Need, ParamBuffer
from torchdistpackage.ddp.zero.param_shard import (
    FlatLayout,
    ParamPartition,
    ParamShard,
    make_shards,
    shard_by_owner,
    shard_evenly,
)
from torchdistpackage.ddp.zero.replication import ReplicaGroups
from torchdistpackage.layout.partition import greedy_partition


@dataclass(frozen=True)
class ShardedBucket:
    """A bucket, cut.

    is_whole: between members. is_rounded: parameters have fewer digits than their masters.
    passes: parameters are whole only where they are used, as stage 3 has it.
    """

    line: FlatLayout
    parameters: ParamBuffer
    carrier: ReduceScatterBucket
    shards: list[ParamShard]
    is_whole: bool
    is_rounded: bool
    passes: bool

    def wait(self) -> None:
        """Until the host may read the sum and write what is stepped, where it keeps them."""
        self.carrier.wait_offloaded()
        self.parameters.wait()

    def held(self) -> list[ParamPartition]:
        """For each member, who owns what of it."""
        mine = {shard.place: shard.tensor for shard in self.shards}
        return [
            ParamPartition(
                shared,
                self.line.bounds_of(place),
                mine.get(place),
                whole=self.is_whole,
                master=self.is_rounded,
            )
            for place, shared in enumerate(self.line.members)
        ]


@dataclass
class BucketSharder:
    """Makes the buckets of one optimizer.

    stage, wire, master_dtype: as ZeroOptimizer has them. offload: makes what keeps copies of slices
    of a device elsewhere.
    on_read: what is told when a freed parameter is read, as Parameters has it.
    owner_of: name -> index in its group, where each parameter has one owner.
    """

    stage: int
    sharing: ReplicaGroups
    wire: torch.dtype | None
    master_dtype: torch.dtype | None
    on_read: Need
    owner_of: Mapping[str, int] | None
    offload: Callable[[torch.device], MasterStore] | None
    _marks: dict[object, UsedFlags] = field(default_factory=dict)
    _copies: dict[torch.device, MasterStore] = field(default_factory=dict)

    @contextmanager
    def stepping(self, buckets: Sequence[ShardedBucket], some: Sequence[int]) -> Iterator[None]:
        """Around a call that steps those of these numbers."""
        buckets = [buckets[b] for b in some]
        for bucket in buckets:
            bucket.wait()
        with ExitStack() as around:
            for copies in self._copies.values():
                around.enter_context(copies.stepping())
            yield
        for bucket in buckets:
            bucket.carrier.stepped()

    def cut(self, bucket: Bucket, members: Sequence[ParamSpec]) -> ShardedBucket:
        is_whole = self.owner_of is not None
        if self.owner_of is not None:
            line = shard_by_owner(members, self.owner_of, self.wire)
        else:
            line = shard_evenly(bucket, members, self.wire)
        first = members[0]
        dtype, replicas = first.parameter.dtype, self.sharing.replicas_of(first)
        wire = self.wire if _is_narrower(self.wire, dtype) else None
        # fp32 where gradients are added up in it, unless told otherwise
        wide = dtype if first.sum_dtype == dtype else self.master_dtype or first.sum_dtype
        device = first.parameter.device
        copies = None
        if self.offload is not None:
            if device not in self._copies:
                self._copies[device] = self.offload(device)
            copies = self._copies[device]
        is_rounded = wide != dtype or wire is not None
        # stages that hold one weight are not in the same places at the same time, so a gather amid
        # the forward of one would wait for the other's
        passes = self.stage == 3 and not first.deferred
        parameters = ParamBuffer(
            line,
            replicas=replicas,
            master=wide if is_rounded or passes or copies else None,
            copies=copies,
            wire=wire,
            on_read=self.on_read if passes else None,
        )
        shards = make_shards(line, parameters.values, self.sharing.layouts, is_whole)
        key = ranks_of(first.group), first.deferred, device
        if key not in self._marks:
            self._marks[key] = UsedFlags(first.group, replicas, device)
        carrier = ReduceScatterBucket(
            line,
            shards,
            self._marks[key],
            dtype=wide,
            freed=self.stage > 1,
            copies=copies,
            wire=self.wire if _is_narrower(self.wire, first.sum_dtype) else None,
        )
        return ShardedBucket(line, parameters, carrier, shards, is_whole, is_rounded, passes)


def whole_owners(shared: Iterable[ParamSpec]) -> dict[str, int]:
    """name -> index in its group of the rank that owns it all; each owns about as much."""
    by_group: dict[tuple[int, ...], list[ParamSpec]] = {}
    for s in shared:
        by_group.setdefault(ranks_of(s.group), []).append(s)
    owner_of: dict[str, int] = {}
    for members in by_group.values():
        sizes = [s.parameter.numel() for s in members]
        shares = greedy_partition(sizes, members[0].group.size())
        owner_of |= {members[i].name: owner for owner, some in enumerate(shares) for i in some}
    return owner_of


def held_by_group(
    param_groups: Sequence[Mapping[str, Sequence[nn.Parameter]]],
    buckets: Sequence[ShardedBucket],
    sharing: ReplicaGroups,
    names: Mapping[int, str],
) -> list[list[ParamPartition]]:
    """Of each parameter of the user's groups, in his order; nobody owns what is frozen."""
    held = {id(h.shared.parameter): h for bucket in buckets for h in bucket.held()}
    for p in (p for group in param_groups for p in group["params"]):
        if id(p) not in held:
            shared = sharing.of(names[id(p)], p)
            held[id(p)] = ParamPartition(shared, (0,) * (shared.group.size() + 1), None)
    return [[held[id(p)] for p in group["params"]] for group in param_groups]


def _is_narrower(wire: torch.dtype | None, dtype: torch.dtype) -> bool:
    return wire is not None and dtype.is_floating_point and wire.itemsize < dtype.itemsize

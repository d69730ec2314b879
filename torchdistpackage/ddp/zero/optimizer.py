"""ZeRO: each rank holds, and steps, its part of the optimizer (Rajbhandari et al., 2019).

Source: arXiv:1910.02054. One rule: a sum and a gather cost what an all-reduce does, so the link
that data parallelism leaves idle during the forward carries half of it. A bucket's gradients are
summed to their owners while the backward runs (grad_buffer.py); `step` steps each bucket as its sum
lands and sends the parameters back, which arrive during the next forward, where each read of one
waits for it (param_buffer.py).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from weakref import WeakMethod

import torch
from torch import nn
from torch.optim import Optimizer

from torchdistpackage.comm.companions import make_duplex_groups
from torchdistpackage.comm.creation import world
from torchdistpackage.comm.primitives import Group, is_queued
from torchdistpackage.ddp.bucket_plan import MIB, Bucket, bucket_sizes
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.weak_hook import WeakHook, hooked
from torchdistpackage.ddp.zero.bucket import (
    BucketSharder,
    ShardedBucket,
    held_by_group,
    whole_owners,
)
from torchdistpackage.ddp.zero.grad_buffer import ReduceScatterBucket, line_up
from torchdistpackage.ddp.zero.guards import ParamGuards, refuse_owned
from torchdistpackage.ddp.zero.offload import Offload, check_offload
from torchdistpackage.ddp.zero.param_buffer import ParamBuffer
from torchdistpackage.ddp.zero.param_shard import ParamShard
from torchdistpackage.ddp.zero.partial_step import PartialStep
from torchdistpackage.ddp.zero.replication import ReplicaGroups, assign_buckets, named_in, names_of
from torchdistpackage.ddp.zero.requires_whole import requires_whole_params
from torchdistpackage.ddp.zero.rows import TiedEmbeddings, searched
from torchdistpackage.ddp.zero.stage3 import ParamCoordinator, gather_ahead, may_overlap
from torchdistpackage.ddp.zero.state_dict import ShardedOptimizerBase
from torchdistpackage.layout.layout import Layout

UNLIMITED_BYTES = 2**62
"""Buckets are filled by module (shard_bounds.group_by_module), not by the reducer."""


class ZeroOptimizer(ShardedOptimizerBase):
    """Shard `optimizer` over the ranks that hold the same parameters; train as without.

    optimizer: any class of torch.optim, or yours, built over parameters of `module`, param groups
        and all. Its groups become ours, holding pieces of parameters.
    module: not wrapped; its forward is watched. None: nothing is summed before `step`.
    stage: 1 shards the optimizer's state, 2 gradients too, 3 parameters too.
    group: ranks that share; default tpc's data (and context) ranks, or everybody where tpc is not
        set up. replicas: ranks that hold the same shard, so that a node can be a `group` and the
        same place on all nodes `replicas`.
    layouts: name -> Layout, by default the layers' own, as in NaiveDDP: who shares what.
    overlap: send under backward and forward; False waits at the end of the backward and of `step`.
    bucket_cap_mb: MiB of gradients that travel together; default 4, over NCCL 32.
    wire_dtype: dtype in which gradients and parameters travel, torch.bfloat16 for example; sums and
        the optimizer's own copy of the parameters stay wide.
    offload: keep the optimizer's copy, its state and what it steps in host memory, and step there.
    num_grad_acc_iter: stage 1 sums in every so manieth backward only, the pipeline's number of
        microbatches for example; stages 2 and 3, which have no room for whole gradients, in each.
    reduce_op: "avg", or "sum".
    reshard_after_forward: in stage 3, free parameters between forward and backward as well; all
        ranks then run the same submodules.
    whole: whether each parameter has one owner, for an optimizer that looks at whole ones; by
        default so for all classes that are not known to be element-wise.
    master_dtype: of the optimizer's copy of bf16 and fp16 parameters; torch.bfloat16: no copy.
    embedding_rows: of an `nn.Embedding` in fp32 whose weight a head shares, gradients of the head
        leave at the start of the backward, and those of lookups at its end, as rows, where these
        are few; needs `module`, and no `replicas`. Such a lookup cannot be differentiated twice.

    A parameter's `.grad` is None once its gradient has left. `reducer.finish()` waits for the
    sums, then in the `.grad` of what param_groups hold; `step` does so by itself, and uses them up.

    Raises:
        LayoutError: the optimizer cannot work on a part of the parameters.
        ValueError: `stage` or `reduce_op` is none of those above; `embedding_rows` cannot be had.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module | None = None,
        *,
        stage: int = 1,
        group: Group | None = None,
        layouts: Mapping[str, Layout] | None = None,
        overlap: bool = True,
        bucket_cap_mb: float | None = None,
        wire_dtype: torch.dtype | None = None,
        offload: bool = False,
        replicas: Group | None = None,
        num_grad_acc_iter: int = 1,
        reduce_op: str = "avg",
        reshard_after_forward: bool = False,
        whole: bool | None = None,
        master_dtype: torch.dtype | None = None,
        embedding_rows: bool = False,
    ):
        if stage not in (1, 2, 3):
            raise ValueError(f"stage is {stage}; use 1, 2 or 3")
        if reduce_op.lower() not in ("avg", "sum"):
            raise ValueError(f"reduce_op is {reduce_op!r}; use 'avg' or 'sum'")
        self.stage, self._module = stage, module
        self._overlap = overlap and may_overlap(module, stage)
        if offload:
            check_offload(optimizer)
        names = names_of(optimizer, module)
        named, mean = named_in(optimizer, module, names), reduce_op.lower() == "avg"
        sharing = ReplicaGroups.over(group, replicas, module, named, layouts, mean)
        shared = sharing.trained(optimizer, module, names)
        refuse_owned(shared)
        split = [s.name for s in shared if sharing.is_split(s.name)]
        owner_of = whole_owners(shared) if requires_whole_params(optimizer, whole, split) else None
        copies = Offload if offload else None
        self._cutter = BucketSharder(
            stage, sharing, wire_dtype, master_dtype, WeakMethod(self._on_read), owner_of, copies
        )
        self._buckets: list[ShardedBucket] = []
        self._coordinator: ParamCoordinator | None = None
        self._in_step = self._lands_in_step = False
        if module is not None:
            sharing.sync_params(module, {id(s.parameter) for s in shared})
        make_duplex_groups(s.group for s in shared)
        looks = searched(module, replicas) if embedding_rows else None
        is_queue = is_queued(world())
        default_bytes = bucket_sizes(queued=is_queue).default_bytes
        self._heads = TiedEmbeddings(looks, shared, WeakHook(self._reduces))
        self.reducer = Reducer(
            assign_buckets(
                self._heads.coming(shared), int((bucket_cap_mb or 0) * MIB) or default_bytes
            ),
            cap_bytes=UNLIMITED_BYTES,
            num_backwards=num_grad_acc_iter if stage == 1 else 1,
            overlap=self._overlap,
            make_bucket_comm=WeakHook(self._make_bucket_comm),
            after=self._heads.after,
            exclusive=True,
        )
        line_up([bucket.carrier for bucket in self._buckets], saves_memory=stage > 1)
        super().__init__(
            optimizer, held_by_group(optimizer.param_groups, self._buckets, sharing, names)
        )
        self._stepping = PartialStep(
            optimizer,
            [[shard.tensor for shard in bucket.shards] for bucket in self._buckets],
            one_by_one=offload or not is_queue,
            around=partial(self._cutter.stepping, self._buckets),
        )
        lines = [(bucket.line, bucket.parameters.flat) for bucket in self._buckets]
        self._guards = ParamGuards(
            module, lines, (h.shared for members in self.held for h in members)
        )
        # what another class does across parameters it must do once
        self._by_bucket = type(optimizer).__module__.startswith("torch.optim.")
        self._order = self._heads.first(reversed(range(len(self._buckets))))
        if module is not None:
            handles = self._guards.handles
            handles += self._heads.handles
            handles += hooked(module, self._watch, self._before_state_dict, self._loaded)
            order = [self._buckets[b].parameters for b in self._order if self._buckets[b].passes]
            if order:
                self._coordinator = ParamCoordinator(module, order, keeps=not reshard_after_forward)
                handles += self._coordinator.handles
            handles += gather_ahead(module, may_follow=stage < 3 or not reshard_after_forward)

    # -- what callers use --------------------------------------------------------------

    @property
    def shards(self) -> list[ParamShard]:
        """What this rank owns, a piece of a parameter each."""
        return [shard for bucket in self._buckets for shard in bucket.shards]

    def step(self, closure: Callable[[], object] | None = None):
        """Wait for the sums, step what this rank owns, and begin to send the parameters around.

        closure: computes the loss and its gradients; its value is returned.

        Raises:
            LayoutError: a parameter that was frozen when this was made no longer is, or one is
                no longer what is stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._guards.check()
        with self._stepping.once():
            self._step()
        if not self._overlap:
            self.finish()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or set those to zero that there are."""
        if any(bucket.carrier.launched for bucket in self._buckets):
            self.reducer.finish()
        for bucket in self._buckets:
            (bucket.carrier.drop if set_to_none else bucket.carrier.zero)()

    def finish(self) -> None:
        """Wait until all parameters are whole and current on this rank.

        In stage 3 all ranks call it, and they stay whole until the next backward or step.
        """
        if self._coordinator is not None:
            self._coordinator.fetch_all()
        for bucket in self._buckets:
            bucket.parameters.arrive()

    def remove(self) -> None:
        """Leave the module as a plain one, whole and current; all ranks call it.

        Afterwards this has its state to save or load elsewhere, and can no longer step.
        """
        self._settle()
        self.finish()
        self.reducer.remove()
        self._guards.cut()
        self.forget()

    def refresh_masters(self) -> None:
        """Set the optimizer's copies to the parameters, after somebody wrote to these."""
        self.finish()
        for bucket in self._buckets:
            bucket.parameters.refresh()

    # -- one step ----------------------------------------------------------------------

    def _step(self) -> None:
        for bucket in reversed(self._buckets):
            if not bucket.passes:
                bucket.parameters.expect()
        self._lands_in_step, self._in_step = False, self._by_bucket
        try:
            self.reducer.finish()
        finally:
            self._in_step = False
        if not self._by_bucket:
            self._stepping.all_at_once()
        # what the forward reads first goes first, on all ranks alike, whoever had waited before
        order = sorted(self._order, key=lambda b: not self._goes_early(b))
        if self._by_bucket and not self._lands_in_step:
            order = self._stepping.in_turn(order)
        for b in order:
            if not (self._lands_in_step and self._goes_early(b)):
                self._send(b)
        if self._coordinator is not None:
            self._coordinator.stepped()

    def _send(self, bucket: int) -> None:
        if not self._buckets[bucket].passes:
            self._buckets[bucket].parameters.send()

    def _goes_early(self, bucket: int) -> bool:
        """While the last sum comes in and is stepped, the link has the bucket before it."""
        is_before_last = bucket == len(self._buckets) - 2
        return is_before_last and self._coordinator is None and not self._heads.buckets

    def _left(self, bucket: int) -> None:
        if self._coordinator is not None and self._buckets[bucket].passes:
            self._coordinator.release(self._buckets[bucket].parameters)

    def _settled(self, bucket: int) -> None:
        """The sums of a bucket are in its shards, in the order in which they were begun."""
        if not self._in_step:
            if not self._overlap or torch._C._current_graph_task_id() == -1:
                self._buckets[bucket].wait()  # the next backward, which adds to them, reads none
            return
        self._lands_in_step = True
        self._stepping.landed(bucket)
        if self._goes_early(bucket):
            self._send(bucket)

    # -- hooks -------------------------------------------------------------------------

    def _watch(self, module: nn.Module, args: object, outputs: object) -> object:
        return self.reducer.watch(outputs, wait=not self._overlap)

    def _before_state_dict(self, *args: object) -> None:
        self.finish()

    def _reduces(self) -> bool:
        return self.reducer.is_reducing

    def _on_read(self, parameters: ParamBuffer) -> None:
        if self._coordinator is not None:
            self._coordinator.on_read(parameters)

    def _loaded(self, module: nn.Module, incompatible: object) -> None:
        self._guards.check_objects()
        self.refresh_masters()

    def _settle(self) -> None:
        self.reducer.finish()
        for bucket in self._buckets:
            bucket.parameters.arrive()
            bucket.wait()

    # -- at the start ------------------------------------------------------------------

    def _make_bucket_comm(
        self, bucket: Bucket, members: Sequence[ParamSpec]
    ) -> ReduceScatterBucket:
        number, sharded = len(self._buckets), self._cutter.cut(bucket, members)
        sharded.carrier.left = partial(WeakHook(self._left), number)
        sharded.carrier.settled = partial(WeakHook(self._settled), number)
        self._buckets.append(sharded)
        self._heads.attach(number, sharded.carrier)
        return sharded.carrier

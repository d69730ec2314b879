"""ZeroOptimizer: each rank holds and steps its shard (Rajbhandari et al. 2019, arXiv:1910.02054).

A reduce-scatter and an all-gather together cost as much as an all-reduce. So the link, which plain
data parallelism leaves idle during the forward, carries half of the bytes then. During the backward
each bucket's gradients are summed to their owners (grad_buffer.py). `step` steps each bucket when
its sum arrives, and sends the parameters back. They arrive during the next forward, in which each
read of a parameter waits for it (param_buffer.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Unpack
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchdistpackage.comm.creation import world
from torchdistpackage.comm.groups import make_duplex_groups
from torchdistpackage.comm.primitives import is_queued
from torchdistpackage.ddp.bucket_comm import BucketComm, ReducerParts
from torchdistpackage.ddp.bucket_plan import MIB, Bucket, bucket_sizes
from torchdistpackage.ddp.grad_hooks import GradHooks, Removable
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.param_sync import sync_module_states
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.scheduled_ready import LastBackwardPolicy
from torchdistpackage.ddp.sharded import ParamShard
from torchdistpackage.ddp.weak_hook import WeakHook
from torchdistpackage.ddp.zero.bucket import (
    BucketSharder,
    PartialStep,
    ShardedBucket,
    held_by_group,
    whole_owners,
)
from torchdistpackage.ddp.zero.grad_buffer import line_up
from torchdistpackage.ddp.zero.guards import ParamGuards, refuse_others
from torchdistpackage.ddp.zero.offload import Offload, check_offload
from torchdistpackage.ddp.zero.options import ZeroKeywords, ZeroOptions, with_options
from torchdistpackage.ddp.zero.param_buffer import ParamBuffer
from torchdistpackage.ddp.zero.param_shard import whole_shard
from torchdistpackage.ddp.zero.shard_bounds import requires_whole_params
from torchdistpackage.ddp.zero.sharded_base import ShardedOptimizerBase
from torchdistpackage.ddp.zero.sharing import ReplicaGroups, assign_buckets
from torchdistpackage.ddp.zero.stage3 import (
    ParamCoordinator,
    WholeParams,
    gather_ahead,
    may_overlap,
)

UNLIMITED_BYTES = 2**62
"""Cap that never limits: `shard_bounds.group_by_module` fills the buckets, not the reducer."""


class ZeroOptimizer(ShardedOptimizerBase):
    """Shard `optimizer` over the ranks that hold the same parameters; the loop stays the same.

    optimizer: of any class of torch.optim, or your own, over parameters of `module` in any param
        groups. The groups then hold this rank's shards.
    module: it is not wrapped, but its forward gets hooks. None: gradients are reduced in `step`.
    keywords: those of `ZeroOptions`: stage, group, layouts, overlap, wire_dtype, ... They are kept
        as the attribute `options`.

    A parameter's `.grad` is None once its reduction has started. `reducer.finish()` waits for the
    reduced gradients, which are the `.grad` of the shards in param_groups; `step` calls it too.
    Over a group of one rank nothing is reduced: a float32 parameter is its own shard in all stages.

    Raises:
        LayoutError: the optimizer needs full parameters, and some are split over other ranks.
        ValueError: invalid options, all of them; stage 3 without a module.
    """

    _reducer_type = Reducer

    @with_options
    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module | None = None,
        **keywords: Unpack[ZeroKeywords],
    ):
        options = self.options = ZeroOptions(**keywords)
        options.check(optimizer, module)
        self._module = module
        self._overlap = may_overlap(module, options.stage) and options.overlap
        if options.offload:
            check_offload(optimizer)
        self._freed = WholeParams()
        sharing = ReplicaGroups.over(optimizer, module, options)
        specs = sharing.trained(optimizer, module)
        # [Note: groups of one rank] Sharding such parameters saves nothing and nothing is sent. So
        # they get no hooks and no copies, and their step costs as much as a plain one.
        has_alone = sharing.has_alone
        self._alone = [
            whole_shard(s, sharing.layouts) for s in specs if not options.offload and has_alone(s)
        ]
        alone = [shard.tensor for shard in self._alone]
        split = [s.name for s in specs if s.name in sharing.cut]
        is_whole = requires_whole_params(optimizer, options.whole, split)
        refuse_others(specs, module)
        for replicas in sharing.replicated(module, specs):
            sync_module_states(replicas)
        self._claim = GradHooks(_unhooked, self, (), exclusive=True, claims=alone)
        owned = set(map(id, alone))
        specs = [s for s in specs if id(s.parameter) not in owned]
        owner_of = whole_owners(specs) if is_whole else None
        make_store = Offload if options.offload else None
        on_read = WeakMethod(self._on_read)
        self._cutter = BucketSharder(options, sharing, on_read, owner_of, make_store)
        self._buckets: list[ShardedBucket] = []
        self._in_step = self._lands_in_step = False
        make_duplex_groups(s.group for s in specs)
        is_queue = is_queued(world())
        given_bytes = int((options.bucket_cap_mb or 0) * MIB)
        # in stage 3 buckets that are gathered take memory, so that replicas do not count
        num_ranks = max(
            (
                s.group.size() * (s.replicas.size() if s.replicas and options.stage < 3 else 1)
                for s in specs
            ),
            default=1,
        )
        sizes = bucket_sizes(queued=is_queue, num_ranks=num_ranks)
        cap_bytes = given_bytes or sizes.default_bytes
        self.reducer = self._reducer_type(
            assign_buckets(specs, cap_bytes),
            cap_bytes=UNLIMITED_BYTES,
            num_backwards=options.num_backwards,
            overlap=self._overlap,
            exclusive=True,
            parts=ReducerParts(
                WeakHook(self._make_bucket_comm), scheduled_ready=LastBackwardPolicy
            ),
        )
        line_up(
            [bucket.bucket_comm for bucket in self._buckets], saves_memory=options.frees_gradients
        )
        super().__init__(optimizer, held_by_group(optimizer, self._buckets, self._alone, sharing))
        pieces = [[shard.tensor for shard in bucket.shards] for bucket in self._buckets]
        around = partial(self._cutter.stepping, self._buckets)
        one_by_one = options.offload or not is_queue
        self._stepping = PartialStep(optimizer, pieces, one_by_one=one_by_one, around=around)
        # a class that is not torch's may compute across parameters, so it steps once for all
        self._by_bucket = type(optimizer).__module__.startswith("torch.optim.")
        self._order = [*reversed(range(len(self._buckets)))]
        all_specs = [h.spec for members in self.partitions for h in members]
        handles = [] if module is None else self._hooks_on(module)
        self._attach(all_specs, handles)

    def _attach(self, specs: list[ParamSpec], handles: list[Removable]) -> None:
        """Guard the optimizer's parameters, and hook the module to gather them.

        handles: hooks that `remove` must remove too.
        """
        module, buckets = self._module, self._buckets
        layouts = [(bucket.layout, bucket.parameters.flat) for bucket in buckets]
        self._guards = ParamGuards(module, layouts, specs)
        self._guards.handles += handles
        if module is None:
            return
        keeps_until_backward = not self.options.reshard_after_forward
        order = [bucket.parameters for bucket in reversed(buckets) if bucket.gathers]
        if order:
            self._freed = coordinator = ParamCoordinator(module, order, keeps_until_backward)
            self._guards.handles += coordinator.handles
        self._guards.handles += gather_ahead(module, self.stage < 3 or keeps_until_backward)

    # -- methods for callers -----------------------------------------------------------

    @property
    def stage(self) -> int:
        """Stage: 1 shards the optimizer's state, 2 gradients too, 3 parameters too."""
        return self.options.stage

    @property
    def shards(self) -> list[ParamShard]:
        """The shards of parameters that this rank owns."""
        return [*self._alone, *(shard for bucket in self._buckets for shard in bucket.shards)]

    def step(self, closure: Callable[[], object] | None = None):
        """Wait for the sums, step this rank's shards, and start to gather the parameters.

        closure: computes the loss and its gradients; its value is returned.

        Raises:
            LayoutError: a frozen parameter was unfrozen, or a parameter was replaced or moved.
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
        """Drop all gradients, or set existing ones to zero."""
        if any(bucket.bucket_comm.launched for bucket in self._buckets):
            self.reducer.finish()  # sums in flight would arrive later as gradients
        for bucket in self._buckets:
            (bucket.bucket_comm.drop if set_to_none else bucket.bucket_comm.zero)()
        for shard in self._alone:
            if set_to_none:
                shard.tensor.grad = None
            elif shard.tensor.grad is not None:
                shard.tensor.grad.zero_()

    def finish(self) -> None:
        """Wait until all parameters are gathered and current on this rank.

        In stage 3 all ranks call it, and parameters stay gathered until the next backward or step.
        """
        self._freed.fetch_all()
        self.arrive()

    def arrive(self) -> None:
        """Wait for gathers in flight; freed parameters stay freed.

        Only then may this rank's shards be read, for example to save them.
        """
        for bucket in self._buckets:
            bucket.parameters.arrive()

    def gather_shards(self) -> None:
        """Gather parameters anew, after the caller wrote to the shards; all ranks call it. In stage
        3 they are gathered when they are read.
        """
        self.arrive()
        for bucket in reversed(range(len(self._buckets))):
            self._send(bucket)
        self._freed.stepped()
        self.arrive()

    def remove(self) -> None:
        """Turn the module into a plain one again; all ranks call it.

        Afterwards the optimizer keeps its state, to save it or load it elsewhere, but cannot step.
        """
        self._settle()
        self.finish()
        self.reducer.remove()
        self._claim.remove()
        self._guards.cut()
        self.forget()

    def refresh_masters(self) -> None:
        """Set the optimizer's copies to the parameters, after a user wrote to these."""
        self.finish()
        for bucket in self._buckets:
            bucket.parameters.refresh()

    # -- one step ----------------------------------------------------------------------

    def _step(self) -> None:
        """Step all buckets as their sums arrive, and send their parameters."""
        for bucket in reversed(self._buckets):
            if not bucket.gathers:
                bucket.parameters.expect()
        self._lands_in_step, self._in_step = False, self._by_bucket
        try:
            self.reducer.finish()
        finally:
            self._in_step = False
        if self._by_bucket:
            self._stepping.step_rest()
        else:
            self._stepping.all_at_once()
        # [Note: gathers under the next forward] All ranks send first what the forward reads first,
        # the reverse of the order in which sums arrive. A module that reads a parameter in flight
        # waits for it (UngatheredParameter), so this order lets the forward wait least.
        order = sorted(self._order, key=lambda b: not self._goes_early(b))
        if self._by_bucket and not self._lands_in_step:
            order = self._stepping.in_turn(order)
        for b in order:
            if not (self._lands_in_step and self._goes_early(b)):
                self._send(b)
        self._freed.stepped()

    def _send(self, bucket: int) -> None:
        """Start the gather of a bucket, unless stage 3 gathers it on use."""
        if not self._buckets[bucket].gathers:
            self._buckets[bucket].parameters.send()

    def _goes_early(self, bucket: int) -> bool:
        """Return whether the bucket is gathered before the last one is stepped.

        This is the last but one. It is stepped while the last sum arrives. Sent at once, its
        parameters use the link during the last step, when it would be idle. All other buckets wait,
        because the forward reads them in the opposite order.
        """
        return self.stage < 3 and bucket == len(self._buckets) - 2

    def _left(self, bucket: int) -> None:
        """Free a bucket's parameters once its gradients are sent (stage 3)."""
        if self._buckets[bucket].gathers:
            self._freed.release(self._buckets[bucket].parameters)

    def _settled(self, bucket: int) -> None:
        """Step a bucket whose sum has arrived, if this happens inside `step`."""
        if not self._in_step:
            if not self._overlap or torch._C._current_graph_task_id() == -1:
                # callers may read the shards now; inside a backward nobody reads them
                self._buckets[bucket].wait()
            return
        self._lands_in_step = True
        self._stepping.landed(bucket)
        if self._goes_early(bucket):
            self._send(bucket)

    # -- hooks -------------------------------------------------------------------------

    def _hooks_on(self, module: nn.Module) -> list[Removable]:
        """Hook the module's forward, and its saving and loading."""
        settle_first = WeakHook(self._before_state_dict)
        return [
            module.register_forward_hook(WeakHook(self._watch)),
            module.register_state_dict_pre_hook(settle_first),
            module.register_load_state_dict_pre_hook(settle_first),
            module.register_load_state_dict_post_hook(WeakHook(self._loaded)),
        ]

    def _watch(self, module: nn.Module, args: object, outputs: object) -> object:
        return self.reducer.watch(outputs, wait=not self._overlap)

    def _before_state_dict(self, *args: object) -> None:
        if self._freed.has_freed:
            self.expect_all("state_dict() of a module under ZeRO 3")
        self.finish()

    def _on_read(self, parameters: ParamBuffer) -> None:
        self._freed.on_read(parameters)

    def _loaded(self, module: nn.Module, incompatible: object) -> None:
        self._guards.check_objects()
        self.refresh_masters()

    def _settle(self) -> None:
        """Wait for all sums, gathers and copies in flight."""
        self.reducer.finish()
        self.arrive()
        for bucket in self._buckets:
            # callers read or replace the state next, and a sum in flight still writes to it
            bucket.wait()

    def _make_bucket_comm(self, bucket: Bucket, members: Sequence[ParamSpec]) -> BucketComm:
        """Create one bucket, and its communication for the reducer."""
        number, sharded = len(self._buckets), self._cutter.cut(bucket, members)
        sharded.bucket_comm.left = partial(WeakHook(self._left), number)
        sharded.bucket_comm.settled = partial(WeakHook(self._settled), number)
        self._buckets.append(sharded)
        return sharded.bucket_comm


def _unhooked(me: object, index: int, parameter: Tensor) -> None:
    """Stand in for a hook: parameters on a single rank are claimed but not hooked."""

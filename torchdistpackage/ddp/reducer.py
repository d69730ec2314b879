"""The reducer, which sums gradients over groups during the backward, in one fixed order of buckets.

The path of a gradient: `watch` hooks a module's outputs. The first such hook to run in a backward
*arms* the reducer for that backward (autograd calls it a graph task). `_accumulated` runs for each
computed gradient. A bucket is launched when its members are complete and all buckets before it were
launched; a `deferred` one (param_spec.py) is launched in `finish`, which waits for all. So every
rank issues the same collectives in the same order, in whatever order gradients are computed.

A nested backward, as in reentrant checkpointing, may add to a gradient again, so such buckets wait
for the end. The first reduction, which launches nothing early, shows which parameters these are.
Or a `ReadyPolicy` (ready.py) tells which gradients are final.

Nothing that outlives a call keeps the reducer alive, neither its parameters nor watched outputs. A
layer whose partial gradients it sums does so itself again once the reducer is dropped. The
reducer's state may live on for a backward still to come (output_hook.py).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from weakref import ref

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from torchdistpackage.ddp.bucket_comm import (
    STAGED_BYTES,
    GradBuckets,
    GradSlot,
    ReducerParts,
    read_used_flags,
)
from torchdistpackage.ddp.bucket_plan import BucketPlan
from torchdistpackage.ddp.grad_hooks import GradHooks, OnGradReady, on_backward_start
from torchdistpackage.ddp.output_hook import output_hook
from torchdistpackage.ddp.param_spec import ParamSpec, take_over
from torchdistpackage.ddp.ready import (
    ARMING,
    BackwardQueue,
    ReadyPolicy,
    ScheduledReady,
    came_late,
    gives_any,
    queue_of,
)
from torchdistpackage.errors import CommError


class ReductionPhase(Enum):
    """Phase of a reduction. IDLE: not begun. REDUCING: buckets may be launched. SENT: all early
    buckets are."""

    IDLE, REDUCING, SENT = "idle", "reducing", "sent"


# globals, because the hook runs for every gradient and an enum member costs an attribute look-up
_IDLE, _REDUCING, _SENT = ReductionPhase
_current_graph_task_id = torch._C._current_graph_task_id


class Reducer:
    """The owner of its parameters' gradients, which it reduces; see the module's docstring.

    specs: the parameters, each with the group over which it is summed.
    cap_bytes: size of a bucket.
    num_backwards: reduce once every `num_backwards` backwards.
    overlap: False launches all buckets at the end.
    exclusive: no other wrapper may own these parameters.
    parts: objects that the owner made from its options.

    Other files may read these attributes, and change them only by methods of this class:

    phase: progress of the current reduction (`ReductionPhase`).
    next_bucket: the first bucket that is not launched.
    pending_counts: for each bucket, the number of gradients that it still waits for. A policy
        changes it by `complete` and `hold_back`.
    leaves_early: whether buckets are launched during a backward; only after one reduction has shown
        which gradients repeat.
    only_accumulates: backwards of forwards made now leave their gradients unreduced (`hold`).
    open: a forward or a gradient waits for a reduction.
    grad_buckets: the memory of the gradients, and the communication of each bucket.
    on_launch: for tests and debugging; called with the number of each bucket before its launch.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        *,
        cap_bytes: int,
        num_backwards: int = 1,
        overlap: bool = True,
        exclusive: bool = False,
        parts: ReducerParts | None = None,
    ):
        self._num_backwards, self._overlap = num_backwards, overlap
        self._cap_bytes, self._exclusive = cap_bytes, exclusive
        self.on_launch: Callable[[int], object] = lambda b: None
        self.only_accumulates = self.open = False
        self._policy: ReadyPolicy | None = None
        self._queue: Callable[[], BackwardQueue | None] = lambda: None
        self._task = -1  # the graph task that armed this reducer, -1 for none
        self._num_done = 0  # backwards since the last reduction
        self._own(specs, parts or ReducerParts())

    # -- one backward: watched, reached, launched, finished ---------------------------------

    def watch(self, outputs: object, *, wait: bool = True, survives: bool = False) -> object:
        """Return a forward's outputs, hooked so that their backward reduces.

        outputs: a tensor, or tuples, lists, dicts and dataclasses of them. If none requires a
            gradient they get an anchor, so that a loss that uses no parameter still reduces zeros.
        wait: whether the end of that backward waits for the sums; if not, `finish()` does.
        survives: reduce even if this reducer is dropped before; otherwise that raises.
        """
        if not self.specs:
            return outputs
        current = torch._C._current_graph_task_id()
        if current == -1:
            # no backward is running, so one that is still armed ended in an exception
            if self._task != -1:
                self._abandon()
            if self.only_accumulates and self.phase is _SENT:
                self.finish()  # gradients that accumulate now must not mix with sums in flight
            if not self.open and self.phase is _IDLE:
                self._repack()
        elif self._task == -1 and not self.only_accumulates:
            # this forward is recomputed inside another backward, which is the outermost one
            self._arm(current, wait)
        if self.only_accumulates or not torch.is_grad_enabled():
            return outputs
        self.open = True
        return on_backward_start(outputs, output_hook(self, current, wait, survives))

    def reached(self, made_in: int, wait: bool) -> bool:
        """Arm the reducer for a backward that has reached an output; return whether it reduces.

        made_in: the graph task in which a forward made the output; -1: outside of any.
        """
        current = torch._C._current_graph_task_id()
        # autograd's threads may reach two outputs at once, and only one may arm the reducer
        with ARMING:
            if current == self._task or (made_in != -1 and made_in == self._task):
                return True
            if torch.is_grad_enabled() and not gives_any(self.parameters):
                return False  # autograd.grad(..., create_graph=True) inside a loss
            if self._task != -1:
                self._abandon()
            self._arm(current, wait)
            return True

    def _arm(self, task: int, wait: bool) -> None:
        """Begin to follow one backward, and begin a reduction if it is the last to accumulate."""
        if self.phase is not _IDLE:
            self.finish()
        self._task = task
        self._num_done += 1
        if self._num_done >= self._num_backwards:
            self.begin()
        queue = queue_of(task)
        self._queue = ref(queue)
        queue.enqueue(self, wait)

    def begin(self) -> None:
        """Begin a reduction, so that buckets may be launched, unless one has begun."""
        if self.phase is _IDLE:
            self._repack()
            if self._planner is not None:
                self._planner.begin()
            self._reset(_REDUCING)

    @property
    def has_early(self) -> bool:
        """True if the running backward still has early buckets to launch."""
        return self.phase is _REDUCING and self.next_bucket < self.grad_buckets.num_early

    def launch_complete(self) -> None:
        """Launch early buckets in order, up to the first that is not complete."""
        # in order, even if later buckets are complete: see [Note: order of buckets] in ready.py
        while self.has_early and self.pending_counts[self.next_bucket] == 0:
            self._launch(self.next_bucket)
            self.next_bucket += 1

    def _launch_until(self, end: int) -> None:
        """Launch all buckets before `end`, complete or not."""
        for b in range(self.next_bucket, end):
            self._launch(b)
        self.next_bucket, self.phase = end, _SENT

    def _launch(self, b: int) -> None:
        """Launch one bucket, with the staged gradients copied in."""
        self.grad_buckets.flush_staged()
        self.on_launch(b)
        self.grad_buckets.bucket_comms[b].launch()

    def launch_early(self, task: int) -> None:
        """Launch the early buckets, complete or not, when the outermost graph task is over."""
        # Deferred buckets wait for `finish`: other stages share them, and the backwards of those
        # may not be over on this rank.
        if self._task == task and self.phase is _REDUCING:
            self._launch_until(self.grad_buckets.num_early)

    def end(self, task: int, wait: bool) -> None:
        """End the backward, once all reducers of graph task `task` have launched early buckets."""
        if self._task == task:
            self._task = -1
            if wait and self.phase is _SENT:
                self.finish()

    def finish(self) -> None:
        """Launch all remaining buckets and wait for all sums; a second call does nothing."""
        if self.phase is _IDLE and not self.open:
            return
        self.begin()
        buckets, planner = self.grad_buckets, self._planner
        self._launch_until(len(buckets.bucket_comms))
        if planner is not None:
            planner.arrived(0)
        for b, bucket_comm in enumerate(buckets.bucket_comms):
            # in the order of the launches, which is the order in which sums arrive
            bucket_comm.wait()
            if planner is not None and b < buckets.num_early:
                planner.arrived(buckets.num_bytes(b))
        read_used_flags(buckets.bucket_comms)
        if planner is not None:
            self._next_plan = planner.decide([s.index for s in buckets.slots if s.may_repeat])
            self._planner = None if planner.is_over else planner
        self._reset(_IDLE)
        # This reduction has shown which gradients repeat, so the next one may launch early: see
        # [Note: gradients that repeat] in ready.py.
        self.leaves_early, self.open, self._num_done = self._overlap, False, 0
        if self._check_used is not None:
            self._check_used(self.specs, buckets.take_has_grad())

    def _abandon(self) -> None:
        """After an exception in a backward, wait for launched buckets, and start over."""
        self._task, self._num_done = -1, 0
        for bucket_comm in self.grad_buckets.bucket_comms:
            bucket_comm.abandon()
        self.grad_buckets.drop_staged()
        self._reset(_IDLE)

    # -- other methods for callers -----------------------------------------------------------

    @property
    def num_buckets(self) -> int:
        return len(self.grad_buckets.bucket_comms)

    @property
    def holders(self) -> list[Tensor]:
        """Tensors other than parameters that hold reduced gradients, such as ZeRO's shards."""
        return [x for bucket_comm in self.grad_buckets.bucket_comms for x in bucket_comm.holders]

    def complete(self, slot: GradSlot) -> None:
        """Count one gradient of the slot's bucket as final; `launch_complete` may follow."""
        self.pending_counts[slot.bucket] -= 1

    def hold_back(self, slot: GradSlot) -> None:
        """Let the slot's bucket wait for one more gradient before its launch."""
        self.pending_counts[slot.bucket] += 1

    def mark_repeating(self, slot: GradSlot) -> None:
        """Note that a backward may add to this gradient again, so its bucket waits for the end."""
        slot.may_repeat = True

    def hold(self) -> None:
        """Let backwards of forwards made from now on only accumulate, until `release`."""
        self.only_accumulates = True

    def release(self) -> None:
        """End `hold`."""
        self.only_accumulates = False

    def follow(self, policy: ReadyPolicy) -> BackwardQueue:
        """Let `policy` tell which gradients are final, as long as the returned queue is alive."""
        queue = BackwardQueue(-1)
        queue.enqueue(self, False)
        self._policy, self._queue = policy, ref(queue)
        return queue

    @contextmanager
    def scheduled(self) -> Iterator[ScheduledReady]:
        """Run a block of backwards in which the caller tells which ones are the last.

        It yields the object to tell it to; other backwards of the block only accumulate. Complete
        buckets are launched at once, the others at the end of the block, deferred ones in
        `finish()`.
        """
        self.watch(())  # no backward runs now, so this drops one that failed
        if self.phase is not _IDLE:
            self.finish()
        if self._scheduled_ready is None:
            raise CommError(
                "this Reducer was made without `scheduled_ready`, which says by a schedule which "
                "gradients are final; give its ReducerParts scheduled_ready=LastBackwardPolicy"
            )
        policy = self._scheduled_ready(self)
        queue, is_over = self.follow(policy), False
        try:
            with self.no_sync():
                self.open = True
                yield policy
            is_over = True
        finally:
            del queue
            self._policy = None
            if not is_over:
                self._abandon()
            elif self.phase is _REDUCING:
                self._launch_until(self.grad_buckets.num_early)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards of forwards made in the block only accumulate."""
        previous, self.only_accumulates = self.only_accumulates, True
        try:
            yield
        finally:
            self.only_accumulates = previous

    def grad_ready_hook(self) -> OnGradReady:
        """Return the hook to call for each computed gradient."""
        return _accumulated

    def renew(self, specs: Sequence[ParamSpec], parts: ReducerParts) -> None:
        """Own these parameters from now on, on all ranks; existing gradients stay.

        Raises:
            CommError: a reduction has begun and is not finished.
        """
        if self.phase is not _IDLE:
            raise CommError("parameters changed during a reduction; call finish() before")
        self.remove()
        self._own(specs, parts, self.grad_buckets.leave())

    def remove(self) -> None:
        """Take the hooks off the parameters; gradients stay where they are."""
        self._grad_hooks.remove()

    def _own(
        self,
        specs: Sequence[ParamSpec],
        parts: ReducerParts,
        moving: Collection[nn.Parameter] = (),
    ) -> None:
        """Take these parameters, with new buckets and hooks.
        moving: parameters whose gradients move to the new buckets.
        """
        self.specs, self.leaves_early = list(specs), False
        self.parameters = tuple(s.parameter for s in specs)
        self.grad_buckets = GradBuckets(self.specs, parts, BucketPlan(self._cap_bytes), moving)
        _, self._planner, self._check_used, self._scheduled_ready = parts
        self._next_plan: BucketPlan | None = None
        self._reset(_IDLE)
        self.hook_parameters()

    def hook_parameters(self) -> None:
        """Hook the parameters until `remove()`, or until this reducer is collected."""
        self.me = ref(self)
        hook, claims = self.grad_ready_hook(), take_over(self.specs)
        self._grad_hooks = GradHooks(hook, self, self.parameters, self._exclusive, claims)

    def _repack(self) -> None:
        """Switch to the plan agreed on last, before a bucket of the old one is launched."""
        plan, self._next_plan = self._next_plan, None
        if plan is not None:
            self._pack(plan)

    # Not compiled, because it asks groups for their ranks, which torch 2.11 cannot trace. The first
    # call imports torch._dynamo, which the step of torch's optimizers has imported by then.
    @_disable_dynamo
    def _pack(self, plan: BucketPlan) -> None:
        """Pack the buckets by this plan, moving the gradients."""
        self.grad_buckets.pack(plan, self.grad_buckets.leave())
        self._reset(_IDLE)

    def _reset(self, phase: ReductionPhase) -> None:
        """Return the buckets."""
        self.phase, self.next_bucket = phase, 0
        self.pending_counts = [len(bucket.members) for bucket in self.grad_buckets.buckets]


def _accumulated(me: "ref[Reducer]", index: int, parameter: Tensor) -> None:
    """Handle one parameter's accumulated gradient; this hook runs for every gradient, so
    be fast.
    """
    if (self := me()) is None:
        return
    buckets, phase = self.grad_buckets, self.phase
    slot = buckets.slots[index]
    bucket, policy = slot.bucket, self._policy
    if bucket < self.next_bucket:
        raise came_late(slot.spec) if policy is None else policy.late(slot)
    self.open = slot.has_grad = True
    if phase is _IDLE:
        is_final = False
    elif policy is not None:
        is_final = policy.is_last(slot, parameter)
    elif _current_graph_task_id() == self._task:
        is_final = self.leaves_early and phase is _REDUCING and not slot.may_repeat
    else:  # this backward runs inside the one that armed the reducer, so others may follow
        is_final = False
        self.mark_repeating(slot)
        if slot.bucket_comm.gradients.is_divided(slot.member):
            raise came_late(slot.spec)
    if slot.is_small and phase is _REDUCING:
        buckets.staged.append(slot)
        buckets.staged_bytes += slot.num_bytes
        if buckets.staged_bytes >= STAGED_BYTES:
            buckets.flush_staged()
    elif parameter.grad is not slot.home:
        is_divided = is_final and not slot.may_repeat
        slot.bucket_comm.gradients.absorb(slot.member, is_final=is_divided)
    if self._planner is not None and phase is not _IDLE:
        self._planner.came(index)
    if is_final:
        self.pending_counts[bucket] -= 1
        if not self.pending_counts[bucket] and bucket == self.next_bucket:
            queue = self._queue()
            assert queue is not None  # the running backward or block keeps it alive
            queue.launch_ready()

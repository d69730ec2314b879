"""Sums gradients over groups while the backward still runs, in one fixed order of buckets.

The way of a gradient: `watch` hooks a module's outputs; the first such hook to run in a backward
*arms* the reducer for that backward (autograd calls it a graph task); `_accumulated` runs for each
gradient that is there; a bucket is launched when its members are complete and all before it were
launched, or, if it is `deferred` (param_spec.py), in `finish`, which waits for all. So every rank
issues the same collectives in the same order, whatever order gradients come in.

Gradients of a backward nested inside, as reentrant checkpointing has them, may come again, so their
buckets wait for the end; which parameters do so is learned in the first reduction, in which
therefore nothing leaves early. Or a `ReadyPolicy` (ready.py) says which gradients are final.

Nothing that outlives a call keeps the reducer, neither what it owns nor an output that it watches:
a layer whose partial sums it sums instead does so again as soon as the reducer is dropped. Its
state may live on for a backward that is still to come (output_hook.py).
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
    """IDLE: nothing was launched. REDUCING: buckets may be. SENT: all early ones were."""

    IDLE, REDUCING, SENT = "idle", "reducing", "sent"


# Members of an enum cost an attribute look-up each time, and the hook runs for every gradient.
_IDLE, _REDUCING, _SENT = ReductionPhase
_current_graph_task_id = torch._C._current_graph_task_id


class Reducer:
    """Owns the gradients of its parameters; see the module's text.

    specs: the parameters, and over which group each is summed.
    cap_bytes: size of a bucket.
    num_backwards: reduce once every `num_backwards` backwards.
    overlap: False launches all at the end. exclusive: no wrapper may own these parameters too.
    parts: what the owner's options ask for.

    Others may read these, and change them by methods of this class alone:

    phase: what was launched of the reduction that runs (`ReductionPhase`).
    next_bucket: the first bucket that was not launched.
    pending_counts: of each bucket, how many gradients are awaited before it may leave. A policy
        changes it by `complete` and `hold_back`.
    leaves_early: whether buckets leave during a backward; not before one reduction has shown which
        gradients come several times.
    only_accumulates: backwards of forwards made meanwhile leave their gradients unreduced (`hold`).
    open: a forward or a gradient waits for a reduction.
    grad_buckets: the memory of the gradients, and what becomes of each bucket.
    on_launch: for tests and debugging; called with the number of each bucket that is launched.
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
        self._task = -1  # the graph task that armed us, -1 for none
        self._num_done = 0  # backwards since the last reduction
        self._own(specs, parts or ReducerParts())

    # -- one backward: watched, reached, launched, finished ---------------------------------

    def watch(self, outputs: object, *, wait: bool = True, survives: bool = False) -> object:
        """The same outputs, whose backward will reduce; call it on what a forward returns.

        outputs: a tensor, or tuples, lists, dicts and dataclasses of them. Those without gradient
        get an anchor, so that a loss that uses no parameter still reduces, with zeros.
        wait: whether the end of that backward waits for the sums; if not, `finish()` does.
        survives: whether it reduces also where this reducer was dropped since; else it is refused.
        """
        if not self.specs:
            return outputs
        current = torch._C._current_graph_task_id()
        if current == -1:
            # no backward is running, so whatever is still armed ended in an exception
            if self._task != -1:
                self._abandon()
            if self.only_accumulates and self.phase is _SENT:
                self.finish()  # what accumulates now is not of the sums under way
            if not self.open and self.phase is _IDLE:
                self._repack()
        elif self._task == -1 and not self.only_accumulates:
            # recomputed inside the backward of another: that one is the outermost
            self._arm(current, wait)
        if self.only_accumulates or not torch.is_grad_enabled():
            return outputs
        self.open = True
        return on_backward_start(outputs, output_hook(self, current, wait, survives))

    def reached(self, made_in: int, wait: bool) -> bool:
        """A backward is at an output that a forward made in graph task `made_in`.

        Returns whether it is one that reduces.
        """
        current = torch._C._current_graph_task_id()
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
        """Buckets may leave from here on, if they may not already."""
        if self.phase is _IDLE:
            self._repack()
            if self._planner is not None:
                self._planner.begin()
            self._reset(_REDUCING)

    @property
    def has_early(self) -> bool:
        """Whether buckets are still to leave in the backward that runs."""
        return self.phase is _REDUCING and self.next_bucket < self.grad_buckets.num_early

    def launch_complete(self) -> None:
        """Launch the early buckets that are complete."""
        # in turn, also where later ones are complete: [Note: order of buckets] of ready.py
        while self.has_early and self.pending_counts[self.next_bucket] == 0:
            self._launch(self.next_bucket)
            self.next_bucket += 1

    def _launch_until(self, end: int) -> None:
        for b in range(self.next_bucket, end):
            self._launch(b)
        self.next_bucket, self.phase = end, _SENT

    def _launch(self, b: int) -> None:
        self.grad_buckets.flush_staged()
        self.on_launch(b)
        self.grad_buckets.bucket_comms[b].launch()

    def launch_early(self, task: int) -> None:
        """Graph task `task`, the outermost, is over: launch the early buckets, complete or not."""
        # `num_early` and no further: what is deferred is shared with other stages, whose backwards
        # may not be over on this rank, and waits for `finish`
        if self._task == task and self.phase is _REDUCING:
            self._launch_until(self.grad_buckets.num_early)

    def end(self, task: int, wait: bool) -> None:
        """All reducers of graph task `task` have launched their early buckets."""
        if self._task == task:
            self._task = -1
            if wait and self.phase is _SENT:
                self.finish()

    def finish(self) -> None:
        """Launch what was not and wait for all sums. Idempotent: a second call does nothing."""
        if self.phase is _IDLE and not self.open:
            return
        self.begin()
        buckets, planner = self.grad_buckets, self._planner
        self._launch_until(len(buckets.bucket_comms))
        if planner is not None:
            planner.arrived(0)
        for b, bucket_comm in enumerate(buckets.bucket_comms):
            bucket_comm.wait()
            if planner is not None and b < buckets.num_early:
                planner.arrived(buckets.num_bytes(b))
        read_used_flags(buckets.bucket_comms)
        if planner is not None:
            self._next_plan = planner.decide([s.index for s in buckets.slots if s.may_repeat])
            self._planner = None if planner.is_over else planner
        self._reset(_IDLE)
        # this reduction has shown what repeats: [Note: gradients that repeat] of ready.py
        self.leaves_early, self.open, self._num_done = self._overlap, False, 0
        if self._check_used is not None:
            self._check_used(self.specs, buckets.take_has_grad())

    def _abandon(self) -> None:
        """An exception ended a backward: let what has left arrive, and start over."""
        self._task, self._num_done = -1, 0
        for bucket_comm in self.grad_buckets.bucket_comms:
            bucket_comm.abandon()
        self.grad_buckets.drop_staged()
        self._reset(_IDLE)

    # -- what else callers use ---------------------------------------------------------------

    @property
    def num_buckets(self) -> int:
        return len(self.grad_buckets.bucket_comms)

    @property
    def holders(self) -> list[Tensor]:
        """The tensors besides the parameters that hold reduced gradients, as ZeRO's shards do."""
        return [x for bucket_comm in self.grad_buckets.bucket_comms for x in bucket_comm.holders]

    def complete(self, slot: GradSlot) -> None:
        """One gradient of the slot's bucket is awaited no more; `launch_complete` may follow."""
        self.pending_counts[slot.bucket] -= 1

    def hold_back(self, slot: GradSlot) -> None:
        """One more gradient of the slot's bucket is awaited before it leaves."""
        self.pending_counts[slot.bucket] += 1

    def mark_repeating(self, slot: GradSlot) -> None:
        """Its gradients may come several times in a backward: its bucket waits for the ends."""
        slot.may_repeat = True

    def hold(self) -> None:
        """Backwards of forwards made from now on only accumulate, until `release`."""
        self.only_accumulates = True

    def release(self) -> None:
        """End `hold`."""
        self.only_accumulates = False

    def follow(self, policy: ReadyPolicy) -> BackwardQueue:
        """Let `policy` say which gradients are final, while what this returns is kept."""
        queue = BackwardQueue(-1)
        queue.enqueue(self, False)
        self._policy, self._queue = policy, ref(queue)
        return queue

    @contextmanager
    def scheduled(self) -> Iterator[ScheduledReady]:
        """A run of backwards of which the caller says which are the last, by what this yields.

        Backwards of the block only accumulate where it does not say so. What is complete leaves
        at once, the rest at the end of the block, in `finish()` what is deferred.
        """
        self.watch(())  # nothing runs: forget a backward that failed
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
        """`hold` inside the block; as before it after."""
        before, self.only_accumulates = self.only_accumulates, True
        try:
            yield
        finally:
            self.only_accumulates = before

    def grad_ready_hook(self) -> OnGradReady:
        """Called for each gradient that is there."""
        return _accumulated

    def renew(self, specs: Sequence[ParamSpec], parts: ReducerParts) -> None:
        """Own these parameters from here on, on all ranks; gradients that are there stay.

        Raises:
            CommError: a reduction has begun that is not finished.
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
        self.specs, self.leaves_early = list(specs), False
        self.parameters = tuple(s.parameter for s in specs)
        self.grad_buckets = GradBuckets(self.specs, parts, BucketPlan(self._cap_bytes), moving)
        _, self._planner, self._check_used, self._scheduled_ready = parts
        self._next_plan: BucketPlan | None = None
        self._reset(_IDLE)
        self.hook_parameters()

    def hook_parameters(self) -> None:
        """Hook the parameters until `remove()`, or the end of this."""
        self.me = ref(self)
        hook, taken = self.grad_ready_hook(), take_over(self.specs)
        self._grad_hooks = GradHooks(hook, self, self.parameters, self._exclusive, taken)

    def _repack(self) -> None:
        """Go over to the plan that was agreed on last, before anything leaves in the old one."""
        plan, self._next_plan = self._next_plan, None
        if plan is not None:
            self._pack(plan)

    # It asks groups for their ranks, on which the compiler of torch 2.11 stumbles. The first call
    # loads torch._dynamo, as the step of torch's own optimizers has done by then.
    @_disable_dynamo
    def _pack(self, plan: BucketPlan) -> None:
        self.grad_buckets.pack(plan, self.grad_buckets.leave())
        self._reset(_IDLE)

    def _reset(self, phase: ReductionPhase) -> None:
        self.phase, self.next_bucket = phase, 0
        self.pending_counts = [len(bucket.members) for bucket in self.grad_buckets.buckets]


def _accumulated(me: "ref[Reducer]", index: int, parameter: Tensor) -> None:
    """Hook of a parameter, as quick as can be: this backward has added all to its gradient."""
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
    else:  # of a backward inside the one that armed us, and so may be others
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
            assert queue is not None  # the backward, or the block, that runs keeps it
            queue.launch_ready()

"""Sums gradients over groups while the backward still runs, in one fixed order of buckets.

A parameter's hook runs when its gradient is complete for this backward; its home is the memory
of its bucket (grad_bucket.py). A bucket leaves when its members are complete and all before it have
left, or, if it is `deferred` (param_spec.py), in `finish`: every rank issues the same collectives
in the same order, whatever order gradients come in. Buckets are packed anew between two reductions
only, as all ranks have agreed. What becomes of a bucket is its carrier's (bucket_comm.py).

Which backward counts. `watch` hangs a hook on a module's outputs. The first such hook to run in
a backward *arms* the reducer for that backward (autograd calls it a graph task) and asks the
engine to say when all of it is done (ready.py). Gradients that arrive in a backward nested inside,
as reentrant checkpointing has them, may come again, so their buckets wait for the end; which
parameters do so is learned in the first reduction, in which therefore nothing leaves early.
Or the caller of the backwards says which are the last (`scheduled`), and no output is watched.

Whose it is. Nothing that outlives a call keeps the reducer, neither what it owns nor an output that
it watches: a layer whose partial sums it has taken on sums them again as soon as its owner is
dropped, and not only when Python collects garbage.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from weakref import ref

import torch
from torch import Tensor, nn

from torchdistpackage.ddp.bucket_comm import (
    STAGED_BYTES,
    AllReduceBucket,
    BucketComm,
    GradBuckets,
    GradSlot,
    MakeBucketComm,
    wait_all,
)
from torchdistpackage.ddp.bucket_plan import BucketPlan
from torchdistpackage.ddp.bucket_tuning import BucketTuner
from torchdistpackage.ddp.grad_bucket import came_late, gives_any
from torchdistpackage.ddp.grad_hooks import GradHooks, on_backward_start
from torchdistpackage.ddp.param_spec import ParamSpec, take_over
from torchdistpackage.ddp.param_sync import check_unused_parameters
from torchdistpackage.ddp.ready import ARMING, NO_QUEUE, ScheduledReady, queue_of, single_queue
from torchdistpackage.errors import CommError


class ReductionPhase(Enum):
    """IDLE: no bucket has left. REDUCING: buckets may leave. SENT: all early ones have left."""

    IDLE = "idle"
    REDUCING = "reducing"
    SENT = "sent"


_IDLE, _REDUCING, _SENT = ReductionPhase  # on the way of every gradient names are looked up once
_current_graph_task_id = torch._C._current_graph_task_id


class Reducer:
    """Owns the gradients of its parameters; see the module's text.

    cap_bytes: size of a bucket. num_backwards: a reduction is due in every so manieth backward.
    overlap: False lets all leave at the end. strict: raise on every rank, by name, for parameters
    that some rank did not use. make_bucket_comm: makes the carrier of a bucket. after: carriers
    without parameters, which leave after all others. tuner: lets order and sizes follow what is
    measured; None keeps both, as on a plan on paper. exclusive: no wrapper may have a reducer of
    its own for these parameters.

    next_bucket: the first that has not left. pending_counts: of each bucket, gradients that are not
    complete; what counts that of `next_bucket` down to none calls `launch_complete`. on_launch:
    called with the number of each bucket that leaves.
    """

    phase: ReductionPhase
    next_bucket: int
    pending_counts: list[int]

    def __init__(
        self,
        shared: Sequence[ParamSpec],
        *,
        cap_bytes: int,
        num_backwards: int = 1,
        overlap: bool = True,
        strict: bool = False,
        make_bucket_comm: MakeBucketComm = AllReduceBucket,
        after: Sequence[BucketComm] = (),
        tuner: BucketTuner | None = None,
        exclusive: bool = False,
    ):
        self._num_backwards, self._overlap, self._strict = num_backwards, overlap, strict
        self._make_bucket_comm = make_bucket_comm
        self._cap_bytes, self._exclusive = cap_bytes, exclusive
        self.on_launch: Callable[[int], object] = lambda b: None
        self._held, self._queue = False, ref(NO_QUEUE)
        self._task = -1  # the graph task that armed us, -1 for none
        self._scheduled: ScheduledReady | None = None
        # backwards since the last reduction; whether a forward or a gradient waits for one
        self._num_done, self._open = 0, False
        self._own(shared, after, tuner, ())

    def renew(
        self,
        shared: Sequence[ParamSpec],
        *,
        make_bucket_comm: MakeBucketComm,
        after: Sequence[BucketComm] = (),
        tuner: BucketTuner | None = None,
    ) -> None:
        """Own these parameters from here on, on all ranks; gradients that are there stay.

        Raises:
            CommError: a reduction has begun that nobody has finished.
        """
        if self.phase is not _IDLE:
            raise CommError("parameters changed during a reduction; call finish() before")
        self.remove()
        self._make_bucket_comm = make_bucket_comm
        self._own(shared, after, tuner, self.grad_buckets.leave())

    def _own(
        self,
        shared: Sequence[ParamSpec],
        after: Sequence[BucketComm],
        tuner: BucketTuner | None,
        moving: Collection[nn.Parameter],
    ) -> None:
        self.shared, self.leaves_early = list(shared), False
        self.grad_buckets = GradBuckets(
            self.shared, BucketPlan(self._cap_bytes), self._make_bucket_comm, after, moving
        )
        self._tuner, self._next_plan = tuner, None
        self._reset(_IDLE)
        self._grad_hooks = GradHooks(
            _accumulated, self, self.parameters, self._exclusive, take_over(shared)
        )

    # -- what callers use --------------------------------------------------------------

    @property
    def num_buckets(self) -> int:
        return len(self.grad_buckets.carriers)

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(s.parameter for s in self.shared)

    @property
    def open(self) -> bool:
        """Whether a forward or a gradient waits for a reduction."""
        return self._open

    @property
    def is_reducing(self) -> bool:
        """Whether gradients of the backward that runs are for a reduction of their own."""
        return self.phase is _REDUCING

    @property
    def held(self) -> bool:
        return self._held

    def hold(self) -> None:
        """Backwards of forwards made from now on only accumulate, until `release`."""
        self._held = True

    def release(self) -> None:
        self._held = False

    @contextmanager
    def scheduled(self) -> Iterator[ScheduledReady]:
        """A run of backwards of which the caller says which are the last, by what this yields.

        Backwards of the block only accumulate where it does not say so. What is complete leaves
        at once, the rest at the end of the block, in `finish()` what is deferred.
        """
        self.watch(())  # nothing runs: forget a backward that failed
        if self.phase is not _IDLE:
            self.finish()
        held, self._held, self._open = self._held, True, True
        queue = single_queue(self)
        self._scheduled, self._queue = ScheduledReady(self), ref(queue)
        is_over = False
        try:
            yield self._scheduled
            is_over = True
        finally:
            self._scheduled, self._held = None, held
            if not is_over:
                self._abandon()
            elif self.phase is _REDUCING:
                self._launch_until(self.grad_buckets.num_early)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """`hold` inside the block; what held before holds after."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    def watch(self, outputs: object, *, wait: bool = True) -> object:
        """The same outputs, whose backward will reduce; call it on what a forward returns.

        outputs: a tensor, or tuples, lists, dicts and dataclasses of them. Those without gradient
        get an anchor, so that a loss that uses no parameter still reduces, with zeros.
        wait: whether the end of that backward waits for the sums; if not, `finish()` does.
        """
        if not self.shared:
            return outputs
        current = torch._C._current_graph_task_id()
        if current == -1:
            # no backward is running, so whatever is still armed ended in an exception
            if self._task != -1:
                self._abandon()
            if self._held and self.phase is _SENT:
                self.finish()  # what accumulates now is not of the sums under way
            if not self._open and self.phase is _IDLE:
                self._repack()
        elif self._task == -1 and not self._held:
            # recomputed inside the backward of another: that one is the outermost
            self._arm(current, wait)
        if self._held or not torch.is_grad_enabled():
            return outputs
        self._open = True
        return on_backward_start(outputs, partial(_reached, ref(self), current, wait))

    def finish(self) -> None:
        """Send what has not left and wait for all sums. Idempotent: a second call does nothing."""
        if self.phase is _IDLE and not self._open:
            return
        self.begin()
        buckets, tuner = self.grad_buckets, self._tuner
        self._launch_until(len(buckets.carriers))
        if tuner is None:
            wait_all(buckets.carriers)
        else:
            tuner.arrived(0)
            wait_all(buckets.carriers, self._settled)
            self._next_plan = tuner.decide([s.index for s in buckets.slots if s.may_repeat])
            self._tuner = None if tuner.is_over else tuner
        self._reset(_IDLE)
        self.leaves_early, self._open, self._num_done = self._overlap, False, 0
        if self._strict:
            check_unused_parameters(self.shared, buckets.take_has_grad())

    def remove(self) -> None:
        """Take the hooks off the parameters; gradients stay where they are."""
        self._grad_hooks.remove()

    # -- the life of one backward ------------------------------------------------------

    def reached(self, made_in: int, wait: bool) -> None:
        """A backward is at an output that a forward made in graph task `made_in`."""
        current = torch._C._current_graph_task_id()
        with ARMING:
            if current == self._task or (made_in != -1 and made_in == self._task):
                return
            if torch.is_grad_enabled() and not gives_any(self.parameters):
                return  # autograd.grad(..., create_graph=True) inside a loss
            if self._task != -1:
                self._abandon()
            self._arm(current, wait)

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

    def launch_early(self, task: int) -> None:
        """The outermost backward, graph task `task`, is over: launch the early buckets, complete
        or not."""
        if self._task == task and self.phase is _REDUCING:
            self._launch_until(self.grad_buckets.num_early)

    def end(self, task: int, wait: bool) -> None:
        """All reducers of graph task `task` have launched their early buckets."""
        if self._task == task:
            self._task = -1
            if wait and self.phase is _SENT:
                self.finish()

    def _abandon(self) -> None:
        """An exception ended a backward: let what has left arrive, and start over."""
        self._task, self._num_done = -1, 0
        for carrier in self.grad_buckets.carriers:
            carrier.abandon()
        self.grad_buckets.discard_staged()
        self._reset(_IDLE)

    def _comes_again(self, slot: GradSlot) -> None:
        """This gradient is of a backward inside the one that armed us, and so may be others."""
        slot.may_repeat = True
        if slot.carrier.gradients.is_divided(slot.place):
            raise came_late(self.shared[slot.index])

    # -- how far the buckets of a reduction have come ----------------------------------

    def begin(self) -> None:
        """Buckets may leave from here on, if they may not already."""
        if self.phase is _IDLE:
            self._repack()
            if self._tuner is not None:
                self._tuner.begin()
            self._reset(_REDUCING)

    @property
    def has_early(self) -> bool:
        """Whether buckets are still to leave in the backward that runs."""
        return self.phase is _REDUCING and self.next_bucket < self.grad_buckets.num_early

    def launch_complete(self) -> None:
        """Launch the early buckets that are complete."""
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
        self.grad_buckets.carriers[b].launch()

    def _settled(self, b: int) -> None:
        assert self._tuner is not None
        if b < self.grad_buckets.num_early:
            self._tuner.arrived(self.grad_buckets.num_bytes(b))

    def _repack(self) -> None:
        """Go over to the plan that was agreed on last, before anything leaves in the old one."""
        plan, self._next_plan = self._next_plan, None
        if plan is not None:
            self.grad_buckets.repack(plan)
            self._reset(_IDLE)

    def _reset(self, phase: ReductionPhase) -> None:
        self.phase, self.next_bucket = phase, 0
        self.pending_counts = [len(bucket.members) for bucket in self.grad_buckets.buckets]


def _accumulated(me: "ref[Reducer]", index: int, parameter: Tensor) -> None:
    """Hook of a parameter, as quick as can be: this graph task has added all to its gradient."""
    if (self := me()) is None:
        return
    buckets, phase = self.grad_buckets, self.phase
    slot = buckets.slots[index]
    bucket = slot.bucket
    if bucket < self.next_bucket:
        raise came_late(self.shared[index])
    self._open = slot.has_grad = True
    if phase is _IDLE:
        is_final = False
    elif self._scheduled is not None:
        is_final = self._scheduled.is_last(slot, parameter)
    elif _current_graph_task_id() == self._task:
        is_final = self.leaves_early and phase is _REDUCING and not slot.may_repeat
    else:
        is_final = False
        self._comes_again(slot)
    if slot.is_small and phase is _REDUCING:
        buckets.staged.append(slot)
        buckets.staged_bytes += slot.num_bytes
        if buckets.staged_bytes >= STAGED_BYTES:
            buckets.flush_staged()
    elif parameter.grad is not slot.home:
        slot.carrier.gradients.absorb(slot.place, is_final=is_final)
    if self._tuner is not None and phase is not _IDLE:
        self._tuner.came(index)
    if is_final:
        self.pending_counts[bucket] -= 1
        if not self.pending_counts[bucket] and bucket == self.next_bucket:
            queue = self._queue()
            assert queue is not None  # the backward, or the block, that runs keeps it
            queue.launch_ready()


def _reached(me: "ref[Reducer]", made_in: int, wait: bool, grad: Tensor) -> None:
    """Hook of an output that was watched."""
    if (self := me()) is None:
        raise CommError(
            "a backward came to what a NaiveDDP or ZeroOptimizer returned that was dropped since, "
            "so nobody would reduce its gradients; keep it until the backward is over"
        )
    self.reached(made_in, wait)

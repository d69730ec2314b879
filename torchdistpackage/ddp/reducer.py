"""Sums gradients over groups while the backward still runs, in one fixed order of buckets.

A parameter's hook runs when its gradient is complete for this backward; its home is the memory
of its bucket (grad_bucket.py). A bucket leaves when its members are complete and all before it have
left, or, if it is `last` (param_spec.py), in `finish`: every rank issues the same collectives in
the same order. The reducer says when; what becomes of a bucket is its carrier's (bucket_comm.py).

Which backward counts. `watch` hangs a hook on a module's outputs. The first such hook to run in
a backward *arms* the reducer for that backward (autograd calls it a graph task) and asks the
engine to say when all of it is done (turns.py). Gradients that arrive in a backward nested inside,
as reentrant checkpointing has them, may come again, so their buckets wait for the end; which
parameters do so is learned in the first reduction, in which therefore nothing leaves early.
Or whoever runs the backwards says which are the last (ready.py), and no output is watched.

Whose it is. Nothing that outlives a call keeps the reducer, neither what it owns nor an output that
it watches: a layer whose partial sums it has taken on sums them again as soon as its owner is
dropped, and not only when Python collects garbage.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import ref

import torch
from torch import Tensor, nn

from torchdistpackage.ddp.bucket_comm import AllReduceBucket, BucketComm, MakeBucketComm
from torchdistpackage.ddp.bucket_tuning import BucketPlan, BucketTuner
from torchdistpackage.ddp.departures import Departures, ReductionPhase
from torchdistpackage.ddp.grad_bucket import came_late, gives_any
from torchdistpackage.ddp.grad_hooks import GradHooks, on_backward_start
from torchdistpackage.ddp.packed import STAGED_BYTES, GradBuckets, GradSlot
from torchdistpackage.ddp.param_spec import ParamSpec, take_over
from torchdistpackage.ddp.param_sync import check_unused_parameters
from torchdistpackage.ddp.ready import ScheduledReady
from torchdistpackage.ddp.turns import ARMING, NO_QUEUE, queue_of, single_queue
from torchdistpackage.errors import CommError

_IDLE, _REDUCING = ReductionPhase.IDLE, ReductionPhase.REDUCING
_current_graph_task_id = torch._C._current_graph_task_id


class Reducer:
    """Owns the gradients of its parameters; see the module's text.

    cap_bytes: size of a bucket. num_backwards: a reduction is due in every so manieth backward.
    overlap: False lets all leave at the end. strict: raise on every rank, by name, for parameters
    that some rank did not use. make_bucket_comm: makes the carrier of a bucket. after: carriers
    without parameters, which leave after all others. fit: lets order and sizes follow what is
    measured; None keeps both, as on a plan on paper. exclusive: no wrapper may have a reducer of
    its own for these parameters.
    """

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
        fit: BucketTuner | None = None,
        exclusive: bool = False,
    ):
        self._num_backwards, self._overlap, self._strict = num_backwards, overlap, strict
        self._make_bucket_comm, self._cap_bytes, self._exclusive = (
            make_bucket_comm,
            cap_bytes,
            exclusive,
        )
        self._held, self._queue = False, ref(NO_QUEUE)
        self._task = -1  # the graph task that armed us, -1 for none
        self._scheduled: ScheduledReady | None = None
        # backwards since the last reduction; whether a forward or a gradient waits for one
        self._num_done, self._open = 0, False
        self._own(shared, after, fit, (), lambda b: None)

    def renew(
        self,
        shared: Sequence[ParamSpec],
        *,
        make_bucket_comm: MakeBucketComm,
        after: Sequence[BucketComm] = (),
        fit: BucketTuner | None = None,
    ) -> None:
        """Own these parameters from here on, on all ranks; gradients that are there stay.

        Raises:
            CommError: a reduction has begun that nobody has finished.
        """
        if self.departures.phase is not ReductionPhase.IDLE:
            raise CommError("parameters changed during a reduction; call finish() before")
        self.remove()
        self._make_bucket_comm = make_bucket_comm
        self._own(shared, after, fit, self._packed.leave(), self.departures.on_launch)

    def _own(
        self,
        shared: Sequence[ParamSpec],
        after: Sequence[BucketComm],
        fit: BucketTuner | None,
        moving: Collection[nn.Parameter],
        on_launch: Callable[[int], object],
    ) -> None:
        self.shared, self.leaves_early = list(shared), False
        self._packed = GradBuckets(
            self.shared, BucketPlan(self._cap_bytes), self._make_bucket_comm, after, moving
        )
        self.departures = Departures(self._packed, fit, on_launch)
        self._grad_hooks = GradHooks(
            _accumulated, self, self.parameters, self._exclusive, take_over(shared)
        )

    # -- what callers use --------------------------------------------------------------

    @property
    def on_launch(self) -> Callable[[int], object]:
        """Called with the number of each bucket that leaves."""
        return self.departures.on_launch

    @on_launch.setter
    def on_launch(self, function: Callable[[int], object]) -> None:
        self.departures.on_launch = function

    @property
    def num_buckets(self) -> int:
        return len(self._packed.carriers)

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
        return self.departures.phase is ReductionPhase.REDUCING

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
        at once, the rest at the end of the block, in `finish()` what is `last`.
        """
        self.watch(())  # nothing runs: forget a backward that failed
        if self.departures.phase is not ReductionPhase.IDLE:
            self.finish()
        held, self._held, self._open = self._held, True, True
        turns = single_queue(self)
        self._scheduled, self._queue = ScheduledReady(self), ref(turns)
        is_over = False
        try:
            yield self._scheduled
            is_over = True
        finally:
            self._scheduled, self._held = None, held
            if not is_over:
                self._abandon()
            elif self.departures.phase is _REDUCING:
                self.departures.send_early()

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
            if self._held and self.departures.phase is ReductionPhase.SENT:
                self.finish()  # what accumulates now is not of the sums under way
            if not self._open and self.departures.phase is ReductionPhase.IDLE:
                self.departures.repack()
        elif self._task == -1 and not self._held:
            # recomputed inside somebody's backward: that one is the outermost
            self._arm(current, wait)
        if self._held or not torch.is_grad_enabled():
            return outputs
        self._open = True
        return on_backward_start(outputs, partial(_reached, ref(self), current, wait))

    def finish(self) -> None:
        """Send what has not left and wait for all sums. Idempotent: a second call does nothing."""
        if self.departures.phase is ReductionPhase.IDLE:
            if not self._open:
                return
            self.departures.begin()
        self.departures.finish()
        self.leaves_early, self._open, self._num_done = self._overlap, False, 0
        if self._strict:
            check_unused_parameters(self.shared, self._packed.take_has_grad())

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
        if self.departures.phase is not ReductionPhase.IDLE:
            self.finish()
        self._task = task
        self._num_done += 1
        if self._num_done >= self._num_backwards:
            self.departures.begin()
        turns = queue_of(task)
        self._queue = ref(turns)
        turns.enqueue(self, wait)

    def send_early(self, task: int) -> None:
        """The outermost backward is over."""
        if self._task == task and self.departures.phase is _REDUCING:
            self.departures.send_early()

    def end(self, task: int, wait: bool) -> None:
        if self._task == task:
            self._task = -1
            if wait and self.departures.phase is ReductionPhase.SENT:
                self.finish()

    def _abandon(self) -> None:
        """An exception ended a backward."""
        self._task, self._num_done = -1, 0
        self.departures.abandon()

    def _comes_again(self, slot: GradSlot) -> None:
        """This gradient is of a backward inside the one that armed us, and so may be others."""
        slot.may_repeat = True
        if slot.carrier.gradients.is_divided(slot.place):
            raise came_late(self.shared[slot.index])

    @property
    def has_early(self) -> bool:
        return self.departures.has_early

    def send_complete(self) -> None:
        self.departures.send_complete()


def _accumulated(me: "ref[Reducer]", index: int, parameter: Tensor) -> None:
    """Hook of a parameter, as quick as can be: this graph task has added all to its gradient."""
    if (self := me()) is None:
        return
    packed, departures = self._packed, self.departures
    slot, phase = packed.slots[index], departures.phase
    bucket = slot.bucket
    if bucket < departures.next_bucket:
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
        packed.staged.append(slot)
        packed.staged_bytes += slot.num_bytes
        if packed.staged_bytes >= STAGED_BYTES:
            packed.flush_staged()
    elif parameter.grad is not slot.home:
        slot.carrier.gradients.absorb(slot.place, is_final=is_final)
    if departures.fit is not None and phase is not _IDLE:
        departures.fit.came(index)
    if is_final:
        departures.pending_counts[bucket] -= 1
        if not departures.pending_counts[bucket] and bucket == departures.next_bucket:
            turns = self._queue()
            assert turns is not None  # the backward, or the block, that runs keeps it
            turns.launch_ready()


def _reached(me: "ref[Reducer]", made_in: int, wait: bool, grad: Tensor) -> None:
    """Hook of an output that was watched."""
    if (self := me()) is None:
        raise CommError(
            "a backward came to what a NaiveDDP or ZeroOptimizer returned that was dropped since, "
            "so nobody would reduce its gradients; keep it until the backward is over"
        )
    self.reached(made_in, wait)

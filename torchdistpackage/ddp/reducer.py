"""Sums gradients over groups while the backward still runs, in one fixed order of buckets.

A parameter's hook runs when its gradient is complete for this backward; its home is the memory
of its bucket (gradients.py). A bucket leaves when its members are complete and all before it have
left, or, if it is `last` (shared.py), in `finish`: every rank issues the same collectives in the
same order. The reducer says when; what becomes of a bucket is its carrier's (carrier.py).

Which backward counts. `watch` hangs a hook on a module's outputs. The first such hook to run in
a backward *arms* the reducer for that backward (autograd calls it a graph task) and asks the
engine to say when all of it is done (turns.py). Gradients that arrive in a backward nested inside,
as reentrant checkpointing has them, may come again, so their buckets wait for the end; which
parameters do so is learned in the first reduction, in which therefore nothing leaves early.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn

from torchdistpackage.ddp.carrier import AllReduced, Carrier, Carry
from torchdistpackage.ddp.fit import Fit
from torchdistpackage.ddp.gradients import came_late, gives_any
from torchdistpackage.ddp.order import Packing
from torchdistpackage.ddp.outputs import hook_outputs
from torchdistpackage.ddp.packed import Packed
from torchdistpackage.ddp.shared import Shared
from torchdistpackage.ddp.told import Told
from torchdistpackage.ddp.turns import NO_TURNS, turns_of
from torchdistpackage.ddp.used import check_used
from torchdistpackage.errors import CommError


class Phase(Enum):
    """IDLE: no bucket has left. REDUCING: buckets may leave. SENT: all early ones have left."""

    IDLE = "idle"
    REDUCING = "reducing"
    SENT = "sent"


# on the way of every gradient names are looked up once
_IDLE, _REDUCING = Phase.IDLE, Phase.REDUCING
_current_graph_task_id = torch._C._current_graph_task_id


class Reducer:
    """Owns the gradients of its parameters; see the module's text.

    cap_bytes: size of a bucket. num_backwards: a reduction is due in every so manieth backward.
    overlap: False lets all leave at the end. strict: raise on every rank, by name, for parameters
    that some rank did not use. on_launch: called with the number of each that leaves. carry: makes
    the carrier of a bucket. after: carriers without parameters, which leave after all others.
    fit: lets order and sizes follow what is measured; None keeps both, as on a plan on paper.
    """

    def __init__(
        self,
        shared: Sequence[Shared],
        *,
        cap_bytes: int,
        num_backwards: int = 1,
        overlap: bool = True,
        strict: bool = False,
        on_launch: Callable[[int], object] = lambda b: None,
        carry: Carry = AllReduced,
        after: Sequence[Carrier] = (),
        fit: Fit | None = None,
    ):
        self._num_backwards, self._overlap, self._strict = num_backwards, overlap, strict
        self.on_launch, self._carry, self._cap_bytes = on_launch, carry, cap_bytes
        self._held, self._turns = False, NO_TURNS
        self._task = -1  # the graph task that armed us, -1 for none
        self._num_done = 0  # backwards since the last reduction
        self._open = False  # a forward or a gradient is waiting for a reduction
        self._own(shared, after, fit, ())

    def renew(
        self, shared: Sequence[Shared], *, after: Sequence[Carrier] = (), fit: Fit | None = None
    ) -> None:
        """Own these parameters from here on, on all ranks; gradients that are there stay.

        Raises:
            CommError: a reduction has begun that nobody has finished.
        """
        if self._phase is not Phase.IDLE:
            raise CommError("parameters changed during a reduction; call finish() before")
        self.remove()
        self._own(shared, after, fit, self._packed.leave())

    def _own(
        self,
        shared: Sequence[Shared],
        after: Sequence[Carrier],
        fit: Fit | None,
        moving: Collection[nn.Parameter],
    ) -> None:
        self._shared, self._fit = list(shared), fit
        self._packed = Packed(self._shared, Packing(self._cap_bytes), self._carry, after, moving)
        self._next_packing: Packing | None = None
        self._learning = True
        self._begin(Phase.IDLE)
        self._told = Told(self._accumulated, self.parameters)

    # -- what callers use --------------------------------------------------------------

    @property
    def num_buckets(self) -> int:
        return len(self._packed.carriers)

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(s.parameter for s in self._shared)

    @property
    def open(self) -> bool:
        """Whether a forward or a gradient waits for a reduction."""
        return self._open

    @property
    def is_reducing(self) -> bool:
        """Whether gradients of the backward that runs are for a reduction of their own."""
        return self._phase is Phase.REDUCING

    @property
    def held(self) -> bool:
        return self._held

    def hold(self) -> None:
        """Backwards of forwards made from now on only accumulate, until `release`."""
        self._held = True

    def release(self) -> None:
        self._held = False

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

        outputs: a tensor, or tuples, lists, dicts and dataclasses of them. Tensors that do not
        require a gradient get an anchor, so that a loss that uses no parameter still
        reduces, with zeros. wait: whether the end of that backward waits for the sums; if not,
        `finish()` does.
        """
        if not self._shared:
            return outputs
        current = torch._C._current_graph_task_id()
        if current == -1:
            # no backward is running, so whatever is still armed ended in an exception
            if self._task != -1:
                self._abandon()
            if self._held and self._phase is Phase.SENT:
                self.finish()  # what accumulates now is not of the sums under way
            if not self._open and self._phase is Phase.IDLE:
                self._repack()
        elif self._task == -1 and not self._held:
            # recomputed inside somebody's backward: that one is the outermost
            self._arm(current, wait)
        if self._held or not torch.is_grad_enabled():
            return outputs
        self._open = True
        return hook_outputs(outputs, partial(self._reached, current, wait))

    def finish(self) -> None:
        """Send what has not left and wait for all sums. Idempotent: a second call does nothing."""
        if self._phase is Phase.IDLE:
            if not self._open:
                return
            self._begin(Phase.REDUCING)
        self._launch_until(len(self._packed.carriers))
        fit = self._fit
        if fit is not None:
            fit.arrived(0)
        for b, carrier in enumerate(self._packed.carriers):
            carrier.settle()
            if fit is not None and b < self._packed.num_early:
                fit.arrived(self._packed.num_bytes(b))
        if fit is not None:
            late = [slot.index for slot in self._packed.slots if slot.late]
            self._next_packing = fit.decide(late)
            self._fit = None if fit.is_over else fit
        self._learning, self._open, self._num_done = False, False, 0
        self._begin(Phase.IDLE)
        if self._strict:
            check_used(self._shared, self._packed.take_fired())

    def remove(self) -> None:
        """Take the hooks off the parameters; gradients stay where they are."""
        self._told.remove()

    # -- the life of one backward ------------------------------------------------------

    def _begin(self, phase: Phase) -> None:
        if phase is Phase.REDUCING:
            self._repack()
            if self._fit is not None:
                self._fit.begin()
        self._phase = phase
        self._missing = [len(bucket.members) for bucket in self._packed.buckets]
        self._next = 0

    def _repack(self) -> None:
        """Go over to the packing that was agreed on last, before anything leaves in the old one."""
        packing, self._next_packing = self._next_packing, None
        if packing is not None:
            self._packed.repack(packing)

    def _reached(self, made_in: int, wait: bool, grad: Tensor) -> None:
        """Hook of an output that a forward made in graph task `made_in`: a backward is at it."""
        current = torch._C._current_graph_task_id()
        if current == self._task or (made_in != -1 and made_in == self._task):
            return
        if torch.is_grad_enabled() and not gives_any(self.parameters):
            return  # autograd.grad(..., create_graph=True) inside a loss
        if self._task != -1:
            self._abandon()
        self._arm(current, wait)

    def _arm(self, task: int, wait: bool) -> None:
        if self._phase is not Phase.IDLE:
            self.finish()
        self._task = task
        self._num_done += 1
        if self._num_done >= self._num_backwards:
            self._begin(Phase.REDUCING)
        self._turns = turns_of(task)
        self._turns.join(self, wait)

    def send_early(self, task: int) -> None:
        """The outermost backward is over."""
        if self._task == task and self._phase is _REDUCING:
            self._launch_until(self._packed.num_early)

    def end(self, task: int, wait: bool) -> None:
        if self._task == task:
            self._task = -1
            if wait and self._phase is Phase.SENT:
                self.finish()

    def _abandon(self) -> None:
        """An exception ended a backward: let what has left arrive, and start over."""
        for carrier in self._packed.carriers:
            carrier.abandon()
        self._task, self._num_done = -1, 0
        self._packed.forget_fresh()
        self._begin(Phase.IDLE)

    def _accumulated(self, index: int, parameter: Tensor) -> None:
        """Hook of a parameter: this graph task has added all it has to its gradient."""
        slot = self._packed.slots[index]
        bucket, phase = slot.bucket, self._phase
        if bucket < self._next:
            raise came_late(self._shared[index])
        self._open = slot.fired = True
        if phase is _REDUCING and slot.is_small:
            self._packed.wait_for_more(slot)
        elif parameter.grad is not slot.home:
            slot.carrier.gradients.adopt(slot.place)
        if phase is _IDLE:
            return
        if self._fit is not None:
            self._fit.came(slot.index)
        if _current_graph_task_id() != self._task:
            slot.late = True
        if slot.late or self._learning or not self._overlap:
            return
        self._missing[bucket] -= 1
        if not self._missing[bucket] and bucket == self._next:
            self._turns.go()

    @property
    def has_early(self) -> bool:
        """Whether buckets are still to leave in the backward that runs."""
        return self._phase is _REDUCING and self._next < self._packed.num_early

    def send_complete(self) -> None:
        """Launch the early buckets that are complete, in their order."""
        while self.has_early and self._missing[self._next] == 0:
            self._launch(self._next)
            self._next += 1

    def _launch_until(self, end: int) -> None:
        for b in range(self._next, end):
            self._launch(b)
        self._next, self._phase = end, Phase.SENT

    def _launch(self, b: int) -> None:
        self._packed.bring_in()
        self.on_launch(b)
        self._packed.carriers[b].launch()

"""Sums gradients over groups while the backward still runs, in one fixed order of buckets.

A parameter's hook runs when its gradient is complete for this backward; its home is the memory
of its bucket (gradients.py). A bucket leaves when its members are complete and all before it have
left, or, if it is `last` (shared.py), in `finish`: every rank issues the same collectives in the
same order. The reducer says when; what becomes of a bucket is its carrier's (carrier.py).

Which backward counts. `watch` hangs a hook on a module's outputs. The first such hook to run in
a backward *arms* the reducer for that backward (autograd calls it a graph task) and asks the
engine to call `_end` when all of it is done. Gradients that arrive in a backward nested inside,
as reentrant checkpointing has them, may come again, so their buckets wait for `_end`; which
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
from torchdistpackage.ddp.order import Packing
from torchdistpackage.ddp.outputs import hook_outputs
from torchdistpackage.ddp.packed import Packed, Slot
from torchdistpackage.ddp.shared import Shared
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
        self._held = False
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
        self._handles = [
            s.parameter.register_post_accumulate_grad_hook(partial(self._accumulated, slot))
            for s, slot in zip(self._shared, self._packed.slots, strict=True)
        ]

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
        for handle in self._handles:
            handle.remove()

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
        if torch.is_grad_enabled() and not self._is_for_parameters():
            return  # autograd.grad(..., create_graph=True) inside a loss
        if self._task != -1:
            self._abandon()
        self._arm(current, wait)

    def _is_for_parameters(self) -> bool:
        """Whether the backward that runs gives any parameter its `.grad`."""
        edges = (torch.autograd.graph.get_gradient_edge(s.parameter) for s in self._shared)
        try:
            return any(torch._C._will_engine_execute_node(edge.node) for edge in edges)
        except RuntimeError:  # so torch answers of a leaf that autograd.grad was asked for
            return False

    def _arm(self, task: int, wait: bool) -> None:
        if self._phase is not Phase.IDLE:
            self.finish()
        self._task = task
        self._num_done += 1
        if self._num_done >= self._num_backwards:
            self._begin(Phase.REDUCING)
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task, wait))

    def _end(self, task: int, wait: bool) -> None:
        """The outermost backward is over."""
        if self._task != task:
            return
        self._task = -1
        if self._phase is Phase.REDUCING:
            self._launch_until(self._packed.num_early)
            if wait:
                self.finish()

    def _abandon(self) -> None:
        """An exception ended a backward: let what has left arrive, and start over."""
        for carrier in self._packed.carriers:
            carrier.abandon()
        self._task, self._num_done = -1, 0
        self._packed.forget_fresh()
        self._begin(Phase.IDLE)

    def _accumulated(self, slot: Slot, parameter: Tensor) -> None:
        """Hook of a parameter: this graph task has added all it has to its gradient."""
        self._open = slot.fired = True
        phase = self._phase
        if phase is _REDUCING and slot.is_small:
            self._packed.wait_for_more(slot)
        elif parameter.grad is not slot.home:
            slot.carrier.gradients.adopt(slot.place)
        if phase is _IDLE:
            return
        bucket = slot.bucket
        if bucket < self._next:
            raise CommError(
                f"parameter {self._shared[slot.index].name} received a gradient after its bucket "
                f"had left: call finish() before the next backward, and where reentrant "
                f"checkpointing uses it at times, give torch.utils.checkpoint use_reentrant=False"
            )
        if self._fit is not None:
            self._fit.came(slot.index)
        if _current_graph_task_id() != self._task:
            slot.late = True
        if slot.late or self._learning or not self._overlap:
            return
        missing = self._missing
        missing[bucket] -= 1
        while self._next < self._packed.num_early and missing[self._next] == 0:
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

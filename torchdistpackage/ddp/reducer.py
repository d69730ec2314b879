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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.ddp.buckets import Entry, plan
from torchdistpackage.ddp.carrier import AllReduced, Carry
from torchdistpackage.ddp.outputs import hook_outputs
from torchdistpackage.ddp.shared import Shared
from torchdistpackage.errors import CommError


class Phase(Enum):
    """IDLE: no bucket has left. REDUCING: buckets may leave. SENT: all early ones have left."""

    IDLE = "idle"
    REDUCING = "reducing"
    SENT = "sent"


class Reducer:
    """Owns the gradients of its parameters; see the module's text.

    cap_bytes: size of a bucket. num_backwards: a reduction is due in every so manieth backward.
    overlap: False lets all leave at the end. strict: raise on every rank, by name, for parameters
    that some rank did not use. on_launch: called with the number of each that leaves. carry: makes
    the carrier of a bucket.
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
    ):
        self._shared = list(shared)
        self._num_backwards, self._overlap, self._strict = num_backwards, overlap, strict
        self.on_launch = on_launch
        entries = [
            Entry(i, s.parameter.numel(), s.parameter.element_size(), s.key)
            for i, s in enumerate(self._shared)
        ]
        last = [s.last for s in self._shared]
        buckets = sorted(plan(entries, cap_bytes), key=lambda b: last[b.members[0]])
        self._num_early = sum(not last[b.members[0]] for b in buckets)
        self._carriers = [carry(b, [self._shared[i] for i in b.members]) for b in buckets]
        self._homes: list[Tensor] = [torch.empty(0)] * len(self._shared)
        self._place_of = [(0, 0)] * len(self._shared)  # (bucket, place in it)
        for b, (bucket, carrier) in enumerate(zip(buckets, self._carriers, strict=True)):
            for place, (i, view) in enumerate(
                zip(bucket.members, carrier.gradients.views, strict=True)
            ):
                self._homes[i], self._place_of[i] = view, (b, place)

        self._held = False
        self._task = -1  # the graph task that armed us, -1 for none
        self._num_done = 0  # backwards since the last reduction
        self._open = False  # a forward or a gradient is waiting for a reduction
        self._fired = [False] * len(self._shared)
        self._late = [False] * len(self._shared)
        self._learning = True
        self._begin(Phase.IDLE)
        self._handles = [
            s.parameter.register_post_accumulate_grad_hook(partial(self._accumulated, i))
            for i, s in enumerate(self._shared)
        ]

    # -- what callers use --------------------------------------------------------------

    @property
    def num_buckets(self) -> int:
        return len(self._carriers)

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
        current = torch._C._current_graph_task_id()
        if current == -1:
            # no backward is running, so whatever is still armed ended in an exception
            if self._task != -1:
                self._abandon()
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
        self._launch_until(len(self._carriers))
        for carrier in self._carriers:
            carrier.settle()
        fired = self._fired
        self._learning, self._open, self._num_done = False, False, 0
        self._fired = [False] * len(self._shared)
        self._begin(Phase.IDLE)
        if self._strict:
            self._check_used(fired)

    def remove(self) -> None:
        """Take the hooks off the parameters; gradients stay where they are."""
        for handle in self._handles:
            handle.remove()

    # -- the life of one backward ------------------------------------------------------

    def _begin(self, phase: Phase) -> None:
        self._phase = phase
        self._missing = [len(carrier.gradients.members) for carrier in self._carriers]
        self._next = 0

    def _reached(self, made_in: int, wait: bool, grad: Tensor) -> None:
        """Hook of an output that a forward made in graph task `made_in`: a backward is at it."""
        current = torch._C._current_graph_task_id()
        if current == self._task or (made_in != -1 and made_in == self._task):
            return
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
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task, wait))

    def _end(self, task: int, wait: bool) -> None:
        """The outermost backward is over."""
        if self._task != task:
            return
        self._task = -1
        if self._phase is Phase.REDUCING:
            self._launch_until(self._num_early)
            if wait:
                self.finish()

    def _abandon(self) -> None:
        """An exception ended a backward: let what has left arrive, and start over."""
        for carrier in self._carriers:
            carrier.abandon()
        self._task, self._num_done = -1, 0
        self._begin(Phase.IDLE)

    def _accumulated(self, i: int, parameter: Tensor) -> None:
        """Hook of a parameter: this graph task has added all it has to its gradient."""
        b, place = self._place_of[i]
        carrier = self._carriers[b]
        if parameter.grad is not self._homes[i]:
            carrier.gradients.adopt(place)
        self._fired[i] = self._open = True
        if self._phase is Phase.IDLE:
            return
        if carrier.launched:
            raise CommError(
                f"parameter {self._shared[i].name} received a gradient after its bucket had left: "
                f"call finish() before the next backward, and where reentrant checkpointing uses "
                f"it at times, give torch.utils.checkpoint use_reentrant=False"
            )
        if torch._C._current_graph_task_id() != self._task:
            self._late[i] = True
        if self._late[i] or self._learning or not self._overlap:
            return
        self._missing[b] -= 1
        while self._next < self._num_early and self._missing[self._next] == 0:
            self._launch(self._next)
            self._next += 1

    def _launch_until(self, end: int) -> None:
        for b in range(self._next, end):
            self._launch(b)
        self._next, self._phase = end, Phase.SENT

    def _launch(self, b: int) -> None:
        self.on_launch(b)
        self._carriers[b].launch()

    def _check_used(self, fired: Sequence[bool]) -> None:
        unused: list[str] = []
        by_bucket: list[list[int]] = [[] for _ in self._carriers]
        for i, (b, _) in enumerate(self._place_of):
            by_bucket[b].append(i)
        for members in by_bucket:
            first = self._shared[members[0]]
            used = torch.tensor([fired[i] for i in members], dtype=torch.int32)
            primitives.all_reduce(
                used := used.to(first.parameter.device), first.group, primitives.MIN
            )
            names = [self._shared[i].name for i in members]
            unused += [
                name for name, all_used in zip(names, used.tolist(), strict=True) if not all_used
            ]
        if unused:
            raise CommError(
                f"{len(unused)} of {len(self._shared)} parameters got no gradient on some rank "
                f"in this step: {', '.join(sorted(unused)[:20])}; freeze them, use them, or "
                f"leave strict off"
            )

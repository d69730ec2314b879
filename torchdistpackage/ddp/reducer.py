"""Sums gradients over groups while the backward still runs, in one fixed order of buckets.

A parameter's hook runs when its gradient is complete for this backward. The gradient lives
in a flat bucket of which `.grad` is a view; a fresh one (after `set_to_none`) is copied in
and dropped. A bucket leaves when its members are complete and all before it have left, or, if it
is `last` (shared.py), in `finish`: every rank issues the same collectives in the same order.

Which backward counts. `watch` hangs a hook on a module's outputs. The first such hook to run in
a backward *arms* the reducer for that backward (autograd calls it a graph task) and asks the
engine to call `_end` when all of it is done. Gradients that arrive in a backward nested inside,
as reentrant checkpointing has them, may come again, so their buckets wait for `_end`; which
parameters do so is learned in the first reduction, in which therefore nothing leaves early.

Used or not. A parameter without gradient contributes zeros and an unset mark at the bucket's
end. After the sum the mark tells whether any rank used it; if none did, `.grad` stays
None, as in one process. Marks are read only for parameters this rank did not use, so the usual
step has no device synchronisation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Pending
from torchdistpackage.ddp.buckets import Bucket, Entry, plan
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
    that some rank did not use. on_launch: called with the number of each that leaves.
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
    ):
        self._shared = list(shared)
        self._num_backwards, self._overlap, self._strict = num_backwards, overlap, strict
        self.on_launch = on_launch
        entries = [
            Entry(i, s.parameter.numel(), s.parameter.element_size(), s.key)
            for i, s in enumerate(self._shared)
        ]
        last = [s.last for s in self._shared]
        self._buckets = sorted(plan(entries, cap_bytes), key=lambda b: last[b.members[0]])
        self._num_early = sum(not last[b.members[0]] for b in self._buckets)
        self._flats = [self._flat(bucket) for bucket in self._buckets]
        self._views: list[Tensor] = [torch.empty(0)] * len(self._shared)
        self._bucket_of = [0] * len(self._shared)
        for b, (bucket, flat) in enumerate(zip(self._buckets, self._flats, strict=True)):
            for i, offset in zip(bucket.members, bucket.offsets, strict=True):
                self._views[i] = self._shared[i].view(flat, offset)
                self._bucket_of[i] = b

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
        return len(self._buckets)

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
        self._launch_until(len(self._buckets))
        for b, pending in enumerate(self._pending):
            assert pending is not None
            pending.wait()
            self._settle(b)
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
        self._pending: list[Pending | None] = [None] * len(self._buckets)
        self._missing = [len(bucket.members) for bucket in self._buckets]
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
        for pending in self._pending:
            if pending is not None:
                pending.wait()
        self._task, self._num_done = -1, 0
        self._begin(Phase.IDLE)

    def _accumulated(self, i: int, parameter: Tensor) -> None:
        """Hook of a parameter: this graph task has added all it has to its gradient."""
        if parameter.grad is not self._views[i]:
            self._adopt(i)
        self._fired[i] = self._open = True
        if self._phase is Phase.IDLE:
            return
        b = self._bucket_of[i]
        if self._pending[b] is not None:
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
        bucket, flat = self._buckets[b], self._flats[b]
        group = self._shared[bucket.members[0]].group
        if group.size() > 1:
            flat[bucket.marks :].fill_(1)
            for place, i in enumerate(bucket.members):
                parameter = self._shared[i].parameter
                if parameter.grad is None:
                    self._views[i].zero_()
                    flat[bucket.marks + place] = 0
                elif parameter.grad is not self._views[i]:
                    self._adopt(i)
        self.on_launch(b)
        op = primitives.AVG if self._divides_itself(b) else primitives.SUM
        self._pending[b] = primitives.start_all_reduce(flat, group, op)

    def _settle(self, b: int) -> None:
        """After the sum: divide, and give parameters unused here what the others found."""
        bucket, flat = self._buckets[b], self._flats[b]
        first = self._shared[bucket.members[0]]
        if first.group.size() == 1:
            return
        if first.divide > 1 and not self._divides_itself(b):
            flat[: bucket.marks].div_(first.divide)
        for place, i in enumerate(bucket.members):
            parameter = self._shared[i].parameter
            if parameter.grad is None and flat[bucket.marks + place].item() != 0:
                parameter.grad = self._views[i]

    def _divides_itself(self, b: int) -> bool:
        """NCCL takes the mean on the way; elsewhere a pass over the bucket does."""
        first = self._shared[self._buckets[b].members[0]]
        return first.divide == first.group.size() > 1 and primitives.is_nccl(first.group)

    def _check_used(self, fired: Sequence[bool]) -> None:
        unused: list[str] = []
        for bucket, flat in zip(self._buckets, self._flats, strict=True):
            group = self._shared[bucket.members[0]].group
            used = torch.tensor([fired[i] for i in bucket.members], dtype=torch.int32)
            primitives.all_reduce(used := used.to(flat.device), group, primitives.MIN)
            names = [self._shared[i].name for i in bucket.members]
            unused += [
                name for name, all_used in zip(names, used.tolist(), strict=True) if not all_used
            ]
        if unused:
            raise CommError(
                f"{len(unused)} of {len(self._shared)} parameters got no gradient on some rank "
                f"in this step: {', '.join(sorted(unused)[:20])}; freeze them, use them, or "
                f"leave strict off"
            )

    def _adopt(self, i: int) -> None:
        """Move a gradient that autograd or the user made into its bucket."""
        parameter = self._shared[i].parameter
        grad = parameter.grad
        assert grad is not None
        if grad.is_sparse:
            raise CommError(
                f"parameter {self._shared[i].name} has a sparse gradient, which buckets cannot "
                f"hold; use Embedding(sparse=False)"
            )
        self._views[i].copy_(grad)
        parameter.grad = self._views[i]

    def _flat(self, bucket: Bucket) -> Tensor:
        return self._shared[bucket.members[0]].parameter.new_zeros(bucket.num_elements)

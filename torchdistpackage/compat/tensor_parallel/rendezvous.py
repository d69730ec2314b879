"""A meeting of threads of one process that compute together; the failure of one ends the wait.

A collective is computed by the last thread to come, from what all brought, in operations that
autograd sees: its backward needs no meeting, as the graph is one. While threads run for one
forward they share a `ThreadRun`. A thread that fails, or leaves while others wait for it, ends the
wait of all.
"""

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from copy import copy
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.compat.tensor_parallel.engine.ops import CollectiveBase
from torchdistpackage.errors import CommError

WAIT_S = 600.0
"""Longest wait for threads that belong to no run, whose failure goes unnoticed."""


class ThreadRun:
    """The threads of one forward."""

    def __init__(self, num_threads: int):
        self.num_threads, self.num_done = num_threads, 0
        self.condition = threading.Condition()
        self.failed: str | None = None

    def fail(self, why: str) -> None:
        with self.condition:
            self.failed = self.failed or why
            self.condition.notify_all()

    def leave(self, rank: int) -> None:
        """Note that a thread is done, so that others that still wait for it give up."""
        with self.condition:
            self.num_done += 1
            self.condition.notify_all()


current_run: ContextVar[ThreadRun | None] = ContextVar("tdp_thread_run", default=None)
"""The run of this thread."""


class Aborted(CommError):
    """Another thread of the run failed; its exception is the one to show."""


class CollectiveOperation(CollectiveBase):
    """`func(input of rank 0, ..., of the last) -> outputs by rank`, called once by one thread.

    authoritative_rank: kept for earlier programs; the last thread to come calls it.
    """

    meets_threads = True

    def __init__(
        self, world_size: int, func: Callable[..., Sequence[Any]], authoritative_rank: int = 0
    ):
        self.world_size, self.func = world_size, func
        self.authoritative_rank = authoritative_rank
        # guards inputs and outputs; threads wait on it for the last one to arrive
        self._lonely = threading.Condition()
        self._inputs: dict[int, Any] = {}
        self._outputs: dict[int, Any] = {}
        self._error: BaseException | None = None
        self._run: ThreadRun | None = None

    def __call__(self, x: Any, rank: int) -> Any:
        """Return this rank's output, once all ranks have come.

        Raises:
            CommError: another thread failed, or will not come.
        """
        run = current_run.get()
        condition = self._lonely if run is None else run.condition
        with condition:
            if self._run is not run:  # what an earlier run left when it failed
                self._run, self._inputs, self._outputs = run, {}, {}
            while self._outputs:  # the call before this one is still being picked up
                self._wait(condition, run, lambda: not self._outputs)
            self._inputs[rank] = x
            if len(self._inputs) == self.world_size:
                self._compute()
                condition.notify_all()
            else:
                self._wait(condition, run, lambda: rank in self._outputs)
            result, error = self._outputs.pop(rank), self._error
            if not self._outputs:
                condition.notify_all()
        if error is not None:
            raise error
        return result

    @property
    def takes_none(self) -> bool:  # a function of the user's own may make something of it
        return type(self) is CollectiveOperation

    def has_all(self) -> bool:
        return current_run.get() is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> "CollectiveOperation":
        return copy(self)  # at which the threads of the copied shards meet

    def __getstate__(self) -> dict[str, Any]:
        gone = ("_lonely", "_run", "_inputs", "_outputs", "_error")
        return {name: value for name, value in vars(self).items() if name not in gone}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lonely, self._run, self._error = threading.Condition(), None, None
        self._inputs, self._outputs = {}, {}

    def _compute(self) -> None:
        inputs = [self._inputs.pop(rank) for rank in range(self.world_size)]
        self._error = None
        try:
            outputs = self.func(*inputs)
            self._outputs = {rank: outputs[rank] for rank in range(self.world_size)}
        except Exception as error:
            self._error = error
            self._outputs = dict.fromkeys(range(self.world_size))

    def _wait(
        self, condition: threading.Condition, run: ThreadRun | None, ready: Callable[[], bool]
    ) -> None:
        if run is None:
            if not condition.wait_for(ready, WAIT_S):
                raise CommError(
                    f"other threads did not come to a collective within {WAIT_S} s; let all "
                    "shards make the same calls"
                )
            return

        def settled() -> bool:
            return ready() or run.failed is not None or run.num_done > 0

        condition.wait_for(settled)
        if ready():
            return
        if run.failed is None:
            run.failed = (
                f"{run.num_done} of {run.num_threads} shards returned while another waits for "
                f"them in a collective: the shards took different ways through the model"
            )
            condition.notify_all()
            raise CommError(f"{run.failed}; a branch must not depend on what a shard holds")
        raise Aborted(f"another shard failed: {run.failed}")


class ThreadSum(CollectiveOperation):
    """The sum over the threads' tensors, a copy for each; the copies' gradients are summed."""

    kind = "sum"

    def __init__(self, world_size: int, reduce_op: Any = None, gather_op: Any = None):
        super().__init__(world_size, sums if reduce_op is None else _reduced_by(reduce_op))
        self.gather_op = gather_op


class ThreadGather(CollectiveOperation):
    """The threads' tensors joined along `dim`, one copy a device."""

    kind = "gather"

    def __init__(self, world_size: int, gather_op: Any = None, barrier: bool = True, dim: int = -1):
        self.dim = dim
        super().__init__(world_size, self._joined if gather_op is None else _gathered_by(gather_op))

    def _joined(self, *parts: Tensor) -> list[Tensor]:
        return joins(parts, self.dim)


class ScatterReduce(CollectiveOperation):
    """Give each thread its slice, along dim 0, of the sum."""

    def __init__(self, world_size: int, reduce_op: Any = None):
        self._reduce_op = reduce_op
        super().__init__(world_size, self._parts)

    def _parts(self, *tensors: Tensor) -> list[Tensor]:
        totals = sums if self._reduce_op is None else _reduced_by(self._reduce_op)
        return [
            torch.tensor_split(total.flatten(), len(tensors))[rank]
            for rank, total in enumerate(totals(*tensors))
        ]


def sums(*tensors: Tensor) -> list[Tensor]:
    """Return the sum of all, added in their order; each shard owns its copy, as it may write to
    it.
    """
    first = tensors[0].device
    total = tensors[0]
    for other in tensors[1:]:
        total = total + other.to(first)
    return [total.to(t.device) if t.device != first else total.clone() for t in tensors]


def joins(tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Return the tensors joined along `dim`, as a separate tensor for each thread."""
    return [torch.cat([t.to(local.device) for t in tensors], dim) for local in tensors]


def _reduced_by(reduce_op: Any) -> Callable[..., Sequence[Tensor]]:
    return lambda *xs: [reduce_op(xs, x.device).clone() for x in xs]


def _gathered_by(gather_op: Any) -> Callable[..., Sequence[Tensor]]:
    return lambda *xs: [gather_op(xs, x.device).clone() for x in xs]

"""When gradients are final and buckets may be launched.

All ranks of a group launch the same buckets in the same order. So of the reducers of one backward,
`BackwardQueue` lets the one that was armed first launch all its early buckets first, and all launch
theirs before any is finished, also where a bucket is late because a parameter was not used. One
that shares a parameter with an earlier one waits until that is finished: its gradient is a mean
that is still on its way. Autograd has a thread for each device, so one launches at a time.

[Note: order of buckets] A collective has no name: what a rank sends first meets what another sends
first. But gradients come in another order on each rank, where threads of autograd race or ranks run
other branches of a model. So a bucket that is complete waits until all before it have left
(`Reducer.launch_complete`), and one that never completes leaves at the end of the backward
(`Reducer.launch_early`). The cost is that a late gradient holds up what is complete behind it, so
buckets are packed anew in the order in which gradients came (bucket_tuning.py).

[Note: gradients that repeat] A hook cannot tell the last gradient of a parameter from one before
it, and a bucket that left with a part of it would be wrong on all ranks without a word. So in the
first reduction nothing leaves before the backward is over, and a parameter that was seen in a
nested backward never leaves early again (`Reducer.mark_repeating`). One that repeats for the first
time after its bucket has left is an error by name (`came_late`).

Where a caller knows which gradients are final, a `ReadyPolicy` says so, as that of
scheduled_ready.py does.
"""

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from threading import Lock
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from torchdistpackage.ddp.bucket_comm import GradSlot
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.errors import CommError


class LaunchingReducer(Protocol):
    """The part of a `Reducer` that policies use."""

    parameters: tuple[nn.Parameter, ...]

    @property
    def has_early(self) -> bool: ...
    def launch_complete(self) -> None: ...
    def launch_early(self, task: int) -> None: ...
    def end(self, task: int, wait: bool) -> None: ...


class ReadyPolicy(Protocol):
    """Decides which gradients are final, in place of the backward that armed the reducer.

    is_last: whether the gradient that has just come to this slot is final. late: the error for one
    that came after the bucket of this slot had left.
    """

    def is_last(self, slot: GradSlot, parameter: Tensor) -> bool: ...
    def late(self, slot: GradSlot) -> CommError: ...


class ScheduledReady(Protocol):
    """By what a caller of `Reducer.scheduled()` says which backwards are the last.

    last_backward: backwards inside bring the last gradients of the parameters that they reach, but
    for those with these ids. complete: these get no more, whether or not they got any.
    """

    def last_backward(self, still_pending: Collection[int] = ()) -> AbstractContextManager: ...
    def complete(self, parameters: Iterable[nn.Parameter]) -> None: ...


class BackwardQueue:
    """Reducers of graph task `task`, in the order in which it came to their outputs."""

    def __init__(self, task: int):
        self._task, self._launching = task, Lock()
        self._rounds: list[list[tuple[LaunchingReducer, bool]]] = [[]]
        if task != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def enqueue(self, reducer: LaunchingReducer, wait: bool) -> None:
        """wait: whether the end of the task finishes it."""
        last = self._rounds[-1]
        mine = set(map(id, reducer.parameters)) if last else set()
        if all(mine.isdisjoint(map(id, other.parameters)) for other, _ in last):
            last.append((reducer, wait))
        else:
            self._rounds.append([(reducer, wait)])

    def launch_ready(self) -> None:
        """Launch what is complete, up to the first reducer that still has early buckets."""
        with self._launching:
            for reducer, _ in self._rounds[0]:
                reducer.launch_complete()
                if reducer.has_early:
                    return

    def _end(self) -> None:
        rounds, self._rounds = self._rounds, [[]]
        for armed in rounds:
            for reducer, _ in armed:
                reducer.launch_early(self._task)
            for reducer, wait in armed:
                reducer.end(self._task, wait)


ARMING = Lock()
"""Held while a reducer is armed for a backward and enqueued."""
_of_task: WeakValueDictionary[int, BackwardQueue] = WeakValueDictionary()


def queue_of(task: int) -> BackwardQueue:
    """That of a task, made by the first call, which runs in that task."""
    return _of_task.get(task) or _of_task.setdefault(task, BackwardQueue(task))


def came_late(spec: ParamSpec) -> CommError:
    return CommError(
        f"parameter {spec.name} received a gradient after it was taken for complete: call "
        f"finish() before the next backward, and where reentrant checkpointing uses it at times, "
        f"give torch.utils.checkpoint use_reentrant=False"
    )


def gives_any(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether the backward that runs gives any of them its `.grad`."""
    edges = map(torch.autograd.graph.get_gradient_edge, parameters)
    try:
        return any(torch._C._will_engine_execute_node(edge.node) for edge in edges)
    except RuntimeError:  # so torch answers of a leaf that autograd.grad was asked for
        return False

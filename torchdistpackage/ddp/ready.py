"""When gradients are final and buckets may be launched: by several reducers, or by a schedule.

One rule: all ranks of a group launch the same buckets in the same order.

`BackwardQueue`: the reducer that a backward armed first launches all its early buckets first, and
all launch theirs before any is finished. A rank on which a bucket is late, because a parameter was
not used, so keeps back those of later reducers too. One that shares a parameter with an earlier one
waits until that is finished: its gradient is a mean that is still on its way. Autograd has a thread
for each device, so gradients of a module on several devices come in several threads at once: one of
them launches at a time, and one arms at a time.

`ScheduledReady`: the caller runs the backwards, of many microbatches and stages, and says which are
the last; hooks do not find it out. All ranks of a group say the same in the same order, since they
run the same program. A parameter that gets several gradients in one block (a module that reentrant
checkpointing runs twice, a backward function that calls backward twice) is complete at its end.
Which do is learned in the first reduction, in which therefore nothing leaves before all is done.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from torchdistpackage.ddp.bucket_comm import GradBuckets, GradSlot
from torchdistpackage.ddp.grad_bucket import came_late
from torchdistpackage.ddp.param_spec import ParamSpec


class LaunchingReducer(Protocol):
    """What a reducer (reducer.py) is to these."""

    shared: list[ParamSpec]
    grad_buckets: GradBuckets
    pending_counts: list[int]
    leaves_early: bool  # whether anything may leave before all is done

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]: ...

    @property
    def has_early(self) -> bool: ...

    def begin(self) -> None: ...

    def launch_complete(self) -> None: ...

    def launch_early(self, task: int) -> None: ...

    def end(self, task: int, wait: bool) -> None: ...


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
        """Launch what is complete, of the first reducer that still has early buckets and those
        before it."""
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


NO_QUEUE = BackwardQueue(-1)
ARMING = Lock()
"""Held while a reducer is armed for a backward and enqueued."""
_of_task: WeakValueDictionary[int, BackwardQueue] = WeakValueDictionary()


def queue_of(task: int) -> BackwardQueue:
    """That of a task, made by the first call, which runs in that task."""
    queue = _of_task.get(task)
    if queue is None:
        queue = _of_task[task] = BackwardQueue(task)
    return queue


def single_queue(reducer: LaunchingReducer) -> BackwardQueue:
    """Of a reducer that waits for no other, in no backward."""
    queue = BackwardQueue(-1)
    queue.enqueue(reducer, False)
    return queue


class ScheduledReady:
    """Made by `Reducer.scheduled()`, which says when it ends."""

    def __init__(self, reducer: LaunchingReducer):
        self._reducer = reducer
        self._indices: dict[int, int] = {}
        self._complete: set[int] = set()
        self._pending: frozenset[int] | None = None  # None outside of `last_backward`
        self._came: set[int] = set()  # in the block that runs, of those that wait for its end

    @contextmanager
    def last_backward(self, still_pending: Collection[int] = ()) -> Iterator[None]:
        """Backwards inside bring the last gradients of the parameters that they reach.

        still_pending: ids of parameters that get more after it.
        """
        self._begin()
        self._pending = frozenset(still_pending)
        self._came.clear()
        try:
            yield
        finally:
            self._pending = None

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """These get no more gradients, whether or not they got any."""
        self._begin()
        indices = (self._indices.get(id(parameter)) for parameter in parameters)
        new = [i for i in indices if i is not None and i not in self._complete]
        self._complete.update(new)
        if self._reducer.leaves_early:
            reducer = self._reducer
            for index in new:
                reducer.pending_counts[reducer.grad_buckets.slots[index].bucket] -= 1
            reducer.launch_complete()

    def is_last(self, slot: GradSlot, parameter: Tensor) -> bool:
        """Whether the gradient that has just come to this slot is complete, and not told before.

        Raises:
            CommError: it was complete.
        """
        index = slot.index
        if index in self._complete:
            raise came_late(self._reducer.shared[index])
        if self._pending is None or id(parameter) in self._pending:
            return False
        if slot.may_repeat or not self._reducer.leaves_early:
            slot.may_repeat = slot.may_repeat or index in self._came
            self._came.add(index)
            return False
        self._complete.add(index)
        return True

    def _begin(self) -> None:
        self._reducer.begin()
        if not self._indices:
            # only now: a wrapper takes new parameters in at its first forward
            self._indices = {id(s.parameter): i for i, s in enumerate(self._reducer.shared)}

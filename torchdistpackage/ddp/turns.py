"""Reducers that one backward armed take turns, so that all ranks send in one order.

One rule: what was armed first sends all its early buckets first, and all send theirs before any
is finished. A rank on which a bucket is late, because a parameter was not used, so keeps back
those of later reducers too. One that shares a parameter with an earlier one waits until that is
finished: its gradient is a mean that is still on its way.

Autograd has a thread for each device, so gradients of a module on several devices come in several
threads at once: one of them sends at a time, and one arms at a time.
"""

from threading import Lock
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn


class Sends(Protocol):
    """What a reducer is to the others."""

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]: ...

    @property
    def has_early(self) -> bool:
        """Whether buckets are still to leave in the backward that runs."""
        ...

    def send_complete(self) -> None: ...

    def send_early(self, task: int) -> None: ...

    def end(self, task: int, wait: bool) -> None: ...


class BackwardQueue:
    """Those of graph task `task`, in the order in which it came to their outputs."""

    def __init__(self, task: int):
        self._task, self._sending = task, Lock()
        self._rounds: list[list[tuple[Sends, bool]]] = [[]]
        if task != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def enqueue(self, reducer: Sends, wait: bool) -> None:
        """wait: whether the end of the task finishes it."""
        last = self._rounds[-1]
        mine = set(map(id, reducer.parameters)) if last else set()
        if all(mine.isdisjoint(map(id, other.parameters)) for other, _ in last):
            last.append((reducer, wait))
        else:
            self._rounds.append([(reducer, wait)])

    def launch_ready(self) -> None:
        """Send what is complete of those whose turn it is."""
        with self._sending:
            for reducer, _ in self._rounds[0]:
                reducer.send_complete()
                if reducer.has_early:
                    return

    def _end(self) -> None:
        rounds, self._rounds = self._rounds, [[]]
        for armed in rounds:
            for reducer, _ in armed:
                reducer.send_early(self._task)
            for reducer, wait in armed:
                reducer.end(self._task, wait)


NO_QUEUE = BackwardQueue(-1)
ARMING = Lock()
"""Held while a reducer is armed for a backward and takes its turn."""
_of_task: WeakValueDictionary[int, BackwardQueue] = WeakValueDictionary()


def queue_of(task: int) -> BackwardQueue:
    """Made by the first who asks, who runs in that task."""
    turns = _of_task.get(task)
    if turns is None:
        turns = _of_task[task] = BackwardQueue(task)
    return turns


def single_queue(reducer: Sends) -> BackwardQueue:
    """Of one that waits for nobody, in no backward."""
    turns = BackwardQueue(-1)
    turns.enqueue(reducer, False)
    return turns

"""Rules that decide when gradients are final and buckets may be launched.

All ranks of a group launch the same buckets in the same order. If a backward has several reducers,
`BackwardQueue` lets the one armed first launch all its early buckets first, and all launch theirs
before any is finished, even if a bucket is late because a parameter was not used. A reducer that
shares a parameter with an earlier one waits until that is finished, because the gradient is a mean
still in flight. Autograd has a thread for each device, so a lock lets one launch at a time.

[Note: order of buckets] A collective has no name: what a rank sends first meets what another sends
first. But each rank may compute gradients in another order, because threads of autograd race, or
ranks run different branches of a model. So a complete bucket waits until all before it have been
launched (`Reducer.launch_complete`), and one that never completes is launched at the end of the
backward (`Reducer.launch_early`). The cost is that a late gradient delays the complete buckets
behind it. So buckets are packed again in the order in which gradients came (bucket_tuning.py).

[Note: gradients that repeat] A hook cannot tell a parameter's last gradient in a backward from an
earlier one. A bucket launched with an incomplete gradient would silently be wrong on all ranks. So
the first reduction launches nothing before the backward is over, and a parameter seen in a nested
backward is never launched early again (`Reducer.mark_repeating`). If one repeats for the first time
after its bucket was launched, that is an error with its name (`came_late`).

If a caller knows which gradients are final, a `ReadyPolicy` tells, as that of scheduled_ready.py
does.
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
    """A rule for which gradients are final, instead of the end of the backward.

    is_last: return whether the gradient just computed for this slot is final.
    late: return the error for a gradient computed after its slot's bucket was launched.
    """

    def is_last(self, slot: GradSlot, parameter: Tensor) -> bool: ...
    def late(self, slot: GradSlot) -> CommError: ...


class ScheduledReady(Protocol):
    """The interface by which a caller of `Reducer.scheduled()` tells which backwards are the last.

    last_backward: backwards in this block compute the last gradients of all parameters that they
        reach, except those with these ids.
    complete: these parameters get no more gradients, whether or not they got any.
    """

    def last_backward(self, still_pending: Collection[int] = ()) -> AbstractContextManager: ...
    def complete(self, parameters: Iterable[nn.Parameter]) -> None: ...


class BackwardQueue:
    """The reducers of one backward (graph task), in the order in which it reached their outputs."""

    def __init__(self, task: int):
        # Autograd's threads may complete gradients at once, but all ranks must launch in one order.
        self._task, self._launching = task, Lock()
        self._rounds: list[list[tuple[LaunchingReducer, bool]]] = [[]]
        if task != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def enqueue(self, reducer: LaunchingReducer, wait: bool) -> None:
        """Add a reducer, in a later round if it shares a parameter with one of this round.

        wait: whether the end of the backward waits for its sums.
        """
        round_ = self._rounds[-1]
        own_ids = set(map(id, reducer.parameters)) if round_ else set()
        if all(own_ids.isdisjoint(map(id, other.parameters)) for other, _ in round_):
            round_.append((reducer, wait))
        else:
            self._rounds.append([(reducer, wait)])

    def launch_ready(self) -> None:
        """Launch complete buckets, up to the first reducer that still has early buckets to
        launch.
        """
        with self._launching:
            for reducer, _ in self._rounds[0]:
                reducer.launch_complete()
                if reducer.has_early:
                    return

    def _end(self) -> None:
        """Launch the remaining buckets when the backward is over, round after round, and finish
        it.
        """
        rounds, self._rounds = self._rounds, [[]]
        for armed in rounds:
            for reducer, _ in armed:
                reducer.launch_early(self._task)
            for reducer, wait in armed:
                reducer.end(self._task, wait)


ARMING = Lock()
"""Lock held while a reducer is armed and enqueued, because autograd's threads may reach outputs at
the same time and a reducer must be armed only once."""
_of_task: WeakValueDictionary[int, BackwardQueue] = WeakValueDictionary()


def queue_of(task: int) -> BackwardQueue:
    """Return the queue of a graph task; the first call creates it, inside that task."""
    return _of_task.get(task) or _of_task.setdefault(task, BackwardQueue(task))


def came_late(spec: ParamSpec) -> CommError:
    """Return the error for a gradient computed after its bucket was launched."""
    return CommError(
        f"parameter {spec.name} received a gradient after it was taken for complete: call "
        f"finish() before the next backward, and where reentrant checkpointing uses it at times, "
        f"give torch.utils.checkpoint use_reentrant=False"
    )


def gives_any(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether the running backward gives any of these parameters its `.grad`."""
    edges = map(torch.autograd.graph.get_gradient_edge, parameters)
    try:
        return any(torch._C._will_engine_execute_node(edge.node) for edge in edges)
    except RuntimeError:  # torch raises for a leaf that is an input of autograd.grad
        return False

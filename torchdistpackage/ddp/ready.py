"""A reduction whose caller runs the backwards, of many microbatches and stages, and knows the last.

One rule: a bucket leaves when the last gradients of all its members are there, as ever in the one
order; which are the last is not found out by hooks but said. All ranks of a group say the same in
the same order, since they run the same program.

A parameter that gets several gradients in one block (a module that reentrant checkpointing runs
twice, a backward function that calls backward twice) is complete at its end. Which do is learned in
the first reduction, in which therefore nothing leaves before all is done.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn

from torchdistpackage.ddp.departures import Departures, ReductionPhase
from torchdistpackage.ddp.grad_bucket import came_late
from torchdistpackage.ddp.packed import GradSlot
from torchdistpackage.ddp.param_spec import ParamSpec


class SchedulableReducer(Protocol):
    """What a reducer is to this."""

    shared: list[ParamSpec]
    departures: Departures
    leaves_early: bool  # whether anything may leave before all is done


class ScheduledReady:
    """Made by `Reducer.steered()`, which says when it ends."""

    def __init__(self, reducer: SchedulableReducer):
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
            departures = self._reducer.departures
            for index in new:
                departures.pending_counts[departures.packed.slots[index].bucket] -= 1
            departures.send_complete()

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
        if self._reducer.departures.phase is ReductionPhase.IDLE:
            self._reducer.departures.begin()
        if not self._indices:
            # only now: a wrapper takes new parameters in at its first forward
            self._indices = {id(s.parameter): i for i, s in enumerate(self._reducer.shared)}

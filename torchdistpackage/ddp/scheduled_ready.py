"""The policy of final gradients for callers that run backwards by a plan, as pipelines do.

The caller runs the backwards of many micro-batches and stages and tells which are the last, in the
same order on all ranks of a group, because they run one program. A parameter may get several
gradients in one block: a module that reentrant checkpointing runs twice, or a backward function
    that
calls backward twice. Such a parameter is complete at the end of the reduction. The first reduction,
which launches nothing before the end, shows which parameters these are.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from torchdistpackage.ddp.bucket_comm import GradSlot
from torchdistpackage.ddp.ready import ReadyPolicy, ScheduledReady, came_late
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.errors import CommError


class LastBackwardPolicy(ReadyPolicy, ScheduledReady):
    """A policy that knows which gradients are final from its caller's plan of backwards."""

    def __init__(self, reducer: Reducer):
        self._reducer = reducer
        self._indices: dict[int, int] = {}
        self._complete: set[int] = set()
        self._pending: frozenset[int] | None = None  # None outside of `last_backward`
        # indices that got a gradient in this block and wait for the end of the reduction
        self._came: set[int] = set()

    @contextmanager
    def last_backward(self, still_pending: Collection[int] = ()) -> Iterator[None]:
        """Mark backwards in the block as the last ones of the parameters that they reach.

        still_pending: ids of parameters that get more gradients after it.
        """
        self._begin()
        self._pending = frozenset(still_pending)
        self._came.clear()
        try:
            yield
        finally:
            self._pending = None

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """Mark parameters that get no more gradients, whether or not they got any."""
        self._begin()
        indices = {self._indices[id(p)] for p in parameters if id(p) in self._indices}
        new = indices - self._complete
        self._complete |= new
        reducer = self._reducer
        if reducer.leaves_early:
            for index in new:
                reducer.complete(reducer.grad_buckets.slots[index])
            reducer.launch_complete()

    def is_last(self, slot: GradSlot, parameter: Tensor) -> bool:
        """Return whether the gradient just computed for the slot is final.

        Raises:
            CommError: the parameter was complete before.
        """
        index = slot.index
        if index in self._complete:
            raise self.late(slot)
        if self._pending is None or id(parameter) in self._pending:
            return False
        if slot.may_repeat or not self._reducer.leaves_early:
            if index in self._came:
                self._reducer.mark_repeating(slot)
            self._came.add(index)
            return False
        self._complete.add(index)
        return True

    def late(self, slot: GradSlot) -> CommError:
        """Return the error for a gradient computed after its bucket was launched."""
        return came_late(slot.spec)

    def _begin(self) -> None:
        """Begin the reduction, and look up the parameters in the first call."""
        self._reducer.begin()
        if not self._indices:
            # looked up late, because a wrapper may add parameters in its first forward
            self._indices = {id(s.parameter): i for i, s in enumerate(self._reducer.specs)}

"""Which gradients are final where the caller runs backwards by a plan, as pipelines do.

The caller runs the backwards of many microbatches and stages and says which are the last, in the
same order on all ranks of a group, since they run one program. A parameter that gets several
gradients in one block (a module that reentrant checkpointing runs twice, a backward function that
calls backward twice) is complete at its end. Which do is learned in the first reduction, in which
therefore nothing leaves before all is done.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from torchdistpackage.ddp.bucket_comm import GradSlot
from torchdistpackage.ddp.ready import ReadyPolicy, ScheduledReady, came_late
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.errors import CommError


class LastBackwardPolicy(ReadyPolicy, ScheduledReady):
    """Says which gradients of a reducer are final, by what its caller says of the backwards."""

    def __init__(self, reducer: Reducer):
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
        found = {self._indices[id(p)] for p in parameters if id(p) in self._indices}
        new = found - self._complete
        self._complete |= new
        reducer = self._reducer
        if reducer.leaves_early:
            for index in new:
                reducer.complete(reducer.grad_buckets.slots[index])
            reducer.launch_complete()

    def is_last(self, slot: GradSlot, parameter: Tensor) -> bool:
        """Whether the gradient is final and was not said to be by `complete`.

        Raises:
            CommError: it was.
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
        return came_late(slot.spec)

    def _begin(self) -> None:
        self._reducer.begin()
        if not self._indices:
            # only now: a wrapper takes new parameters in at its first forward
            self._indices = {id(s.parameter): i for i, s in enumerate(self._reducer.specs)}

"""What the late groups of a process share: the order of completion, and all that is in flight."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from torchdistpackage.errors import RaceError
from torchdistpackage.harness.late.call import LateCall
from torchdistpackage.harness.late.guard import Guard
from torchdistpackage.harness.late.orders import LATE, Order
from torchdistpackage.harness.late.watch import InFlightGuard

_PATIENCE_S = 0.02
"""How long a call that is to complete before its wait may take."""


Tensors = Sequence[Tensor]


class Queue(Protocol):
    """A group, whose calls are delivered in order."""

    calls: Sequence[LateCall]

    def deliver_next(self) -> None: ...


class Strictness(Protocol):
    """Looks at the tensors of a call (strict.py)."""

    def check(self, name: str, operation: str, tensors: Sequence[Tensor]) -> None: ...


class Observer:
    """Follows calls from stream to stream (streams.py); this one looks away."""

    def called(
        self, queue: Queue, name: str, reads: Tensors, writes: Tensors, call: LateCall | None
    ) -> None:
        """call: None if the caller's stream runs it."""

    def waited(self, call: LateCall) -> None:
        """The caller's stream waits."""


class World:
    """Use the instance of this module, `world`."""

    def __init__(self) -> None:
        self.strict: Strictness | None = None
        self.observer = Observer()
        self._begin(LATE, 0)

    def _begin(self, token: str, rank: int) -> None:
        self._order, self.queues = Order(token, rank), list[Queue]()
        self._open: list[LateCall] = []

    @contextmanager
    def job(self, token: str, rank: int) -> Iterator[None]:
        """Inside, calls complete in the order that `token` names.

        Raises:
            RaceError: a call was lost.
        """
        self._begin(token, rank)
        with InFlightGuard(self._in_flight):
            yield
        self._look_for_lost()
        self._begin(LATE, 0)

    def _in_flight(self) -> list[LateCall]:
        return [call for queue in self.queues for call in queue.calls]

    def _look_for_lost(self) -> None:
        self._open = [call for call in self._open if not call.done]
        if lost := [call for call in self._open if call.is_lost]:
            self._open = []
            more = f" (nor for {len(lost) - 1} more calls)" if len(lost) > 1 else ""
            raise RaceError(
                f"{lost[0].name}: nobody waited for it{more}, and its handle is gone, but what it "
                f"writes is still in use{lost[0].where}"
            )

    def issued(self, queue: Queue, call: LateCall) -> None:
        self._open.append(call)
        if queue not in self.queues:
            self.queues.append(queue)

    def forget(self, queue: Queue) -> None:
        """A group ends."""
        if queue in self.queues:
            self.queues.remove(queue)

    def draw(self) -> None:
        """Complete calls ahead of their wait, as the order has it.

        Raises:
            RaceError: a call was lost.
        """
        self._look_for_lost()
        if self._order.at_wait_only:
            return
        for queue in self.queues:
            while queue.calls and self._order.completes():
                if not queue.calls[0].transfer.is_ready(_PATIENCE_S):
                    break
                queue.deliver_next()

    def claim(self, own: Queue, name: str, guards: Sequence[Guard]) -> None:
        """Make way for a call that is about to use these tensors.

        A call of the same group comes after those before it, which are delivered if they hold one.

        Raises:
            RaceError: another group's call holds one.
        """
        for queue in self.queues:
            while last := next((c for c in queue.calls if _meets(c, guards)), None):
                if queue is not own:
                    raise RaceError(
                        f"{name}: takes a tensor that {last.name} has in flight{last.where}"
                    )
                queue.deliver_next()


def _meets(call: LateCall, guards: Sequence[Guard]) -> bool:
    return any(
        (one.written or other.written)
        and one.span[0] < other.span[1]
        and other.span[0] < one.span[1]
        for one in call.guards
        for other in guards
    )


world = World()

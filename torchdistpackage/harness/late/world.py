"""State that the late groups of a process share: the order of completion, and calls in flight.

Operations on tensors in flight are named at the line that runs them. What no operation shows, such
as NumPy's views of a tensor, is found by its bits when the call is delivered (call.py).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchdistpackage.comm.nested import leaves_of
from torchdistpackage.errors import RaceError
from torchdistpackage.harness.late.call import (
    CHANGED,
    READ,
    WRITTEN,
    Guard,
    LateCall,
    issued_at,
    span,
)
from torchdistpackage.harness.late.orders import LATE, Order
from torchdistpackage.thread_ranks.own_backend import Tensors

COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default}
"""Copies between host and device, which block the host."""
_PATIENCE_S = 0.02
"""Limit in seconds for a call that the order completes before its wait."""
_METADATA = {
    "as_strided_", "detach_", "empty_like", "full_like", "is_pinned", "is_same_size", "new_empty",
    "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones_like", "rand_like",
    "randint_like", "randn_like", "record_stream", "resize_", "set_", "squeeze_", "swapdims_",
    "t_", "transpose_", "unsqueeze_", "zeros_like",
}  # fmt: skip


class Queue(Protocol):
    """A group whose calls are delivered in order."""

    calls: Sequence[LateCall]

    def deliver_next(self) -> None: ...


class Observer:
    """Follows calls from stream to stream (streams.py); this base class does nothing."""

    def called(
        self, queue: Queue, name: str, reads: Tensors, writes: Tensors, call: LateCall | None
    ) -> None:
        """Note a call. call: None if the caller's stream runs it."""

    def waited(self, call: LateCall) -> None:
        """Note that the caller's stream waits for `call`."""


class World:
    """Use the instance of this module, `world`."""

    def __init__(self) -> None:
        self.check: Callable[[str, str, Tensors], None] | None = None
        """Function that checks the tensors of a call (strict.py)."""
        self.observer = Observer()
        self._begin(LATE, 0)

    def _begin(self, token: str, rank: int) -> None:
        self._order, self.queues = Order(token, rank), list[Queue]()
        self._open: list[LateCall] = []

    @contextmanager
    def job(self, token: str, rank: int) -> Iterator[None]:
        """Complete calls inside the block in the order that `token` names. Raises RaceError if a
        call was never waited for.
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
            more = f" (nor for {len(lost) - 1} others)" if len(lost) > 1 else ""
            raise RaceError(
                f"{lost[0].name}: no call waited for it{more}, and its handle is gone, but what it "
                f"writes is still in use{lost[0].where}"
            )

    def issued(self, queue: Queue, call: LateCall) -> None:
        self._open.append(call)
        if queue not in self.queues:
            self.queues.append(queue)

    def forget(self, queue: Queue) -> None:
        """Forget the queue of a group that ended."""
        if queue in self.queues:
            self.queues.remove(queue)

    def draw(self) -> None:
        """Complete calls ahead of their wait, in the order of the token. RaceError: one was
        lost.
        """
        self._look_for_lost()
        if self._order.at_wait_only:
            return
        for queue in self.queues:
            while queue.calls and self._order.completes():
                if not queue.calls[0].transfer.is_ready(_PATIENCE_S):
                    break
                queue.deliver_next()

    def claim(self, own_queue: Queue, name: str, guards: Sequence[Guard]) -> None:
        """Deliver calls of the group that hold tensors which its next call is about to use.

        Raises:
            RaceError: another group's call holds one.
        """
        for queue in self.queues:
            while last := next((c for c in queue.calls if _meets(c, guards)), None):
                if queue is not own_queue:
                    raise RaceError(
                        f"{name}: takes a tensor that {last.name} has in flight{last.where}"
                    )
                queue.deliver_next()


def _meets(call: LateCall, guards: Sequence[Guard]) -> bool:
    return any(
        (guard.written or other.written)
        and guard.span[0] < other.span[1]
        and other.span[0] < guard.span[1]
        for guard in call.guards
        for other in guards
    )


class InFlightGuard(TorchDispatchMode):
    """Inside, an operation that reads what a call in flight writes, or writes what it uses, raises
    RaceError."""

    def __init__(self, calls: Callable[[], list[LateCall]]):
        super().__init__()
        self._calls = calls

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (calls := self._calls()) and (written := written_arguments(func)) is not None:
            for at, x in tensors_of(args, kwargs):
                _look(calls, func, x, at in written)
        return func(*args, **kwargs)


def _look(calls: list[LateCall], func, x: Tensor, writes: bool) -> None:
    if x.layout is not torch.strided or x.is_meta or not x.numel():
        return
    first, end = span(x)
    for call in calls:
        for guard in call.guards:
            one, other = guard.span
            if one < end and first < other and (writes or guard.written):
                _raise(call, guard, func, writes)


def _raise(call: LateCall, guard: Guard, func, writes: bool) -> None:
    misuse = READ
    if writes:
        misuse = WRITTEN if guard.written else CHANGED
    raise RaceError(
        f"{call.name}, tensor of shape {guard.shape}: {misuse}, by {func}{issued_at()}\n"
        f"the call was issued{call.where}"
    )


@cache
def written_arguments(func) -> frozenset[int | str] | None:
    """Return which arguments an operation writes, by index and name; None if it touches no data."""
    arguments = func._schema.arguments
    aliases = [a.alias_info for a in arguments]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    if is_view or func._schema.name.rpartition(":")[2] in _METADATA:
        return None
    places = [i for i, alias in enumerate(aliases) if alias is not None]
    return frozenset([*places, *(arguments[i].name for i in places)])


def storages_of(tensors: Iterable[tuple[object, Tensor]]) -> set[int]:
    return {x.untyped_storage()._cdata for _, x in tensors if x.layout is torch.strided}


def made_in(result: object, old: set[int]) -> list[Tensor]:
    """Return tensors of a result that are in other storages than the `old` ones; the rest are views
    of inputs.
    """
    tensors = [x for x in leaves_of(result) if isinstance(x, Tensor)]
    strided = [x for x in tensors if x.layout is torch.strided]
    return [x for x in strided if x.untyped_storage()._cdata not in old]


def tensors_of(args, kwargs) -> Iterator[tuple[int | str, Tensor]]:
    for at, value in (*enumerate(args), *kwargs.items()):
        for x in value if isinstance(value, list | tuple) else (value,):
            if isinstance(x, Tensor):
                yield at, x


world = World()

"""Executors of functions, kept from call to call.

One rule: from its second run on an executor sends no headers, so all ranks take the one of an
earlier call or none does. In the word that they exchange before each step every rank says a number
for all that its messages follow from; what is kept is found by the numbers of all ranks. Whoever
forgets something takes a new number, by which nobody finds anything.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchdistpackage.comm.creation import is_alive
from torchdistpackage.comm.primitives import Group
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.resolve_schedule import (
    Order,
    has_backward,
    resolve_schedule,
)
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.generators.registry import evaluation

MOST_KEPT = 8
"""Executors of one function: forms of its batches, numbers of microbatches, groups."""

_numbers = count(1)


class _CacheEntry:
    """What is kept with one function, and its number.

    counted: whether the function, of a last stage, returns (sum, count), once it has.
    in_use: from the choice of an executor to the end of its run; found so, that run has failed.
    """

    def __init__(self) -> None:
        self.counted: bool | None = None
        self.clear()

    def clear(self) -> None:
        self.number = next(_numbers)
        self.executors: dict[tuple[int, ...], Executor] = {}
        self.in_use = False


class _Cache(threading.local):
    """Of the functions of a rank, which may be a thread. Nobody lives on because of them."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[object, dict[int, _CacheEntry]] = WeakKeyDictionary()


_cache = _Cache()


class CachedExecutor:
    """The place of one call among what is kept; `note` is for the other ranks.

    form: all else that messages follow from, as plain values.
    """

    def __init__(self, functions: Sequence[Callable], group: Group, form: object):
        shelves = [_entry_of(function) for function in functions]
        self._shelf = shelves[0]
        if self._shelf.in_use:
            self._shelf.clear()
        # a group or schedule that is named by its address lives as long as the executor does
        text = repr(([shelf.number for shelf in shelves], id(group), form))
        digest = blake2b(text.encode(), digest_size=8).digest()
        self.note = int.from_bytes(digest, "little", signed=True)

    def executor(self, notes: Iterable[int], make: Callable[[], Executor]) -> Executor:
        """Of an earlier call in which all ranks had these notes; else a new one."""
        key, shelf = tuple(notes), self._shelf
        shelf.in_use = True
        if key not in shelf.executors:
            _forget_ended()
            executor = make()
            if len(shelf.executors) == MOST_KEPT:
                shelf.clear()
                return executor
            shelf.executors[key] = executor
        return shelf.executors[key]

    def succeeded(self) -> None:
        """The run is over, and what it has learned holds."""
        self._shelf.in_use = False

    def failed(self) -> None:
        """The run has ended in an exception: what was built for it goes now."""
        self._shelf.clear()


def form_of(value: object) -> object:
    """What the shapes that a stage makes of an input can follow from."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, Mapping):
        return [(repr(key), form_of(member)) for key, member in value.items()]
    if isinstance(value, tuple | list):
        return [form_of(member) for member in value]
    return repr(value) if isinstance(value, int | str | None) else type(value).__name__


def form_around(device: torch.device, optimizer: torch.optim.Optimizer | None) -> object:
    """The same of what is around a call: autocast, and which parameters are trained."""
    kind, groups = device.type, [] if optimizer is None else optimizer.param_groups
    trained = "".join("01"[p.requires_grad] for g in groups for p in g["params"])
    is_autocast = torch.is_autocast_enabled(kind)
    return str(device), is_autocast and torch.get_autocast_dtype(kind), trained


def schedule_for(
    order: Order, num_ranks: int, num_microbatches: int, chunks: int, forward_only: bool
) -> Schedule:
    """The same object for the same order: made and checked once.

    Raises:
        ScheduleError: as `resolve_schedule`, or it has no backwards and is to train.
    """
    asked = (order, num_ranks, num_microbatches, chunks, forward_only)
    is_table = not isinstance(order, Schedule) and ("," in str(order) or "." in str(order))
    try:
        hash(asked)
    except TypeError:
        return _made(*asked)
    return _one(_made(*asked)) if is_table else _remembered(*asked)  # a file may change


def _made(
    order: Order, num_ranks: int, num_microbatches: int, chunks: int, forward_only: bool
) -> Schedule:
    schedule = resolve_schedule(order, num_ranks, num_microbatches, chunks)
    return evaluation(schedule, num_microbatches) if forward_only else has_backward(schedule)


_remembered = lru_cache(maxsize=16, typed=True)(_made)


@lru_cache(maxsize=16)
def _one(schedule: Schedule) -> Schedule:
    """Of equal ones the first."""
    return schedule


def counted_by(function: Callable) -> bool | None:
    """Whether its losses are (sum, count); None before it has returned one."""
    return _entry_of(function).counted


def remember_counted(function: Callable, counted: bool) -> None:
    _entry_of(function).counted = counted


def _entry_of(function: Callable) -> _CacheEntry:
    """A bound method is made anew whenever it is asked for: what counts is whose it is."""
    code, owner = getattr(function, "__func__", None), getattr(function, "__self__", None)
    of, which = (function, 0) if code is None or owner is None else (owner, id(code))
    try:
        return _cache.of.setdefault(of, {}).setdefault(which, _CacheEntry())
    except TypeError:  # of a kind that has no weak references, or no hash
        return _CacheEntry()


def _forget_ended() -> None:
    """Executors hold their group."""
    for shelves in list(_cache.of.values()):
        for shelf in shelves.values():
            if not all(is_alive(executor.group) for executor in shelf.executors.values()):
                shelf.clear()

"""A call of functions as it is for this rank, as all ranks have agreed on it, and its executor,
which is cached from call to call.

What a call gets wrong is found before anything is sent, and raised by all ranks. From its second
run on an executor sends no headers, so all ranks take the one of an earlier call or none does:
before each step every rank gives the others a number for all that its messages follow from, and a
cached executor is found by the numbers of all ranks. A rank that has dropped something takes a new
number, which finds nothing.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchdistpackage.comm.creation import is_alive
from torchdistpackage.comm.groups import refuse_interrupted, step_over
from torchdistpackage.comm.primitives import Group, device_of, is_queued
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.agreement import StepAgreement
from torchdistpackage.parallel.pipeline.executor import Backward, Executor, Forward
from torchdistpackage.parallel.pipeline.microbatches import form_of, samples_in, sizes_of
from torchdistpackage.parallel.pipeline.stages import Signature
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.generators import evaluation
from torchdistpackage.schedule.resolve import Order, has_backward, resolve_schedule

FwdFn = Callable[..., object]
BwdFn = Callable[..., object]
MOST_KEPT = 8
"""Executors of one function: forms of its batches, numbers of microbatches, groups."""


class FunctionCall:
    """A call as it is for this rank, by stage, as all ranks have agreed on it.

    sizes: samples of each microbatch. counted: whether losses are (sum, count), as the last
    stage's function gave them before; None before the first step.
    """

    def __init__(
        self,
        fwd_fn: FwdFn | Sequence[FwdFn],
        bwd_fn: BwdFn | Sequence[BwdFn | None] | None,
        inputs: object,
        order: Order,
        group: Group,
        num_microbatches: int,
        forward_only: bool,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        timeout_s: float | None,
        dynamic_shapes: bool,
        num_parts: int | None = None,
    ):
        """num_parts: of a message, None where it is not parted."""
        refuse_interrupted(group)
        listed = isinstance(fwd_fn, list | tuple)
        functions = list(fwd_fn) if listed else [cast(FwdFn, fwd_fn)]
        what, problem, num_samples, note, device = "", "", 0, (0, 0), torch.device("cpu")
        try:
            _check_callable("fwd_fn", functions)
            backwards = _each(bwd_fn, functions, "bwd_fn", isinstance(bwd_fn, list | tuple))
            _check_callable("bwd_fn", [f for f in backwards if f is not None])
            own = [
                [] if x is None else list(x) if isinstance(x, list | tuple) else [x]
                for x in _each(inputs, functions, "inputs", listed)
            ]
            self.schedule = schedule = schedule_for(
                order, group.size(), num_microbatches, len(functions), forward_only
            )
            self.last, stages = schedule.num_stages - 1, schedule.stages_of(group.rank())
            if not forward_only:
                backwards = [
                    _of_two(f, s == self.last) for f, s in zip(backwards, stages, strict=True)
                ]
            self.forwards: dict[int, FwdFn] = dict(zip(stages, functions, strict=True))
            self.backwards: dict[int, BwdFn | None] = dict(zip(stages, backwards, strict=True))
            self.inputs: dict[int, list[object]] = dict(zip(stages, own, strict=True))
            # what is not cut may be of any length
            if num_microbatches > 1:
                num_samples, problem = samples_in([("inputs", own)])
            device = _device(group, own, optimizer)
            note = self._note(
                id(group),
                id(schedule),
                num_parts,
                form_around(device, optimizer),
                "dynamic" if dynamic_shapes else form_of(own),
            )
            what = (
                f"{schedule.name} of {schedule.num_stages} stages, {num_microbatches} microbatches"
                + ", dynamic_shapes" * dynamic_shapes
            )
        except ScheduleError as error:
            problem = str(error)
        agreement = StepAgreement(group, what, num_samples, problem, note)
        num_samples = agreement.settle()
        self.sizes = sizes_of(num_samples or num_microbatches, num_microbatches)
        known = agreement.notes[self.schedule.placement[-1]][0]
        self.counted: bool | None = (None, False, True)[known]
        self._executor = self._entry.executor(
            tuple(number for _, number in agreement.notes),
            lambda: Executor(self.schedule, group, device=device, dynamic_shapes=dynamic_shapes),
        )
        if self._executor.timeout_s != timeout_s:
            self._executor.timeout_s = timeout_s

    def _note(self, *form: object) -> tuple[int, int]:
        """For the other ranks: (0: unknown, 1: a mean, 2: (sum, count), where the last function is;
        a number for all that messages follow from).

        form: that, but for the functions. A group or schedule that is named by its address lives as
        long as the executor does.
        """
        entries = {s: _entry_of(function) for s, function in self.forwards.items()}
        self._entry, *_ = entries.values()
        self._last_entry = entries.get(self.last)
        if self._entry.in_use:
            self._entry.clear()
        text = repr(([entry.number for entry in entries.values()], form))
        digest = blake2b(text.encode(), digest_size=8).digest()
        counted = None if self._last_entry is None else self._last_entry.counted
        known = 0 if counted is None else 1 + counted
        return known, int.from_bytes(digest, "little", signed=True)

    def run(
        self,
        forward: Forward,
        backward: Backward | None = None,
        reducers: Sequence[Reducer] = (),
        weights: Sequence[float | Tensor] | None = None,
    ) -> None:
        """All microbatches; an executor whose run ends in an exception is dropped."""
        executor = self._executor
        try:
            with step_over(executor.group):
                executor.run(forward, backward, reducer=reducers, weights=weights)
        except BaseException:
            self._entry.clear()
            raise
        self._entry.in_use = False

    def remember(self, counted: bool) -> None:
        """Note whether losses count, for later calls of the last stage's function."""
        if self._last_entry is not None:
            self._last_entry.counted = counted


def _check_callable(name: str, values: Sequence[object]) -> None:
    """Raises ScheduleError: one of them is no function."""
    wrong = [value for value in values if not callable(value)]
    if wrong:
        raise ScheduleError(f"{name} is {wrong[0]!r}; give a function")


def _of_two(bwd_fn: BwdFn | None, is_last: bool) -> BwdFn | None:
    """`bwd_fn`, to be called with (output, gradient); on the last stage it may take one of them.

    Raises ScheduleError if it takes another number.
    """
    takes = None if bwd_fn is None else Signature.of(bwd_fn)
    if takes is None or not (misfit := takes.misfit(2)):
        return bwd_fn
    if is_last and not takes.misfit(1):
        return lambda output, _: cast(BwdFn, bwd_fn)(output)
    alone = "; on the last stage with the output alone, if it takes one" if is_last else ""
    raise ScheduleError(f"bwd_fn {misfit}; it is called with (output, gradient){alone}")


def _each(value: object, functions: Sequence[FwdFn], name: str, listed: bool) -> list:
    """One for each function; raises ScheduleError if there is another number."""
    if not listed or (value is None and len(functions) > 1):
        return [value] * len(functions)
    if not isinstance(value, Sequence) or len(value) != len(functions):
        number = len(value) if isinstance(value, Sequence) else 1
        raise ScheduleError(
            f"{name} has {number} entries for {len(functions)} functions; give one for each, None "
            f"where there is nothing"
        )
    return list(value)


def _device(
    group: Group, own: Iterable[Sequence[object]], optimizer: torch.optim.Optimizer | None
) -> torch.device:
    """Where messages arrive: of a group of GPUs there, wherever the batch is kept until `fwd_fn`
    moves it; else where this rank's inputs or parameters are, or the current device.
    """
    if is_queued(group):
        return device_of(group)
    tensors = [x for mine in own for x in mine if isinstance(x, Tensor)]
    if not tensors and optimizer is not None:
        tensors = [p for g in optimizer.param_groups for p in g["params"]]
    if tensors:
        return tensors[0].device
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def form_around(device: torch.device, optimizer: torch.optim.Optimizer | None) -> object:
    """The rest that messages follow from: autocast, and which parameters are trained."""
    kind, groups = device.type, [] if optimizer is None else optimizer.param_groups
    trained = "".join("01"[p.requires_grad] for g in groups for p in g["params"])
    is_autocast = torch.is_autocast_enabled(kind)
    return str(device), is_autocast and torch.get_autocast_dtype(kind), trained


def schedule_for(order: Order, *asked: int) -> Schedule:
    """The same object for the same order: made and checked once.

    asked: ranks, microbatches, chunks, whether only forwards. Raises ScheduleError: as
    `resolve_schedule`, or it has no backwards and is to train.
    """
    is_table = not isinstance(order, Schedule) and ("," in str(order) or "." in str(order))
    try:
        return _first_equal(_made(order, *asked)) if is_table else _remembered(order, *asked)
    except TypeError:  # no hash
        return _made(order, *asked)


def _made(
    order: Order, num_ranks: int, num_microbatches: int, chunks: int, forward_only: bool
) -> Schedule:
    schedule = resolve_schedule(order, num_ranks, num_microbatches, chunks)
    return evaluation(schedule, num_microbatches) if forward_only else has_backward(schedule)


_remembered = lru_cache(maxsize=16, typed=True)(_made)


@lru_cache(maxsize=16)
def _first_equal(schedule: Schedule) -> Schedule:
    """The table's file may change, so it is read each time."""
    return schedule


# -- executors of earlier calls ------------------------------------------------------------------

_numbers = count(1)


class _CacheEntry:
    """The cache of one function, and its number.

    counted: whether the function, of a last stage, returns (sum, count); None until it has
    returned. in_use: from the choice of an executor to the end of its run; if it is still set at
    the next choice, that run has failed.
    """

    def __init__(self) -> None:
        self.counted: bool | None = None
        self.clear()

    def clear(self) -> None:
        self.number = next(_numbers)
        self.executors: dict[tuple[int, ...], Executor] = {}
        self.in_use = False

    def executor(self, notes: tuple[int, ...], make: Callable[[], Executor]) -> Executor:
        """The executor of an earlier call in which all ranks had these notes, else a new one."""
        self.in_use = True
        if notes not in self.executors:
            # executors hold their group
            for entry in [entry for entries in _cache.of.values() for entry in entries.values()]:
                if not all(is_alive(executor.group) for executor in entry.executors.values()):
                    entry.clear()
            executor = make()
            if len(self.executors) == MOST_KEPT:
                self.clear()
                return executor
            self.executors[notes] = executor
        return self.executors[notes]


class _Cache(threading.local):
    """The entries of a rank, which may be a thread, by function; it keeps no function alive."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[object, dict[int, _CacheEntry]] = WeakKeyDictionary()


_cache = _Cache()


def _entry_of(function: Callable) -> _CacheEntry:
    """The entry of a function; of a bound method, which each look makes anew, by owner and code."""
    code, owner = getattr(function, "__func__", None), getattr(function, "__self__", None)
    of, which = (function, 0) if code is None or owner is None else (owner, id(code))
    try:
        return _cache.of.setdefault(of, {}).setdefault(which, _CacheEntry())
    except TypeError:  # of a kind that has no weak references, or no hash
        return _CacheEntry()

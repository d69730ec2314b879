"""A call of `forward_backward` on this rank, after all ranks agreed on it, and its cached executor.

All ranks check the call before anything is sent, and all raise if one finds a mistake. An executor
sends no headers from its second run on, so either all ranks take the executor of an earlier call or
none does. Before each step every rank therefore sends the others a number for all that determines
its messages, and the numbers of all ranks together are the key of a cached executor. A rank that
has dropped an executor takes a new number, which no key has.
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
"""Executors that are cached for one function: one for each form of batch, number of microbatches
and group."""


class FunctionCall:
    """A call on this rank, by stage, after all ranks agreed on it.

    sizes: samples of each microbatch. counted: True if losses are (sum, count), as in an earlier
    call of the last stage's function; None before its first step.
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
        """Agree on the call. num_parts: slices of a message, None if messages are not scattered."""
        refuse_interrupted(group)
        listed = isinstance(fwd_fn, list | tuple)
        functions = list(fwd_fn) if listed else [cast(FwdFn, fwd_fn)]
        # a rank that finds a mistake still takes part in the agreement, with these values
        label = problem = ""
        num_samples = 0
        note = (0, 0)
        device = torch.device("cpu")
        try:
            _check_callable("fwd_fn", functions)
            backwards = _each(bwd_fn, functions, "bwd_fn", isinstance(bwd_fn, list | tuple))
            _check_callable("bwd_fn", [f for f in backwards if f is not None])
            stage_inputs = [
                [] if x is None else list(x) if isinstance(x, list | tuple) else [x]
                for x in _each(inputs, functions, "inputs", listed)
            ]
            self.schedule = schedule = schedule_for(
                order, group.size(), num_microbatches, len(functions), forward_only
            )
            self.last = schedule.num_stages - 1
            stages = schedule.stages_of(group.rank())
            if not forward_only:
                backwards = [
                    _of_two(f, s == self.last) for f, s in zip(backwards, stages, strict=True)
                ]
            self.forwards: dict[int, FwdFn] = dict(zip(stages, functions, strict=True))
            self.backwards: dict[int, BwdFn | None] = dict(zip(stages, backwards, strict=True))
            self.inputs: dict[int, list[object]] = dict(zip(stages, stage_inputs, strict=True))
            # inputs that are not cut may have any length
            if num_microbatches > 1:
                num_samples, problem = samples_in([("inputs", stage_inputs)])
            device = _device(group, stage_inputs, optimizer)
            note = self._note(
                id(group),
                id(schedule),
                num_parts,
                form_around(device, optimizer),
                "dynamic" if dynamic_shapes else form_of(stage_inputs),
            )
            label = (
                f"{schedule.name} of {schedule.num_stages} stages, {num_microbatches} microbatches"
                + ", dynamic_shapes" * dynamic_shapes
            )
        except ScheduleError as error:
            problem = str(error)
        agreement = StepAgreement(group, label, num_samples, problem, note)
        num_samples = agreement.settle()
        self.sizes = sizes_of(num_samples or num_microbatches, num_microbatches)
        counted_code = agreement.notes[self.schedule.placement[-1]][0]
        self.counted: bool | None = (None, False, True)[counted_code]
        self._executor = self._entry.executor(
            tuple(number for _, number in agreement.notes),
            lambda: Executor(self.schedule, group, device=device, dynamic_shapes=dynamic_shapes),
        )
        if self._executor.timeout_s != timeout_s:
            self._executor.timeout_s = timeout_s

    def _note(self, *form: object) -> tuple[int, int]:
        """Return this rank's note to the others: (code of the loss, number of its message form).

        The code is 0: unknown, 1: a mean, 2: (sum, count); the last stage's rank knows it. form:
        all that determines messages, except the functions. It names group and schedule by id,
        which is safe because the executor keeps them alive.
        """
        entries = {s: _entry_of(function) for s, function in self.forwards.items()}
        self._entry, *_ = entries.values()
        self._last_entry = entries.get(self.last)
        if self._entry.in_use:
            self._entry.clear()
        text = repr(([entry.number for entry in entries.values()], form))
        digest = blake2b(text.encode(), digest_size=8).digest()
        counted = None if self._last_entry is None else self._last_entry.counted
        counted_code = 0 if counted is None else 1 + counted
        return counted_code, int.from_bytes(digest, "little", signed=True)

    def run(
        self,
        forward: Forward,
        backward: Backward | None = None,
        reducers: Sequence[Reducer] = (),
        weights: Sequence[float | Tensor] | None = None,
    ) -> None:
        """Run all microbatches; drop the executor if its run raises."""
        executor = self._executor
        try:
            with step_over(executor.group):
                executor.run(forward, backward, reducer=reducers, weights=weights)
        except BaseException:
            self._entry.clear()
            raise
        self._entry.in_use = False

    def remember(self, counted: bool) -> None:
        """Remember for later calls whether the last stage's function returns (sum, count)."""
        if self._last_entry is not None:
            self._last_entry.counted = counted


def _check_callable(name: str, values: Sequence[object]) -> None:
    """Check that all values are functions; raises ScheduleError."""
    wrong = [value for value in values if not callable(value)]
    if wrong:
        raise ScheduleError(f"{name} is {wrong[0]!r}; give a function")


def _of_two(bwd_fn: BwdFn | None, is_last: bool) -> BwdFn | None:
    """Return `bwd_fn` as a function of (output, gradient).

    On the last stage it may take the output alone. Raises ScheduleError if it takes another number
    of arguments.
    """
    takes = None if bwd_fn is None else Signature.of(bwd_fn)
    if takes is None or not (misfit := takes.misfit(2)):
        return bwd_fn
    if is_last and not takes.misfit(1):
        return lambda output, _: cast(BwdFn, bwd_fn)(output)
    alone = "; on the last stage with the output alone, if it takes one" if is_last else ""
    raise ScheduleError(f"bwd_fn {misfit}; it is called with (output, gradient){alone}")


def _each(value: object, functions: Sequence[FwdFn], name: str, listed: bool) -> list:
    """Return one value for each function; raises ScheduleError if their number differs."""
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
    group: Group, inputs: Iterable[Sequence[object]], optimizer: torch.optim.Optimizer | None
) -> torch.device:
    """Return the device where messages arrive.

    With a queued backend it is the group's device, as `fwd_fn` may move the batch there. Otherwise
    it is the device of this rank's inputs or parameters, or the current device.
    """
    if is_queued(group):
        return device_of(group)
    tensors = [x for stage_inputs in inputs for x in stage_inputs if isinstance(x, Tensor)]
    if not tensors and optimizer is not None:
        tensors = [p for g in optimizer.param_groups for p in g["params"]]
    if tensors:
        return tensors[0].device
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def form_around(device: torch.device, optimizer: torch.optim.Optimizer | None) -> object:
    """Return the rest that determines messages: device, autocast, and the trained parameters."""
    kind = device.type
    groups = [] if optimizer is None else optimizer.param_groups
    trained = "".join("01"[p.requires_grad] for g in groups for p in g["params"])
    is_autocast = torch.is_autocast_enabled(kind)
    return str(device), is_autocast and torch.get_autocast_dtype(kind), trained


def schedule_for(order: Order, *asked: int) -> Schedule:
    """Return the schedule of an order; the same order gives the same object, checked once.

    asked: ranks, microbatches, chunks, forward_only. Raises ScheduleError as `resolve_schedule`, or
    if it has no backwards and forward_only is False.
    """
    is_table = not isinstance(order, Schedule) and ("," in str(order) or "." in str(order))
    try:
        return (
            _first_equal(_new_schedule(order, *asked)) if is_table else _remembered(order, *asked)
        )
    except TypeError:  # the order cannot be hashed, so it cannot be cached
        return _new_schedule(order, *asked)


def _new_schedule(
    order: Order, num_ranks: int, num_microbatches: int, chunks: int, forward_only: bool
) -> Schedule:
    schedule = resolve_schedule(order, num_ranks, num_microbatches, chunks)
    return evaluation(schedule, num_microbatches) if forward_only else has_backward(schedule)


_remembered = lru_cache(maxsize=16, typed=True)(_new_schedule)


@lru_cache(maxsize=16)
def _first_equal(schedule: Schedule) -> Schedule:
    """Return the first schedule that equals `schedule`.

    A table's file may change, so the caller reads it each time.
    """
    return schedule


# -- executors of earlier calls ------------------------------------------------------------------

_numbers = count(1)


class _CacheEntry:
    """The cache of one function, and its number.

    counted: True if the function, of a last stage, returns (sum, count); None until it has
    returned. in_use: set from the choice of an executor to the end of its run; if it is still set
    at the next choice, that run has failed.
    """

    def __init__(self) -> None:
        self.counted: bool | None = None
        self.clear()

    def clear(self) -> None:
        self.number = next(_numbers)
        self.executors: dict[tuple[int, ...], Executor] = {}
        self.in_use = False

    def executor(self, notes: tuple[int, ...], make: Callable[[], Executor]) -> Executor:
        """Return the executor of an earlier call with these notes of all ranks, or a new one."""
        self.in_use = True
        if notes not in self.executors:
            # executors keep their group alive, so drop those of ended groups
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
    """The cache entries of a rank, which may be a thread, by function; keeps no function alive."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[object, dict[int, _CacheEntry]] = WeakKeyDictionary()


_cache = _Cache()


def _entry_of(function: Callable) -> _CacheEntry:
    """Return the cache entry of a function.

    Each access makes a new bound method, so the entry of one is found by owner and code.
    """
    code = getattr(function, "__func__", None)
    owner = getattr(function, "__self__", None)
    key, sub_key = (function, 0) if code is None or owner is None else (owner, id(code))
    try:
        return _cache.of.setdefault(key, {}).setdefault(sub_key, _CacheEntry())
    except TypeError:  # the object has no weak references, or no hash
        return _CacheEntry()

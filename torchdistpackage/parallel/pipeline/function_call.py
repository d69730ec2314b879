"""What a call of functions means on this rank, as all ranks have agreed on it, and its executor,
which is cached from call to call.

One rule: what a call gets wrong is found before anything is sent, and raised by all ranks. From its
second run on an executor sends no headers, so all ranks take the one of an earlier call or none
does. Before each step every rank gives the others a number for all that its messages follow from
(`CachedExecutor.note`), and a cached executor is found by the numbers of all ranks. A rank that has
dropped something takes a new number, which finds nothing.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchdistpackage.comm.creation import is_alive
from torchdistpackage.comm.primitives import Group, device_of, is_queued
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.agreement import (
    StepAgreement,
    refuse_interrupted,
    step_over,
)
from torchdistpackage.parallel.pipeline.executor import Backward, Executor, Forward
from torchdistpackage.parallel.pipeline.microbatches import samples_in, sizes_of
from torchdistpackage.parallel.pipeline.resolve_schedule import (
    Order,
    has_backward,
    resolve_schedule,
)
from torchdistpackage.parallel.pipeline.stages import Signature
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.generators.registry import evaluation

FwdFn = Callable[..., object]
BwdFn = Callable[..., object]
MOST_KEPT = 8
"""Executors of one function: forms of its batches, numbers of microbatches, groups."""

_numbers = count(1)


@dataclass
class FunctionCall:
    """What the call means, by stage of this rank, agreed on by all ranks."""

    schedule: Schedule
    forwards: dict[int, FwdFn]
    backwards: dict[int, BwdFn | None]
    inputs: dict[int, list[object]]
    cached: "CachedExecutor"
    executor: Executor = field(init=False)
    sizes: Sequence[int] = ()
    """Samples of each microbatch."""
    counted: bool | None = None
    """Whether losses are (sum, count), as the last stage's function gave them before."""

    def run(
        self, forward: Forward, backward: Backward | None = None, reducer: Reducer | None = None
    ) -> None:
        """All microbatches; what an exception ends is not kept."""
        try:
            with step_over(self.executor.group):
                self.executor.run(forward, backward, reducer=reducer)
        except BaseException:
            self.cached.failed()
            raise
        self.cached.succeeded()

    def remember(self, counted: bool) -> None:
        """For the next call with this function of the last stage, if it is here."""
        function = self.forwards.get(self.schedule.num_stages - 1)
        if function is not None:
            remember_counted(function, counted)

    def known_counted(self) -> int:
        """As the last stage's function is here: 0: not known, 1: one number, 2: (sum, count)."""
        function = self.forwards.get(self.schedule.num_stages - 1)
        counted = None if function is None else counted_by(function)
        return 0 if counted is None else 1 + counted

    @property
    def has_own_backward(self) -> bool:
        return any(self.backwards.values())

    @classmethod
    def of(
        cls,
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
    ) -> "FunctionCall":
        """num_parts: of a message, None where it is whole."""
        refuse_interrupted(group)
        job, what, problem, num_samples = None, "", "", 0
        device = torch.device("cpu")
        listed = isinstance(fwd_fn, list | tuple)
        forwards = list(fwd_fn) if listed else [cast(FwdFn, fwd_fn)]
        try:
            backwards = _each(bwd_fn, forwards, "bwd_fn", isinstance(bwd_fn, list | tuple))
            own = [_as_list(x) for x in _each(inputs, forwards, "inputs", listed)]
            schedule = schedule_for(
                order, group.size(), num_microbatches, len(forwards), forward_only
            )
            stages = schedule.stages_of(group.rank())
            if not forward_only:
                ends = [stage == schedule.num_stages - 1 for stage in stages]
                backwards = [_of_two(f, e) for f, e in zip(backwards, ends, strict=True)]
            given = (dict(zip(stages, x, strict=True)) for x in (forwards, backwards, own))
            # what is not cut may be of any length
            if num_microbatches > 1:
                num_samples, differing = samples_in([("inputs", own)])
                if differing:
                    raise ScheduleError(differing)
            device = _device(group, own, optimizer)
            form = (id(schedule), num_parts, form_around(device, optimizer))
            forms = "dynamic" if dynamic_shapes else form_of(own)
            job = cls(schedule, *given, CachedExecutor(forwards, group, (form, forms)))
            what = (
                f"{schedule.name} of {schedule.num_stages} stages, {num_microbatches} microbatches"
                + ", dynamic_shapes" * dynamic_shapes
            )
        except ScheduleError as error:
            problem = str(error)
        note = (job.known_counted(), job.cached.note) if job else (0, 0)
        agreement = StepAgreement(group, what, num_samples, problem, note)
        num_samples = agreement.settle()
        assert job is not None
        job.sizes = sizes_of(num_samples or num_microbatches, num_microbatches)
        job.counted = (None, False, True)[agreement.notes[job.schedule.placement[-1]][0]]
        job.executor = job.cached.executor(
            (number for _, number in agreement.notes),
            lambda: Executor(job.schedule, group, device=device, dynamic_shapes=dynamic_shapes),
        )
        if job.executor.timeout_s != timeout_s:
            job.executor.timeout_s = timeout_s
        return job


def _of_two(bwd_fn: BwdFn | None, is_last: bool) -> BwdFn | None:
    """`bwd_fn`, to be called with (output, gradient); on the last stage it may take one of them.

    Raises:
        ScheduleError: it takes another number.
    """
    takes = None if bwd_fn is None else Signature.of(bwd_fn)
    if takes is None or not (misfit := takes.misfit(2)):
        return bwd_fn
    if is_last and not takes.misfit(1):
        return lambda output, _: cast(BwdFn, bwd_fn)(output)
    alone = "; on the last stage with the output alone, if it takes one" if is_last else ""
    raise ScheduleError(f"bwd_fn {misfit}; it is called with (output, gradient){alone}")


def _each(value: object, functions: Sequence[FwdFn], name: str, listed: bool) -> list:
    """One for each function.

    Raises:
        ScheduleError: another number of them.
    """
    if not listed or (value is None and len(functions) > 1):
        return [value] * len(functions)
    if not isinstance(value, Sequence) or len(value) != len(functions):
        number = len(value) if isinstance(value, Sequence) else 1
        raise ScheduleError(
            f"{name} has {number} entries for {len(functions)} functions; give one for each, None "
            f"where there is nothing"
        )
    return list(value)


def _as_list(inputs: object) -> list[object]:
    if inputs is None:
        return []
    return list(inputs) if isinstance(inputs, list | tuple) else [inputs]


def _device(
    group: Group, own: Iterable[Sequence[object]], optimizer: torch.optim.Optimizer | None
) -> torch.device:
    """Where messages arrive. A group of GPUs says itself, wherever the batch is kept until
    `fwd_fn` moves it; else this rank's inputs say, its parameters, or the current device.
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


# -- executors of earlier calls ------------------------------------------------------------------


class _CacheEntry:
    """What is cached with one function, and its number.

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
    """By functions of a rank, which may be a thread; it keeps none of them alive."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[object, dict[int, _CacheEntry]] = WeakKeyDictionary()


_cache = _Cache()


class CachedExecutor:
    """The place of one call in the cache; `note` is for the other ranks.

    form: all else that messages follow from, as plain values.
    """

    def __init__(self, functions: Sequence[Callable], group: Group, form: object):
        entries = [_entry_of(function) for function in functions]
        self._entry = entries[0]
        if self._entry.in_use:
            self._entry.clear()
        # a group or schedule that is named by its address lives as long as the executor does
        text = repr(([entry.number for entry in entries], id(group), form))
        digest = blake2b(text.encode(), digest_size=8).digest()
        self.note = int.from_bytes(digest, "little", signed=True)

    def executor(self, notes: Iterable[int], make: Callable[[], Executor]) -> Executor:
        """Of an earlier call in which all ranks had these notes; else a new one."""
        key, entry = tuple(notes), self._entry
        entry.in_use = True
        if key not in entry.executors:
            _drop_ended()
            executor = make()
            if len(entry.executors) == MOST_KEPT:
                entry.clear()
                return executor
            entry.executors[key] = executor
        return entry.executors[key]

    def succeeded(self) -> None:
        """The run is over, and what it has learned holds."""
        self._entry.in_use = False

    def failed(self) -> None:
        """The run has ended in an exception: what was built for it goes now."""
        self._entry.clear()


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


def _drop_ended() -> None:
    """Executors hold their group."""
    for entries in list(_cache.of.values()):
        for entry in entries.values():
            if not all(is_alive(executor.group) for executor in entry.executors.values()):
                entry.clear()

"""What a call of functions means on this rank, as all ranks have agreed on it.

One rule: what a call gets wrong is found before anything is sent, and raised by all ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from torchdistpackage.comm.primitives import Group, device_of, is_queued
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.agreement import (
    StepAgreement,
    refuse_interrupted,
    step_over,
)
from torchdistpackage.parallel.pipeline.executor import Backward, Executor, Forward
from torchdistpackage.parallel.pipeline.kept import (
    CachedExecutor,
    counted_by,
    form_around,
    form_of,
    remember_counted,
    schedule_for,
)
from torchdistpackage.parallel.pipeline.microbatches import samples_in, sizes_of
from torchdistpackage.parallel.pipeline.resolve_schedule import Order
from torchdistpackage.parallel.pipeline.stages import Signature
from torchdistpackage.schedule.actions import Schedule

FwdFn = Callable[..., object]
BwdFn = Callable[..., object]


@dataclass
class Options:
    """num_parts: of a message, None where it is whole."""

    optimizer: torch.optim.Optimizer | None
    timeout_s: float | None
    dynamic_shapes: bool
    num_parts: int | None = None


@dataclass
class FunctionCall:
    """What the call means, by stage of this rank, agreed on by all ranks."""

    schedule: Schedule
    forwards: dict[int, FwdFn]
    backwards: dict[int, BwdFn | None]
    inputs: dict[int, list[object]]
    num_samples: int
    kept: CachedExecutor
    sizes: Sequence[int] = ()
    """Samples of each microbatch."""
    executor: Executor | None = None
    counted: bool | None = None
    """Whether losses are (sum, count), as the last stage's function gave them before."""

    def run(
        self, forward: Forward, backward: Backward | None = None, reducer: Reducer | None = None
    ) -> None:
        """All microbatches; what an exception ends is not kept."""
        assert self.executor is not None
        try:
            with step_over(self.executor.group):
                self.executor.run(forward, backward, reducer=reducer)
        except BaseException:
            self.kept.failed()
            raise
        self.kept.succeeded()

    def remember(self, counted: bool) -> None:
        """For the next call with this function of the last stage, if it is here."""
        function = self.forwards.get(self.schedule.num_stages - 1)
        if function is not None:
            remember_counted(function, counted)

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
        options: Options,
    ) -> "FunctionCall":
        refuse_interrupted(group)
        job, what, problem, dynamic = None, "", "", options.dynamic_shapes
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
            num_samples, differing = (
                samples_in([("inputs", own)]) if num_microbatches > 1 else (0, "")
            )
            if differing:
                raise ScheduleError(differing)
            device = _device(group, [*own], options.optimizer)
            form = (id(schedule), options.num_parts, form_around(device, options.optimizer))
            forms = "dynamic" if dynamic else form_of(own)
            kept = CachedExecutor(forwards, group, (form, forms))
            job = cls(schedule, *given, num_samples=num_samples, kept=kept)
            what = (
                f"{schedule.name} of {schedule.num_stages} stages, {num_microbatches} microbatches"
                + ", dynamic_shapes" * dynamic
            )
        except ScheduleError as error:
            problem = str(error)
        note = (_known(job), job.kept.note) if job else (0, 0)
        agreement = StepAgreement(group, what, job.num_samples if job else 0, problem, note)
        num_samples = agreement.settle()
        assert job is not None
        sizes = sizes_of(num_samples or num_microbatches, num_microbatches)
        counted = (None, False, True)[agreement.notes[job.schedule.placement[-1]][0]]
        make = lambda: Executor(  # noqa: E731
            job.schedule, group, device=device, dynamic_shapes=dynamic
        )
        executor = job.kept.executor((number for _, number in agreement.notes), make)
        if executor.timeout_s != options.timeout_s:
            executor.timeout_s = options.timeout_s
        return replace(job, sizes=sizes, counted=counted, executor=executor)


def _known(job: FunctionCall) -> int:
    """0: not known, 1: one number, 2: (sum, count), of the last stage's function if it is here."""
    function = job.forwards.get(job.schedule.num_stages - 1)
    counted = None if function is None else counted_by(function)
    return 0 if counted is None else 1 + counted


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

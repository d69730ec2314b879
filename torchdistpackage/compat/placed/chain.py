"""A chain of placed modules as a pipeline of microbatches, run by the pipeline executor.

Ranks need not ascend along the chain and may repeat: the schedule follows the stages' places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import Module

from torchdistpackage.comm.groups import Groups
from torchdistpackage.compat.placed.managed import ManagedOperation, ManagedTensor
from torchdistpackage.compat.placed.program import Program
from torchdistpackage.errors import PlacementError
from torchdistpackage.parallel.pipeline.pipeline import Loss, Pipeline
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.engine import TaskGraph
from torchdistpackage.schedule.generators import build
from torchdistpackage.schedule.list_scheduling import Rules, deepest_first, list_order
from torchdistpackage.schedule.passes import lower


class ChainStage(Module):
    """Consecutive operations on one place."""

    def __init__(self, operations: Sequence[Callable[..., Any]]):
        super().__init__()
        self.modules_of_stage = [
            operation for operation in operations if isinstance(operation, Module)
        ]
        for i, operation in enumerate(self.modules_of_stage):
            self.add_module(str(i), operation)
        self._operations = list(operations)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *rest = self._operations
        value = first(*args, **kwargs)
        for operation in rest:
            value = operation(value)
        return value


class PlacedPipeline:
    """A chain of managed modules and operations; each takes the output of the one before it.

        chain = PlacedPipeline([encoder, middle, head], loss=loss_of, num_microbatches=8)
        loss = chain.step(x, targets=y)

    All ranks of the program make it and call it. Neighbours on one place form one stage. loss: a
    function, or a managed operation on the last place. options: of `Pipeline`.

    schedule: schedule of all ranks. pipeline: None on ranks without a stage of the chain.

    Raises:
        PlacementError: the chain is empty, or an element is not managed or is on several ranks.
        ScheduleError: no such schedule, or it does not fit.
    """

    def __init__(
        self,
        chain: Sequence[ManagedOperation],
        *,
        loss: ManagedOperation | Callable[..., Loss] | None = None,
        schedule: str | Schedule = "1f1b",
        num_microbatches: int,
        **options: Any,
    ):
        self.program = _program_of(chain)
        stages = list[tuple[int, list[ManagedOperation]]]()
        for operation in chain:
            if not stages or stages[-1][0] != operation.data_device.rank:
                stages.append((operation.data_device.rank, []))
            stages[-1][1].append(operation)
        self._ends = stages[0][0], stages[-1][0]
        ranks = sorted({rank for rank, _ in stages})
        stage_indices = tuple(ranks.index(rank) for rank, _ in stages)
        self.schedule = schedule_on(stage_indices, schedule, num_microbatches)
        self.program.begin(f"a pipeline of {len(stages)} stages", None)
        self.pipeline: Pipeline | None = None
        if self.program.rank not in ranks:
            return
        local_stages = {
            i: _stage([operation.fn for operation in operations])
            for i, (rank, operations) in enumerate(stages)
            if rank == self.program.rank
        }
        loss_function = loss.fn if isinstance(loss, ManagedOperation) else loss
        local_place = next(operation.data_device for operation in chain if operation.is_here)
        options.setdefault("device", local_place.device)
        self.pipeline = Pipeline(
            local_stages,
            loss=loss_function,
            schedule=self.schedule,
            group=Groups(self.program.rank).of(ranks),
            **options,
        )

    def step(self, *args: Any, targets: Any = None, **options: Any) -> Tensor | None:
        """Run forward and backward of a batch; gradients accumulate.

        args, targets: tensors, which every rank has, or managed ones on the first and last place.

        Returns the mean loss on ranks of the chain, None elsewhere.
        """
        return self._call("step", args, targets, options)

    def eval_step(self, *args: Any, targets: Any = None, **options: Any) -> Tensor | None:
        """Return the mean loss of a batch, without a backward."""
        return self._call("eval_step", args, targets, options)

    def _call(self, name: str, args: tuple[Any, ...], targets: Any, options: Any) -> Tensor | None:
        self.program.flush()
        self.program.begin(f"{name} of a pipeline", None)
        if self.pipeline is None:
            return None
        local_args = [_here(x, self._ends[0]) for x in args]
        options = {**options, "targets": _here(targets, self._ends[1])}
        args = () if any(x is _ELSEWHERE for x in local_args) else tuple(local_args)
        if options["targets"] is _ELSEWHERE:
            options["targets"] = None
        return getattr(self.pipeline, name)(*args, **options)


_ELSEWHERE = object()


def _here(x: Any, rank: int) -> Any:
    """Return the tensor of a managed one on `rank`, _ELSEWHERE on other ranks; pass other values
    through.
    """
    if not isinstance(x, ManagedTensor):
        return x
    if x.data_device.rank != rank:
        raise PlacementError(
            f"a batch of a pipeline is on {x.data_device}, but its stage is on rank {rank}; move "
            f"it there with to_device(), or pass the tensor itself on every rank"
        )
    return x.tensor if x.is_here else _ELSEWHERE


def _stage(functions: list[Callable[..., Any]]) -> Callable[..., Any]:
    return functions[0] if len(functions) == 1 else ChainStage(functions)


def _program_of(chain: Sequence[ManagedOperation]) -> Program:
    if isinstance(chain, ManagedOperation):
        raise PlacementError(f"a pipeline takes a list of managed modules, not {chain}")
    if not chain:
        raise PlacementError("a pipeline needs at least one managed module; the chain is empty")
    for i, operation in enumerate(chain):
        if not isinstance(operation, ManagedOperation):
            raise PlacementError(
                f"part {i} of the chain is a {type(operation).__name__}; pass what F(module) "
                f"returned"
            )
        if len(operation.data_device.ranks) > 1:
            raise PlacementError(
                f"part {i} of the chain is on {operation.data_device}; put each stage of a "
                f"pipeline on one rank"
            )
    return chain[0].program


def schedule_on(
    places: tuple[int, ...], schedule: str | Schedule, num_microbatches: int
) -> Schedule:
    """Return the schedule for stages on these pipe indices, in order.

    If the named schedule's own placement visits ranks in this order, it is that schedule with its
    ranks renamed. For other placements stages run as soon as they can, the deepest first.
    """
    if isinstance(schedule, Schedule):
        return schedule
    num = max(places) + 1
    chunks = len(places) // num
    if num * chunks == len(places):
        named = build(schedule, num, num_microbatches, chunks)
        renamed = dict(zip(named.placement, places, strict=True))
        if tuple(renamed[i] for i in named.placement) == places and len({*renamed.values()}) == num:
            programs = [named.programs[0]] * num
            for old, new in renamed.items():
                programs[new] = named.programs[old]
            return replace(named, placement=places, programs=tuple(programs))
    work = TaskGraph(places, num_microbatches)
    stages = range(work.num_stages)
    rules = replace(
        Rules.unlimited(work, deepest_first(work.num_stages)),
        ahead=tuple(min(num_microbatches, work.num_stages - s) for s in stages),
        split=tuple((0, 0) for _ in stages),
    )
    return lower(work.schedule(f"{schedule}~placed", list_order(work, rules)))

"""The bytes that a rank really holds in a step, by kind and at their peak, beside its plan."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.train import parity
from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.models.kept_trace import traced
from torchdistpackage.plan.memory_fit import needs_trace
from torchdistpackage.plan.peak import PeakMemory, peak_memory
from torchdistpackage.plan.traffic import microbatch
from torchdistpackage.tools.activations import storages_of
from torchdistpackage.tools.live_bytes import LiveBytes, Sizes
from torchdistpackage.train.memory_note import actual_bytes, noting_memory
from torchdistpackage.train.step import Trainer


class _Boundaries:
    """The phases of a trainer, which note the live storages after each forward and backward."""

    def __init__(self, trainer: Trainer, live: LiveBytes):
        self._phases, self._live = trainer.phases, live
        self.noted: list[Sizes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._phases, name)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with self._phases(name):
            yield
        if name in ("forward", "backward"):
            self.noted.append(dict(self._live.sizes))


@dataclass(frozen=True)
class MeasuredMemory:
    """Bytes of one rank in its third step.

    gradients: None under ZeRO, whose sums lie in buffers. state: weights, gradients, optimizer
    state and all of their buffers at the peak. kept: most between two actions, besides the state.
    """

    weights: int
    gradients: int | None
    optimizer: int
    state: int
    kept: int
    peak: int


def measured_and_predicted(runs: list[list[str]]) -> list[tuple[MeasuredMemory, PeakMemory]]:
    """Return both for each run; the steps before the third have made all that stays."""
    found: list[tuple[MeasuredMemory, PeakMemory]] = []
    for overrides in runs:
        trainer = parity.trainer(overrides)
        trainer.train_step(1).wait()
        plan = trainer.plan
        if needs_trace(plan) and plan.model is not None:
            model = traced(plan.model, microbatch(plan, 0))
            assert not isinstance(model, str), model
            plan = replace(plan, model=model)
        found.append((_measured(trainer), peak_memory(plan, dist.get_rank())))
        trainer.close()
    return found


def _measured(trainer: Trainer) -> MeasuredMemory:
    live = LiveBytes()
    boundaries = _Boundaries(trainer, live)
    with live.counting():
        trainer.train_step(2).wait()
        live.reset()
        trainer.phases = boundaries  # type: ignore[assignment]
        trainer.train_step(3).wait()
    parameters = [*trainer.stage.parameters()]
    weights: list[Tensor] = [*parameters]
    gradients = [x.grad for x in parameters if x.grad is not None]
    assert trainer.update.inner is not None
    states = trainer.update.inner.state.values()
    optimizer = [x for s in states for x in s.values() if isinstance(x, Tensor)]
    scalars = _bytes(x for x in optimizer if not x.dim())
    optimizer, flats = [x for x in optimizer if x.dim()], [x for x in optimizer if not x.dim()]
    is_sharded = isinstance(trainer.optimizer, ShardedOptimizer)
    if is_sharded:
        buckets: Any = trainer.optimizer._buckets  # type: ignore[union-attr]
        for bucket in buckets:
            comm, values = bucket.bucket_comm, [x.tensor for x in bucket.shards]
            flats += [bucket.parameters.flat, comm.gradients.flat, comm.total]
            flats.append(bucket.parameters.values)
            if bucket.gathers:
                members = {id(x.parameter) for x in bucket.layout.members}
                weights = [x for x in weights if id(x) not in members]
            if bucket.is_rounded:
                optimizer += values
            elif bucket.gathers:
                weights += values
    state = {s._cdata for s in storages_of([*weights, *gradients, *optimizer, *flats])}
    return MeasuredMemory(
        _bytes(weights),
        None if is_sharded else _bytes(gradients),
        _bytes(optimizer),
        sum(n for key, n in live.at_peak.items() if key in state) - scalars,
        max(sum(n for key, n in x.items() if key not in state) for x in boundaries.noted),
        live.peak,
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


def note_of_exhaustion(overrides: list[str]) -> tuple[str, dict[str, int], PeakMemory]:
    """Return what a rank says that ran out of memory after a step, with the bytes of it."""
    trainer = parity.trainer(overrides)
    trainer.train_step(1).wait()
    try:
        with noting_memory(trainer):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    except torch.OutOfMemoryError as error:
        (note,) = error.__notes__
    found = note, actual_bytes(trainer), peak_memory(trainer.plan, dist.get_rank())
    trainer.close()
    return found

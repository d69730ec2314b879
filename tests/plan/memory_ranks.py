"""The bytes that a rank really holds in a step, by kind and at their peak, beside its plan."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.train import parity
from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.plan.peak import PeakMemory, peak_memory
from torchdistpackage.tools.activations import storages_of
from torchdistpackage.train.memory_note import actual_bytes, noting_memory
from torchdistpackage.train.step import Trainer

Sizes = dict[int, int]
"""Bytes of storages, by address."""


class LiveBytes(TorchDispatchMode):
    """A count of the bytes of all storages that operations have met and that are alive.

    at_peak: the storages when they were most since `reset`. It asks no allocator, so it counts on a
    CPU; what a kernel has for itself it does not see.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Sizes = {}
        self.total = self.peak = 0
        self.at_peak: Sizes = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor))
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.sizes)
        return result

    def reset(self) -> None:
        self.peak, self.at_peak = 0, {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside the block, also where a storage is resized in place."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self.sizes:
                self._set(storage._cdata, size)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resized), self:
            yield

    def _note(self, tensors: Iterable[Tensor]) -> None:
        for storage in storages_of(tensors):
            key = storage._cdata
            if key not in self.sizes:
                self.sizes[key] = 0
                weakref.finalize(storage, self._gone, key)
            self._set(key, storage.nbytes())

    def _gone(self, key: int) -> None:
        self.total -= self.sizes.pop(key)

    def _set(self, key: int, num_bytes: int) -> None:
        self.total += num_bytes - self.sizes[key]
        self.sizes[key] = num_bytes


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
        found.append((_measured(trainer), peak_memory(trainer.plan, dist.get_rank())))
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

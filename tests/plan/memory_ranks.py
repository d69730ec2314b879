"""The bytes that a rank really holds in a step, by kind and at their peak, beside its plan."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from tests.train import parity
from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.parallel.tensor.four_bit import PackedProduct
from torchdistpackage.plan.memory_fit import needs_trace, rank_peak
from torchdistpackage.plan.peak import PeakMemory, peak_memory
from torchdistpackage.tools.activation_offload import ActivationOffload
from torchdistpackage.tools.activations import storages_of
from torchdistpackage.tools.live_bytes import LiveBytes, Sizes
from torchdistpackage.train import recompute
from torchdistpackage.train.memory_note import actual_bytes, noting_memory
from torchdistpackage.train.stage_trace import traced
from torchdistpackage.train.staged_model import StagedModel
from torchdistpackage.train.step import Trainer


class _Host:
    """Streams that copy in order to and from memory that `LiveBytes` does not count."""

    def stream(self) -> "_Host":
        return self

    current = stream

    def record_event(self) -> None:
        """Copies are over when they return."""

    def wait_event(self, _: object) -> None:
        """Copies are over when they return."""

    def pinned(self, num_bytes: int) -> Tensor:
        with _disable_current_modes():
            return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, _: object, to: Tensor, source: Tensor, *, keeps: bool) -> None:
        assert not keeps
        with _disable_current_modes():
            to.copy_(source)


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
        with patch.object(
            recompute, "ActivationOffload", partial(ActivationOffload, streams=_Host())
        ):
            trainer = parity.trainer(overrides)
        trainer.train_step(1).wait()
        plan, rank = trainer.plan, dist.get_rank()
        measured = _measured(trainer)
        if needs_trace(plan):
            with_bytes = traced(plan, (0, plan.topology.dense.coord(rank)["pipe"]))
            assert not isinstance(with_bytes, str), with_bytes
            plan = with_bytes
        found.append((measured, rank_peak(plan, rank)))
        trainer.close()
    return found


def _measured(trainer: Trainer) -> MeasuredMemory:
    live = LiveBytes()
    boundaries = _Boundaries(trainer, live)
    with live.counting():
        for parameter in trainer.stage.parameters():
            parameter.detach()  # a frozen head is read by no operation of a step
        trainer.train_step(2).wait()
        live.reset()
        trainer.phases = boundaries  # type: ignore[assignment]
        trainer.train_step(3).wait()
    parameters = [*trainer.stage.parameters()]
    of_task = () if trainer.task is None else vars(trainer.task).values()
    references = [x.stage for x in of_task if isinstance(x, StagedModel)]
    weights: list[Tensor] = [*parameters, *(p for x in references for p in x.parameters())]
    packed = [
        x for x in trainer.stage.modules() if isinstance(getattr(x, "product", None), PackedProduct)
    ]
    weights += [y for x in packed for y in (x.weight, x.product.state.absmax)]
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
    state = {s._cdata: s.nbytes() for s in storages_of([*weights, *gradients, *optimizer, *flats])}
    return MeasuredMemory(
        _bytes(weights),
        None if is_sharded else _bytes(gradients),
        _bytes(optimizer),
        sum(live.at_peak.values()) - _besides(live.at_peak, state) - scalars,
        max(_besides(x, state) for x in boundaries.noted),
        live.peak,
    )


def _besides(sizes: Sizes, state: Sizes) -> int:
    """Return the bytes of storages that are not of the state. One of another size is an earlier
    tensor whose address a tensor of the state has got; what ZeRO 3 has freed has no size.
    """
    return sum(n for key, n in sizes.items() if state.get(key) not in (n, 0))


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
    plan = trainer.plan
    if needs_trace(plan):
        with_bytes = traced(plan)
        assert not isinstance(with_bytes, str)
        plan = with_bytes
    found = note, actual_bytes(trainer), peak_memory(plan, dist.get_rank())
    trainer.close()
    return found


class OwnBlock(nn.Module):
    """A block of a user's own, with a fused attention."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(dim),
            nn.Linear(dim, 3 * dim),
            nn.Linear(dim, dim),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def own_chain(dim: int, vocab: int) -> nn.Sequential:
    blocks = [OwnBlock(dim) for _ in range(4)]
    return nn.Sequential(
        nn.Embedding(vocab, dim), *blocks, nn.LayerNorm(dim), nn.Linear(dim, vocab)
    )


class ReadsNumbers(nn.Linear):
    """A layer that looks at its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * x.abs().max().item())


def reads_numbers(dim: int, vocab: int) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(vocab, dim), ReadsNumbers(dim, vocab))

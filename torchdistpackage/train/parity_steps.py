"""The steps that one rank of `tdp prove` takes, and its records of them.

Three steps without dropout are compared with those of one process. Then the run continues with
dropout, and once more from a save, with a second stop and start, where each layout must reproduce
its own bits. Finally the save of one process is loaded, and one more step is compared.

Everything that a checkpoint would hold is recorded in global coordinates, so ZeRO's shards are
compared like full tensors.
"""

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchdistpackage.checkpoint.commit import folder_name
from torchdistpackage.checkpoint.parts import TopologyRank, saved_tensors
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.config.head_of_run import padding_of
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.data.source import DataBatch, fingerprint
from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.equivalence.narrow import noting_casts
from torchdistpackage.equivalence.placed import STATE, Placed
from torchdistpackage.equivalence.record import (
    ParityRecord,
    dropout_masks,
    recording,
    told_where,
    without_dropout,
)
from torchdistpackage.equivalence.stopped import RunMoment, resume_gaps
from torchdistpackage.equivalence.wide import float64_within
from torchdistpackage.layout.derive import blocks
from torchdistpackage.plan.parity_plan import NUM_STEPS, world_size_of
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.run_files import CHECKPOINTS
from torchdistpackage.train.build import build
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.step_stats import StepResult
from torchdistpackage.train.train_state import TrainState, resume, save_state

ONE_PROCESS = "one"
"""Folder of the saves of one process, inside that of all saves."""
_KEEP = 9
_FILL = 0.05
"""Value for vectors that would start at zero."""


def record_run(
    config: RunConfig,
    axes: Mapping[str, int],
    saves: str = "",
    name: str = ONE_PROCESS,
    alike: bool = False,
    dropout: bool = False,
    wide: bool = False,
) -> ParityRecord:
    """Take the steps as a rank of the layout; runs on every rank.

    saves: folder of the saves of all layouts; empty: nothing is saved, stopped and resumed.
    name: of this layout's folder in it. alike: every micro-batch gets the samples of the first.
    dropout: the compared steps draw. wide: what the model computes in float32 is float64 too.
    """
    rank = resolve_group(None, "global").rank()
    plan = make_plan(config, world_size_of(axes))
    record = ParityRecord(dict(plan.topology.dense.coord(rank)))

    def fresh() -> Trainer:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        trainer = build(plan, rank, torch.device("cpu"))
        _feed_no_padding(trainer)
        return _in_float64(trainer) if wide else trainer

    trainer = fresh()
    _compared_steps(trainer, record, alike=alike, dropout=dropout)
    if not saves:
        trainer.close()
        return record
    folder = Path(saves) / name
    run = _TrainerRun(trainer, folder)
    run.save(NUM_STEPS)
    stopped = run.moment()
    straight = [run.take_step(NUM_STEPS + 1, record), run.take_step(NUM_STEPS + 2)]
    run.close()
    record.resume_gaps = resume_gaps(
        lambda: _TrainerRun(fresh(), folder), NUM_STEPS, stopped, straight
    )
    _elsewhere(fresh(), folder, Path(saves) / ONE_PROCESS, record)
    return record


def _in_float64(trainer: Trainer) -> Trainer:
    """Let forwards and backwards compute in float64 throughout, and return the trainer."""
    accumulate = trainer.accumulate

    def wide(*args: Any, **kwargs: Any) -> Tensor:
        with float64_within():
            return accumulate(*args, **kwargs)

    trainer.accumulate = wide
    return trainer


def _compared_steps(trainer: Trainer, record: ParityRecord, *, alike: bool, dropout: bool) -> None:
    """Take the steps that are compared with those of one process."""
    make_batch = trainer.batches.of_training
    rows, number = trainer.plan.samples_per_microbatch, trainer.plan.schedule.num_microbatches

    shape = trainer.plan.shape if trainer.task is None else None
    padding = padding_of(trainer.plan.config)

    def fed(step: int, index: int) -> DataBatch:
        batch = make_batch(step, 0 if alike else index)
        if shape is not None:
            inputs = _with_edges(batch.inputs, shape.vocab, step, padding)
            labels = _with_edges(batch.targets, shape.vocab, step, padding)
            batch = DataBatch(inputs, labels, batch.position_ids)
        if alike:
            first = (None if x is None else torch.cat([x[:rows]] * number) for x in batch)
            batch = DataBatch(*first)
        if step == 1:
            record.inputs += [x for x in batch if isinstance(x, Tensor)][: 1 if index == 0 else 0]
            if index > 0:
                record.early = _grads(trainer)
        return batch

    trainer.batches.of_training = fed
    cut, targets = trainer.microbatches, list[Tensor]()

    def noted(batch: DataBatch, take_slice: Callable[[Tensor], Tensor] | None = None):
        microbatches = cut(batch, take_slice)
        targets.extend(microbatches.targets)
        return microbatches

    trainer.microbatches = noted
    # what a stage as a whole takes and gives, one process has nowhere
    named = ((name.partition(".")[2], part) for name, part in trainer.stage.named_modules())
    # a hook in a compiled block would change its graph
    graphs = [f"{block.name.partition('.')[2]}." for block in trainer.stage.compiled]
    parts = {
        name: part for name, part in named if name and not f"{name}.".startswith(tuple(graphs))
    }
    _fill_vectors(trainer)
    record.initial = _weights(trainer)
    before_step, summed = trainer.update.before_step, dict[Tensor, Tensor]()
    for step in range(1, NUM_STEPS + 1):
        if step == 1:
            # after the sum over ranks, and before the update makes means of them and clips
            trainer.update.before_step = partial(_note_gradients, trainer, record, summed)
        with (
            told_where(parts),
            nullcontext() if dropout else without_dropout(trainer.stage),
            recording(parts, record, lambda n=step: n == 1),
            noting_casts(parts, record.casts, record.singles) if step == 2 else nullcontext(),
        ):
            # the record reads this step's loss and weights before the next begins
            result = trainer.train_step(step).wait()
        trainer.update.before_step = before_step
        record.losses.append(result.loss)
        record.norms.append(result.grad_norm)
        record.rates.append(result.lr)
        if step == 1:
            record.scale = _scale(trainer, summed)
            trainer.microbatches = cut
            record.targets = [torch.cat(targets)] if targets else []
            _take_mean(record, result.tokens)
            record.updated, record.placed_update = _weights(trainer), _placed(trainer)
    record.weights, record.placed = _weights(trainer), _placed(trainer)
    record.buffers = {
        name.partition(".")[2]: x.detach().clone() for name, x in trainer.stage.named_buffers()
    }
    trainer.batches.of_training = make_batch


def _feed_no_padding(trainer: Trainer) -> None:
    """Replace ids of padding in the samples of a run, unless its samples are padded themselves.

    A text has none, and its row is zeros, at which a class may have no gradient: that of Gemma 3n,
    which takes the root of a row's mean square, is NaN.
    """
    padding, make_batch = padding_of(trainer.plan.config), trainer.batches.of_training
    if trainer.task is not None or padding is None:
        return

    def fed(step: int, index: int) -> DataBatch:
        batch = make_batch(step, index)
        if batch.inputs.is_floating_point():
            return batch
        other = 1 if padding == 0 else padding - 1
        return batch._replace(inputs=batch.inputs.masked_fill(batch.inputs == padding, other))

    trainer.batches.of_training = fed


def _with_edges(ids: Tensor, vocab: int, step: int, padding: int | None) -> Tensor:
    """Return token ids; half of them are the first or the last of the vocabulary of one of 2 or 4
    ranks, but for the id of padding.

    A few dozen tokens of text would read no such row, and what no token reads is not compared.
    Which ids are replaced depends on them alone, so every layout gets the same samples.
    """
    if ids.is_floating_point():
        return ids
    starts = {k * y for n in (2, 4) for y in (vocab // n, -(-vocab // n)) for k in range(n + 1)}
    edges = sorted({x for y in starts for x in (y - 1, y) if 0 <= x < vocab and x != padding})
    replaced = torch.tensor(edges, dtype=ids.dtype)[ids.clamp(min=0) // 2 % len(edges)]
    # targets below 0 count for nothing
    return torch.where((ids >= 0) & (ids % 2 == step % 2), replaced, ids)


def _take_mean(record: ParityRecord, tokens: int) -> None:
    """Divide the gradients of the summed losses by the number of tokens."""
    for grads in (record.grads, record.early):
        for name, grad in grads.items():
            grads[name] = grad / tokens
    if record.scale is not None:
        record.scale *= tokens
    for name, boxes in record.placed_grads.items():
        record.placed_grads[name] = [(box, grad / tokens) for box, grad in boxes]


def _fill_vectors(trainer: Trainer) -> None:
    """Give a value to vectors that start at zero, such as biases, because an error that adds zero
    twice would not show.
    """
    rank_here = TopologyRank(tpc.topology, trainer.rank)
    for saved in saved_tensors(trainer.saved(), rank_here, trainer.optimizer):
        if len(saved.shape) == 1 and not saved.is_buffer and STATE not in saved.name:
            for _, part in saved.parts:
                if not bool(part.any()):
                    part.detach().fill_(_FILL)
    if isinstance(trainer.optimizer, ShardedOptimizer):
        trainer.optimizer.gather_shards()


def _scale(trainer: Trainer, summed: Mapping[Tensor, Tensor]) -> float | None:
    """Return the factor by which the update multiplied the gradients; None if they no longer
    exist.
    """
    pairs = [(x.grad, grad) for x, grad in summed.items() if x.grad is not None]
    power = sum(float(gradient.square().sum()) for _, gradient in pairs)
    return sum(float((now * gradient).sum()) for now, gradient in pairs) / power if power else None


def _note_gradients(trainer: Trainer, record: ParityRecord, summed: dict[Tensor, Tensor]) -> None:
    """Record the gradients of the summed losses, of full parameters or of ZeRO's shards.

    summed: receives them, keyed by the tensor that holds each.
    """
    for holder in trainer.update.holders:
        if holder.grad is not None:
            summed[holder] = holder.grad.detach().clone()
    if not isinstance(trainer.optimizer, ShardedOptimizer):
        now = _weights(trainer)
        record.moved = [n for n, x in record.initial.items() if not torch.equal(x, now[n])]
    if isinstance(trainer.optimizer, ShardedOptimizer):
        rank_here = TopologyRank(tpc.topology, trainer.rank)
        layouts = {p: trainer.layouts[n] for n, p in trainer.stage.named_parameters()}
        for shard in trainer.optimizer.shards:
            if (grad := shard.tensor.grad) is not None:
                layout = layouts[shard.parameter]
                boxes = record.placed_grads.setdefault(layout.name, [])
                parts = rank_here.sliced(layout, shard, grad).parts
                boxes += [(box, x.detach().clone()) for box, x in parts]
        return
    record.grads = _grads(trainer)


def _grads(trainer: Trainer) -> dict[str, Tensor]:
    """Return this rank's slices of the gradients, by global name; those in ZeRO's shards are
    excluded.
    """
    if isinstance(trainer.optimizer, ShardedOptimizer):
        return {}
    named = trainer.stage.named_parameters()
    return _parts(trainer, {n: p.grad for n, p in named if p.grad is not None})


class _TrainerRun:
    """A trainer with the folder of its saves, as a `StoppableRun`."""

    def __init__(self, trainer: Trainer, folder: Path):
        self._trainer, self._folder = trainer, folder

    def moment(self) -> RunMoment:
        return RunMoment(_placed(self._trainer), {"cpu": torch.get_rng_state()})

    def save(self, step: int) -> None:
        save_state(self._trainer, TrainState(step=step), self._folder, _KEEP)

    def load(self) -> int:
        return resume(self._trainer, self._folder, "auto").step

    def close(self) -> None:
        self._trainer.close()

    def take_step(self, step: int, record: ParityRecord | None = None) -> RunMoment:
        """Take a step; record: receives the masks of dropout modules."""
        batches, samples = self._trainer.batches, list[int]()
        make_batch, results = batches.of_training, list[StepResult]()

        def fed(step: int, index: int) -> DataBatch:
            batch = make_batch(step, index)
            samples.extend(fingerprint(x) for x in batch if isinstance(x, Tensor))
            return batch

        def call() -> None:
            # one step after the other: its numbers belong to its samples
            results.append(self._trainer.train_step(step).wait())

        batches.of_training = fed
        if record is not None:
            repeated = list[str]()
            masks = dropout_masks(self._trainer.stage, call, repeated)
            record.masks = {name.partition(".")[2]: mask for name, mask in masks.items()}
            record.repeated = [name.partition(".")[2] for name in repeated]
        if not results:
            call()
        batches.of_training = make_batch
        moment = self.moment()
        moment.loss, moment.norm = results[0].loss, results[0].grad_norm
        moment.samples = samples
        return moment


def _elsewhere(trainer: Trainer, folder: Path, one: Path, record: ParityRecord) -> None:
    """Load the save of one process, and take a step without dropout."""
    saved = one / CHECKPOINTS / folder_name(NUM_STEPS)
    resume(trainer, folder, str(saved))
    record.placed_loaded = _placed(trainer)
    with without_dropout(trainer.stage):
        trainer.train_step(NUM_STEPS + 1).wait()
    record.placed_after = _placed(trainer)
    trainer.close()


def _placed(trainer: Trainer) -> Placed:
    """Return copies of this rank's checkpointed tensors, in global coordinates."""
    if isinstance(trainer.optimizer, ShardedOptimizer):
        trainer.optimizer.finish()
    rank_here = TopologyRank(tpc.topology, trainer.rank)
    tensors: Placed = {}
    for saved in saved_tensors(trainer.saved(), rank_here, trainer.optimizer):
        boxes = tensors.setdefault(saved.name, [])
        boxes += [(box, x.detach().clone()) for box, x in saved.parts]
    return tensors


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return weights by global name.

    ZeRO stage 3 has none, because a rank holds slices without a shape there.
    """
    if isinstance(trainer.optimizer, ShardedOptimizer):
        trainer.optimizer.finish()
    if trainer.plan.zero == 3:
        return {}
    return _parts(trainer, dict(trainer.stage.named_parameters()))


def _parts(trainer: Trainer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's slices of full tensors by global name, without padding.

    A bias that only the first rank adds is zero on the others.
    """
    parts: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layout, part = trainer.layouts[name], tensor.detach()
        if layout.ranges:
            mesh = trainer.plan.topology.view(layout.view)
            blocks_here = [part[local] for _, local in blocks(layout, mesh, trainer.rank)]
            if not any(x.numel() for x in blocks_here):
                continue
            part = blocks_here[0] if len(blocks_here) == 1 else part
        parts[layout.name] = part.clone()
    return parts

"""The steps of a run's own configuration, small and in float64, on several layouts: `tdp parity`.

The model and the batch are made smaller with the same classes; the samples of a step are those of
one process under every layout. Dropout is off, as one process draws otherwise than many ranks.
"""

import math
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import TorchDistError
from torchdistpackage.harness.parity.compare import first_difference
from torchdistpackage.harness.parity.layouts import ParityReport
from torchdistpackage.harness.parity.record import ParityRecord, recording, without_dropout
from torchdistpackage.harness.pool import RankPool
from torchdistpackage.train.build import build
from torchdistpackage.train.parity_plan import NUM_STEPS, ParityRun
from torchdistpackage.train.plan import make_plan
from torchdistpackage.train.step import Trainer

_LIMIT_S = 600.0
"""For the steps of one layout; ranks may be more than cores."""


def compare_run(run: ParityRun, pool: RankPool | None = None) -> ParityReport:
    """Compare every layout of the run with one process.

    Raises:
        TorchDistError: one process alone fails, or a rank raises something of its own.
    """
    own = pool or RankPool(run.most_ranks, timeout_s=_LIMIT_S)
    try:
        (whole,) = own(1).run(record_run, run.whole, {})
        if whole.error:
            raise TorchDistError(f"one process alone fails: {whole.error}")
        found = []
        for axes, config in run.layouts:
            held = own(math.prod(axes.values())).run(record_run, config, dict(axes))
            found.append((axes, first_difference(whole, held, axes)))
    finally:
        if pool is None:
            own.close()
    return ParityReport(found)


def record_run(config: RunConfig, axes: Mapping[str, int]) -> ParityRecord:
    """Take the steps as a rank of the layout; runs on every rank."""
    rank = resolve_group(None, "global").rank()
    plan = make_plan(config, math.prod(axes.values()) if axes else 1)
    record = ParityRecord(dict(plan.topology.dense.coord(rank)))
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    try:
        _take_steps(build(plan, rank, torch.device("cpu")), record)
    except TorchDistError as error:
        record.error = f"{type(error).__name__}: {error}"
    return record


def _take_steps(trainer: Trainer, record: ParityRecord) -> None:
    made = trainer.batches.of_training

    def fed(step: int, index: int):
        batch = made(step, index)
        if step == 1:
            record.inputs += [x for x in batch if isinstance(x, Tensor)][: 1 if index == 0 else 0]
        return batch

    trainer.batches.of_training = fed
    # what a stage as a whole takes and gives, one process has nowhere
    named = ((name.partition(".")[2], part) for name, part in trainer.stage.named_modules())
    parts = {name: part for name, part in named if name}
    record.initial = _weights(trainer)
    for step in range(1, NUM_STEPS + 1):
        with without_dropout(trainer.stage), recording(parts, record, lambda n=step: n == 1):
            result = trainer.train_step(step).wait()
        record.losses.append(result.loss)
        record.norms.append(result.grad_norm)
        if step == 1 and not isinstance(trainer.optimizer, ZeroOptimizer):
            record.grads = {
                trainer.layouts[name].name: p.grad.detach().clone()
                for name, p in trainer.stage.named_parameters()
                if p.grad is not None
            }
    if isinstance(trainer.optimizer, ZeroOptimizer):
        trainer.optimizer.finish()
    record.weights = _weights(trainer)
    record.buffers = {
        name.partition(".")[2]: x.detach().clone() for name, x in trainer.stage.named_buffers()
    }
    trainer.close()


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    """By global name; not of stage 3 of ZeRO, where a rank has parts without a shape."""
    if trainer.plan.zero == 3:
        return {}
    return {
        trainer.layouts[name].name: p.detach().clone()
        for name, p in trainer.stage.named_parameters()
    }

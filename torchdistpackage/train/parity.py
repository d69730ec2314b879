"""The steps of a run's own configuration, small and in float64, on several layouts: `tdp parity`.

The model and the batch are made smaller with the same classes; the samples of a step are those of
one process under every layout. Dropout is off, as one process draws otherwise than many ranks.
"""

import inspect
import math
import os
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.equivalence.compare import ITS_STEP, ParityFinding, first_difference
from torchdistpackage.equivalence.record import (
    ParityRecord,
    recording,
    told_where,
    without_dropout,
)
from torchdistpackage.errors import TorchDistError
from torchdistpackage.harness.parity.layout_ranks import records_of
from torchdistpackage.harness.parity.layouts import ParityReport, text_of
from torchdistpackage.harness.pool import RankPool
from torchdistpackage.layout.derive import blocks
from torchdistpackage.plan.parity_plan import NUM_STEPS, ParityRun, parity_run
from torchdistpackage.plan.run_plan import Plan, make_plan
from torchdistpackage.plan.smaller_arguments import with_smaller_arguments
from torchdistpackage.plan.user_code import add_user_code, user_object
from torchdistpackage.train.build import build
from torchdistpackage.train.step import Trainer

_LIMIT_S = 600.0
"""Limit in seconds for the steps of one layout; there may be more ranks than cores."""
_PRELOAD = (__name__, "torch._dynamo")
"""Modules that are loaded once: otherwise each of 15 ranks, in sets of 1, 2, 4 and 8, would import
them."""


def compare_plan(
    plan: Plan, say: Callable[[str], None], pool: RankPool | None = None
) -> ParityReport:
    """Compare every layout of a plan's axes with one process, with a small model.

    A model of one's own is made smaller by its constructor's arguments (smaller_arguments.py); in
    its own size it is compared where it cannot be. say: takes lines of progress.

    Raises:
        ConfigError: the plan has one rank.
        TorchDistError: one process alone fails.
    """
    config = plan.config
    if config.model.target is None:
        return compare_run(parity_run(plan), pool, say)
    add_user_code(os.environ)
    defaults = _defaults(user_object(config.model.target))
    small = with_smaller_arguments(config, defaults)
    if small is not config:
        try:
            changed = plan.changed(lambda _: small)
            report = compare_run(parity_run(changed), pool, say)
        except TorchDistError as error:
            wrong = str(error).strip().splitlines()[-1]
        else:
            raised = [x for _, x in report.findings if x is not None and x.what == ITS_STEP]
            if not raised:
                return report
            wrong = raised[0].cause
        say(f"smaller arguments do not do ({wrong}); compared in its own size")
    return compare_run(parity_run(plan), pool, say)


def _defaults(target: Callable[..., object]) -> dict[str, Any]:
    """Of the arguments that have one."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {x.name: x.default for x in parameters if x.default is not x.empty}


def compare_run(
    run: ParityRun, pool: RankPool | None = None, say: Callable[[str], None] = lambda line: None
) -> ParityReport:
    """Compare every layout of the run with one process.

    Raises:
        TorchDistError: one process alone fails.
    """
    noun = "layout" if len(run.layouts) == 1 else "layouts"
    say(f"comparing {len(run.layouts)} {noun} with one process")
    theirs = () if run.whole.model.hf is None else ("transformers.modeling_utils",)
    rank_pool = pool or RankPool(run.most_ranks, timeout_s=_LIMIT_S, preload=(*_PRELOAD, *theirs))
    try:
        began = time.monotonic()
        (reference,) = records_of(rank_pool(1), record_run, run.whole, {})
        if reference.error:
            raise TorchDistError(f"one process alone fails: {reference.error}")
        say(f"one process: {time.monotonic() - began:.0f} s")
        findings: list[tuple[dict[str, int], ParityFinding | None]] = []
        for number, (axes, config) in enumerate(run.layouts, 1):
            began = time.monotonic()
            records = records_of(
                rank_pool(math.prod(axes.values())), record_run, config, dict(axes)
            )
            finding = first_difference(reference, records, axes)
            findings.append((axes, finding))
            verdict = "the same" if finding is None else f"differs in {finding.module}"
            took = f"{time.monotonic() - began:.0f} s"
            say(f"{number} of {len(run.layouts)}, {text_of(axes)}: {verdict}, {took}")
            if finding is not None and finding.detail:
                say(finding.detail)
    finally:
        if pool is None:
            rank_pool.close()
    return ParityReport(findings)


def record_run(config: RunConfig, axes: Mapping[str, int]) -> ParityRecord:
    """Take the steps as a rank of the layout; runs on every rank."""
    rank = resolve_group(None, "global").rank()
    plan = make_plan(config, math.prod(axes.values()) if axes else 1)
    record = ParityRecord(dict(plan.topology.dense.coord(rank)))
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    _take_steps(build(plan, rank, torch.device("cpu")), record)
    return record


def _take_steps(trainer: Trainer, record: ParityRecord) -> None:
    make_batch = trainer.batches.of_training

    def fed(step: int, index: int):
        batch = make_batch(step, index)
        if step == 1:
            record.inputs += [x for x in batch if isinstance(x, Tensor)][: 1 if index == 0 else 0]
        return batch

    trainer.batches.of_training = fed
    # what a stage as a whole takes and gives, one process has nowhere
    named = ((name.partition(".")[2], part) for name, part in trainer.stage.named_modules())
    parts = {name: part for name, part in named if name}
    record.initial = _weights(trainer)
    for step in range(1, NUM_STEPS + 1):
        with (
            told_where(parts),
            without_dropout(trainer.stage),
            recording(parts, record, lambda n=step: n == 1),
        ):
            result = trainer.train_step(step).wait()
        record.losses.append(result.loss)
        record.norms.append(result.grad_norm)
        named = [*trainer.stage.named_parameters()]
        if step == 1 and not isinstance(trainer.optimizer, ShardedOptimizer):
            # before they were clipped: one wrong gradient changes the norm, and so all of them
            clip = trainer.plan.config.optim.clip
            factor = max(1.0, (result.grad_norm + 1e-6) / clip) if clip else 1.0
            grads = {n: p.grad * factor for n, p in named if p.grad is not None}
            record.grads = _parts(trainer, grads)
    if isinstance(trainer.optimizer, ShardedOptimizer):
        trainer.optimizer.finish()
    record.weights = _weights(trainer)
    record.buffers = {
        name.partition(".")[2]: x.detach().clone() for name, x in trainer.stage.named_buffers()
    }
    trainer.close()


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return weights by global name. ZeRO stage 3 has none, as there a rank holds slices without a
    shape.
    """
    if trainer.plan.zero == 3:
        return {}
    return _parts(trainer, dict(trainer.stage.named_parameters()))


def _parts(trainer: Trainer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return by global name this rank's slices of full tensors, without padding. A bias that only
    the first rank adds is zero on the others.
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

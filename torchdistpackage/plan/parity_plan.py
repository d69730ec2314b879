"""The runs of `tdp parity`: the small run of one process, and that of each layout. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchdistpackage.config.schema import (
    CheckpointSection,
    PrecisionSection,
    RunConfig,
    TrainSection,
)
from torchdistpackage.config.types import CUSTOM
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.parity.layouts import layouts_of
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.plan.shrink import smaller_model, zero_group_for

NUM_STEPS = 3
MOST_RANKS = 8
AXES = ("data", "pipe", "context", "tensor", "expert")


@dataclass(frozen=True)
class ParityRun:
    """The runs that `tdp parity` compares. whole: the run of one process. layouts: axes and the run
    of each.
    """

    whole: RunConfig
    layouts: Sequence[tuple[dict[str, int], RunConfig]]

    @property
    def most_ranks(self) -> int:
        return max(math.prod(axes.values()) for axes, _ in self.layouts)


def parity_run(plan: Plan) -> ParityRun:
    """Return the layouts of a plan, each a run of its own on the same samples.

    Raises:
        ConfigError: the plan has one rank, so there is nothing to compare.
    """
    parallel = plan.config.parallel
    degrees = {axis: getattr(parallel, axis, 1) for axis in AXES}
    axes = {axis: size for axis, size in degrees.items() if isinstance(size, int) and size > 1}
    chosen = [x for x in layouts_of(axes) if math.prod(x.values()) <= MOST_RANKS]
    if not chosen:
        raise ConfigError(
            "tdp parity compares layouts with one process, and this run has one rank; give it "
            "axes, for example parallel.data=2 parallel.tensor=2"
        )
    small = _small(plan)
    return ParityRun(_laid_out(small, {}), [(x, _laid_out(small, x)) for x in chosen])


def _small(plan: Plan) -> RunConfig:
    """Return the run with a small model of the same classes, in float64, without validations, saves
    and timing checks.
    """
    config = plan.config
    if config.model.name is not None:
        config = smaller_model(config)
        config = _with(config, "model", dropout=0.0)
    rounds = config.pipeline.microbatches * config.train.accumulate
    if config.pipeline.schedule != CUSTOM:
        rounds = min(config.pipeline.microbatches, 4) * min(config.train.accumulate, 2)
        config = _with(config, "pipeline", microbatches=min(config.pipeline.microbatches, 4))
        config = _with(config, "train", accumulate=min(config.train.accumulate, 2))
    samples = 2 * rounds * (2 if config.parallel.expert > 1 else 1)
    warmup = min(config.optim.warmup(config.train.steps), 1)
    plain = TrainSection(steps=NUM_STEPS, straggler_every=0, eval_every=0)
    kept = {"accumulate": config.train.accumulate, "step_timeout_s": config.train.step_timeout_s}
    return config.model_copy(
        update={
            "precision": PrecisionSection(dtype="float64"),
            "data": config.data.model_copy(update={"global_batch": samples}),
            "optim": config.optim.model_copy(update={"warmup_steps": warmup}),
            "train": plain.model_copy(update=kept),
            "checkpoint": CheckpointSection(save_every=0),
        }
    )


def _laid_out(config: RunConfig, axes: dict[str, int]) -> RunConfig:
    degrees = {a: axes.get(a, 1) for a in AXES if hasattr(config.parallel, a)}
    more: dict[str, object] = {}
    # expert ranks are some of the data ranks
    degrees["data"] *= axes.get("expert", 1)
    if degrees["data"] == 1:
        more["zero"] = 0
    if config.parallel.zero_group is not None:
        more["zero_group"] = zero_group_for(config.parallel, degrees["data"])
    if axes.get("tensor", 1) == 1:
        more |= {"sequence_parallel": False, "tp_comm_overlap": False}
    config = _with(config, "parallel", **degrees, **more)
    if axes.get("pipe", 1) == 1:
        config = _with(config, "pipeline", schedule="1f1b", chunks=None, costs=None)
    local = config.launch.local.model_copy(update={"procs": None})
    return _with(config, "launch", local=local)


def _with(config: RunConfig, section: str, **update: object) -> RunConfig:
    changed = getattr(config, section).model_copy(update=update)
    return config.model_copy(update={section: changed})

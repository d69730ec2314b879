"""The runs of `tdp prove`: the small run of one process, and that of each layout. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchdistpackage.config.schema import (
    CheckpointSection,
    PrecisionSection,
    RunConfig,
    TrainSection,
)
from torchdistpackage.config.types import CUSTOM
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.parity.layouts import layouts_of, text_of
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.plan.shrink import smaller_model, zero_group_for

NUM_STEPS = 3
"""Number of steps compared with those of one process."""
MORE_STEPS = 3
"""Number of steps around two stops, plus one: the last step of a schedule may have a rate of 0."""
MOST_RANKS = 8
AXES = ("data", "pipe", "context", "tensor", "expert")


@dataclass(frozen=True)
class ComparedOption:
    """An option of one process that must not change what a step computes.

    without, having: the runs to compare. alike: every micro-batch gets the samples of the first.
    dropout: both draw, because the option must not change the draws either.
    """

    name: str
    without: RunConfig
    having: RunConfig
    alike: bool = False
    dropout: bool = False


@dataclass(frozen=True)
class ComparedRuns:
    """Two runs that were compared, and how: as `record_run` takes it.

    having: the run that may differ; `one` itself, if one process is compared with itself. saves:
    it was stopped and resumed.
    """

    one: RunConfig
    having: RunConfig
    alike: bool = False
    dropout: bool = False
    wide: bool = False
    saves: bool = False


@dataclass(frozen=True)
class ParityRun:
    """The runs that `tdp prove` compares.

    whole: the run of one process. layouts: axes and run of each. features: options that must not
    change one process.
    """

    whole: RunConfig
    layouts: Sequence[tuple[dict[str, int], RunConfig]]
    features: Sequence[ComparedOption] = ()

    @property
    def most_ranks(self) -> int:
        return max(math.prod(axes.values()) for axes, _ in self.layouts)


def world_size_of(axes: Mapping[str, int]) -> int:
    """Return the number of ranks of a layout."""
    return math.prod(axes.values())


def parity_run(plan: Plan, layouts: str = "all") -> ParityRun:
    """Return the layouts of a plan, each as a separate run on the same samples.

    layouts: `all`, each axis of the plan alone, pairs, and all axes, with two ranks each; `this`,
        that of the plan, with two ranks an axis if it has more than `MOST_RANKS`; or a list, as in
        `data=2,tensor=2;pipe=4`.

    Raises:
        ConfigError: the plan has one rank, so there is nothing to compare, or the list cannot be.
    """
    chosen = _chosen(plan, layouts)
    small = _small(plan, chosen)
    one_process = _laid_out(small, {})
    runs = [(x, _laid_out(small, x)) for x in chosen]
    return ParityRun(one_process, runs, _features(one_process, plan.config.train.compile))


def smaller_layouts(run: ParityRun, axes: Mapping[str, int]) -> ParityRun:
    """Return the layouts with fewer axes than `axes`, to find the axis that makes a difference."""
    chosen = [x for x in layouts_of(axes) if len(x) < len(axes)]
    return ParityRun(run.whole, [(x, _laid_out(run.whole, x)) for x in chosen])


def _chosen(plan: Plan, layouts: str) -> list[dict[str, int]]:
    parallel = plan.config.parallel
    degrees = {axis: getattr(parallel, axis, 1) for axis in AXES}
    axes = {axis: size for axis, size in degrees.items() if isinstance(size, int) and size > 1}
    if layouts not in ("all", "this"):
        return _listed(layouts)
    if not axes:
        raise ConfigError(
            "tdp prove compares layouts with one process, and this run has one rank; give it "
            "axes, for example parallel.data=2 parallel.tensor=2"
        )
    if layouts == "all":
        # groups that shard, and replicas of them, take two ranks each
        data = {"data": 4} if parallel.zero_group is not None else {"data": 2}
        each = [data if x == {"data": 2} else x for x in layouts_of(axes)]
        return [x for x in each if math.prod(x.values()) <= MOST_RANKS]
    if axes.get("expert", 1) > 1:  # expert ranks are some of the data ranks
        axes["data"] = axes["data"] // axes["expert"]
    split_axes = {axis: size for axis, size in axes.items() if size > 1}
    if math.prod(split_axes.values()) > MOST_RANKS:
        split_axes = dict.fromkeys(split_axes, 2)
    if math.prod(split_axes.values()) > MOST_RANKS:
        raise ConfigError(
            f"tdp prove --layouts this: {text_of(split_axes)} are {math.prod(split_axes.values())} "
            f"ranks, but at most {MOST_RANKS} are allowed; pass --layouts all, or a list as "
            "'data=2,tensor=2;pipe=2'"
        )
    return [split_axes]


def _listed(layouts: str) -> list[dict[str, int]]:
    """Return the layouts of a list, as in `data=2,tensor=2;pipe=4`."""
    chosen: list[dict[str, int]] = []
    problems: list[str] = []
    for text in layouts.split(";"):
        axes: dict[str, int] = {}
        for pair in text.split(","):
            axis, equals, size = pair.strip().partition("=")
            if not equals or axis not in AXES or axis in axes or not size.isdecimal():
                problems.append(
                    f"{pair.strip()!r} is not an axis with a number of ranks; the axes are "
                    f"{', '.join(AXES)}, each once"
                )
            elif int(size) > 1:
                axes[axis] = int(size)
        ranks = math.prod(axes.values())
        if ranks > MOST_RANKS:
            problems.append(
                f"{text.strip()!r} has {ranks} ranks, but at most {MOST_RANKS} are allowed"
            )
        elif axes:
            chosen.append(axes)
    if not problems and not chosen:
        problems.append("no layout has several ranks")
    if problems:
        raise ConfigError(
            f"tdp prove --layouts {layouts!r}: {'; '.join(problems)}; write all, this, or a list "
            "as 'data=2,tensor=2;pipe=4'"
        )
    return chosen


def _small(plan: Plan, layouts: Sequence[Mapping[str, int]]) -> RunConfig:
    """Return the run with a small model of the same classes, in float64, without validations, saves
    and timing checks.
    """
    config = plan.config
    if config.model.name is not None:
        # by cost the head of a narrow model fills a stage, and no block is where a mistake may be
        config = _with(smaller_model(config), "pipeline", partition="uniform")
    rounds = config.pipeline.microbatches * config.train.accumulate
    if config.pipeline.schedule != CUSTOM:
        rounds = min(config.pipeline.microbatches, 4) * min(config.train.accumulate, 2)
        config = _with(config, "pipeline", microbatches=min(config.pipeline.microbatches, 4))
        config = _with(config, "train", accumulate=min(config.train.accumulate, 2))
    shares = (x.get("data", 1) * x.get("expert", 1) for x in layouts)
    samples = rounds * math.lcm(2 * (2 if config.parallel.expert > 1 else 1), *shares)
    warmup = min(config.optim.warmup(config.train.steps), 1)
    return config.model_copy(
        update={
            "precision": PrecisionSection(dtype="float64"),
            "data": config.data.model_copy(update={"global_batch": samples}),
            "optim": config.optim.model_copy(update={"warmup_steps": warmup}),
            "train": _train(config.train),
            "checkpoint": CheckpointSection(save_every=0),
        }
    )


def _train(section: TrainSection) -> TrainSection:
    """Return the section without validations and checks, without noise, which one process draws
    otherwise than many, and without a teacher or files made for the run's own samples.
    """
    plain = TrainSection()
    recompute = "blocks" if section.recompute == "auto" else section.recompute
    return section.model_copy(
        update={
            "steps": NUM_STEPS + MORE_STEPS,
            "epochs": None,
            "straggler_every": 0,
            "eval_every": 0,
            "check_replicas_every": 0,
            "check_calls": False,
            "neftune_noise_alpha": None,
            "distill": plain.distill,
            "dpo": section.dpo.model_copy(update={"reference": None}),
            "early_stop": plain.early_stop,
            "profile": plain.profile,
            "recompute": recompute,
            "compile": "off",
        }
    )


def _features(one: RunConfig, compiles: str) -> list[ComparedOption]:
    """Return the options of a run that must not change what a step computes.

    one: one process. compiles: train.compile of the run.
    """
    features: list[ComparedOption] = []
    unrolled = _with(one, "train", recompute="none")
    rounds = one.pipeline.microbatches * one.train.accumulate
    # a task such as a loss over all pairs of a round is of a round
    has_task = one.data.spec is not None and bool(one.data.spec.task)
    if rounds > 1 and not has_task and one.pipeline.schedule != CUSTOM:
        single = _with(_with(unrolled, "pipeline", microbatches=1), "train", accumulate=1)
        # what experts balance is of a micro-batch, so there all of them get the same samples
        alike = one.model.moe.num_experts is not None or one.model.hf is not None
        if alike and isinstance(one.data.global_batch, int):
            single = _with(single, "data", global_batch=one.data.global_batch // rounds)
        features.append(ComparedOption("accumulation", single, unrolled, alike=alike))
    if one.train.recompute != "none":
        features.append(ComparedOption("recompute", unrolled, one, dropout=True))
    if compiles != "off":
        features.append(
            ComparedOption("compile", unrolled, _with(unrolled, "train", compile=compiles))
        )
    return features


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

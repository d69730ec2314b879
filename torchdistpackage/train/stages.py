"""Where the model is cut into stages, and in which order they work. No torch.

One rule: the order is built before the cut, because it says how many stages there are and where
they run; only `auto` weighs several cuts, each with the best order for its costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchdistpackage.config.kinds import AUTO, CUSTOM
from torchdistpackage.config.pipeline_rules import custom_schedule, measured_costs
from torchdistpackage.config.problem import ConfigProblems, Problem
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import ScheduleError
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.models.registry import Model
from torchdistpackage.parallel.pipeline.split import split_by_cost, split_evenly
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.costs import Costs, StageCosts
from torchdistpackage.schedule.costs_file import CostsFile
from torchdistpackage.schedule.generate import build
from torchdistpackage.schedule.simulate import DEFAULT_COSTS, Timeline, simulate
from torchdistpackage.schedule.synthesize import synthesize

AUTO_CHUNKS = (1, 2)
"""Stages on a rank that `auto` tries: more cuts the model finer than its bubble is worth, and who
wants more says so."""


@dataclass(frozen=True, slots=True)
class Stages:
    """cut: for each stage its pieces; () for a user's own model. costs: what the prediction is by:
    measured ones where a file has them."""

    schedule: Schedule
    cut: tuple[range, ...]
    costs: Costs
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Pieces:
    """Names, and of each its computation and its number of parameters."""

    names: tuple[str, ...]
    computation: tuple[float, ...]
    parameters: tuple[int, ...]

    @classmethod
    def of(cls, kind: Model, shape: GPTShape) -> "Pieces":
        return cls(kind.pieces(shape), kind.piece_costs(shape), kind.piece_parameters(shape))


def stages(config: RunConfig, pieces: Pieces | None) -> Stages:
    """Of a run whose section has passed its rules. pieces: None for a user's own model.

    Raises:
        ConfigError: the costs in `pipeline.costs` are of other stages or pieces.
    """
    section = config.pipeline
    try:
        measured = measured_costs(config)
        if section.schedule == AUTO:
            return _found(config, pieces, measured)
        if section.schedule == CUSTOM:
            schedule = custom_schedule(config)
        else:
            pipe = config.parallel.pipe
            schedule = build(section.schedule, pipe, section.microbatches, section.chunks)
        cut = _cut(config, pieces, measured, schedule.placement)
        costs = DEFAULT_COSTS
        if measured is not None:
            costs = _measured(measured, pieces, cut, schedule.num_stages)
    except ScheduleError as error:
        problem = Problem("", None, "pipeline.costs", str(error))
        raise ConfigProblems("the pipeline", [problem]) from error
    return Stages(schedule, cut, costs, simulate(schedule, costs))


def weights_of(partition: str, pieces: Pieces, measured: CostsFile | None) -> Sequence[float]:
    """What the stages are to share evenly, piece by piece.

    Raises:
        ScheduleError: a piece has not been measured.
    """
    if partition == "time" and measured is not None:
        found = measured.of_cut([(name,) for name in pieces.names])
        return [f + b for f, b in zip(found.forward, found.backward, strict=True)]
    return pieces.parameters if partition == "parameters" else pieces.computation


def _cut(
    config: RunConfig,
    pieces: Pieces | None,
    measured: CostsFile | None,
    placement: Sequence[int],
) -> tuple[range, ...]:
    if pieces is None:
        return ()
    if config.pipeline.partition == "uniform":
        return split_evenly(len(pieces.names), len(placement))
    weights = weights_of(config.pipeline.partition, pieces, measured)
    return split_by_cost(weights, len(placement), placement=placement)


def _found(config: RunConfig, pieces: Pieces | None, measured: CostsFile | None) -> Stages:
    """The order, and the number of stages on a rank, that takes least time by its costs."""
    pipe, number = config.parallel.pipe, config.pipeline.microbatches
    found: list[Stages] = []
    for placement in _placements(config, pieces, measured):
        cut = _cut(config, pieces, measured, placement)
        if measured is not None:
            costs = _measured(measured, pieces, cut, len(placement))
        elif pieces is not None:
            costs = _computed(pieces, cut)
        else:
            # of a model that nobody knows a stage takes its part of the rank's time
            part = pipe / len(placement)
            costs = StageCosts.uniform(len(placement), part, part, part)
        chunks = len(placement) // pipe
        schedule = synthesize(pipe, number, costs, chunks=chunks, placement=placement)
        found.append(Stages(schedule, cut, costs, simulate(schedule, costs)))
    return min(found, key=lambda x: x.timeline.total)


def _placements(
    config: RunConfig, pieces: Pieces | None, measured: CostsFile | None
) -> list[tuple[int, ...]]:
    """In a loop over the ranks, and for two stages a rank there and back as well."""
    pipe, chunks = config.parallel.pipe, config.pipeline.chunks
    if measured is not None and not measured.pieces and measured.num_stages:
        options = (max(measured.num_stages // pipe, 1),)
    elif chunks is not None or pieces is None:
        options = (chunks or 1,)
    else:
        options = tuple(v for v in AUTO_CHUNKS if v * pipe <= len(pieces.names))
    found = [tuple(range(pipe)) * v for v in options]
    if 2 in options and pipe > 1:
        found.append((*range(pipe), *reversed(range(pipe))))
    return found


def _measured(
    measured: CostsFile, pieces: Pieces | None, cut: Sequence[range], num_stages: int
) -> StageCosts:
    if pieces is None or not measured.pieces:
        return measured.of(num_stages)
    return measured.of_cut([[pieces.names[i] for i in span] for span in cut])


def _computed(pieces: Pieces, cut: Sequence[range]) -> StageCosts:
    """By operations, a mean rank's forward taking 1; messages are free, as nobody measured one."""
    shares = [sum(pieces.computation[i] for i in span) for span in cut]
    unit = sum(shares) / len(cut) or 1.0
    forward = tuple(share / unit for share in shares)
    whole = tuple(2 * f for f in forward)
    return StageCosts(forward, whole, forward, forward, (0.0,) * len(cut))

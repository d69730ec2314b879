"""Where the model is cut into stages, and in which order they work. No torch.

One rule: the order is built before the cut, because it says how many stages there are and where
they run; only `auto` weighs several cuts, each with the best order for its costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torchdistpackage.config.rules_pipeline import custom_schedule, measured_costs
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.types import AUTO, CUSTOM
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.models.registry import Model
from torchdistpackage.parallel.pipeline.partition.cost_split import (
    refine,
    split_by_cost,
    split_evenly,
)
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.autoschedule.synthesize import synthesize
from torchdistpackage.schedule.costs import CostsFile, StageCosts
from torchdistpackage.schedule.generators.registry import build
from torchdistpackage.schedule.timeline import Timeline, simulate

AUTO_CHUNKS = (1, 2)
"""Stages on a rank that `auto` tries: more cuts the model finer than its bubble is worth, and who
wants more says so."""


@dataclass(frozen=True, slots=True)
class Stages:
    """cut: for each stage its pieces; () for a user's own model. own_cut: the same of one that is
    cut by time, whose build compares the pieces. costs: what the prediction is by: measured ones
    where a file has them, else operations. measured: what that file holds."""

    schedule: Schedule
    cut: tuple[range, ...]
    costs: StageCosts
    timeline: Timeline
    measured: CostsFile | None
    own_cut: tuple[range, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelUnits:
    """Names, and of each its computation and its number of parameters."""

    names: tuple[str, ...]
    computation: tuple[float, ...]
    parameters: tuple[int, ...]

    @classmethod
    def of(cls, kind: Model, shape: GPTShape) -> "ModelUnits":
        return cls(kind.pieces(shape), kind.piece_costs(shape), kind.piece_parameters(shape))


def stages(config: RunConfig, pieces: ModelUnits | None) -> Stages:
    """Of a run whose section has passed its rules. pieces: None for a user's own model.

    Cut by time, an own model has the pieces that were measured; its build compares them.
    """
    section, measured = config.pipeline, measured_costs(config)
    if pieces is None and section.partition == "time" and measured is not None:
        found = stages(config, ModelUnits(tuple(measured.pieces), (), ()))
        return replace(found, cut=(), own_cut=found.cut)
    if section.schedule == AUTO:
        return _found(config, pieces, measured)
    if section.schedule == CUSTOM:
        schedule = custom_schedule(config)
    else:
        pipe = config.parallel.pipe
        schedule = build(section.schedule, pipe, section.microbatches, section.chunks)
    cut = _cut(config, pieces, measured, schedule.placement)
    if section.partition == "time":
        by_cut = partial(_costs, config, pieces, measured, num_stages=schedule.num_stages)
        cut = refine(cut, schedule, lambda tried: simulate(schedule, by_cut(tried)).total)
    costs = _costs(config, pieces, measured, cut, schedule.num_stages)
    return Stages(schedule, cut, costs, simulate(schedule, costs), measured)


def weights_of(partition: str, pieces: ModelUnits, measured: CostsFile | None) -> Sequence[float]:
    """What the stages are to share evenly, piece by piece.

    Raises:
        ScheduleError: a piece has not been measured.
    """
    if partition == "time" and measured is not None:
        return measured.weights(pieces.names)
    return pieces.parameters if partition == "parameters" else pieces.computation


def _cut(
    config: RunConfig,
    pieces: ModelUnits | None,
    measured: CostsFile | None,
    placement: Sequence[int],
) -> tuple[range, ...]:
    if pieces is None:
        return ()
    if config.pipeline.partition == "uniform":
        return split_evenly(len(pieces.names), len(placement))
    weights = weights_of(config.pipeline.partition, pieces, measured)
    return split_by_cost(weights, len(placement), placement=placement)


def _found(config: RunConfig, pieces: ModelUnits | None, measured: CostsFile | None) -> Stages:
    """The order, and the number of stages on a rank, that takes least time by its costs."""
    pipe, number = config.parallel.pipe, config.pipeline.microbatches
    found: list[Stages] = []
    for placement in _placements(config, pieces, measured):
        cut = _cut(config, pieces, measured, placement)
        costs = _costs(config, pieces, measured, cut, len(placement))
        chunks = len(placement) // pipe
        schedule = synthesize(pipe, number, costs, chunks=chunks, placement=placement)
        found.append(Stages(schedule, cut, costs, simulate(schedule, costs), measured))
    longest = min(x.timeline.total for x in found) * (1 + _ROUNDING)
    return min((x for x in found if x.timeline.total <= longest), key=lambda x: _held(x, pipe))


_ROUNDING = 1e-9


def _held(found: Stages, pipe: int) -> float:
    """Microbatches on the fullest rank, each stage counting as its part of a rank."""
    return max(found.timeline.peak_live_of_rank) * pipe / found.schedule.num_stages


def _placements(
    config: RunConfig, pieces: ModelUnits | None, measured: CostsFile | None
) -> list[tuple[int, ...]]:
    """In a loop over the ranks, and for two stages a rank there and back as well.

    Costs by stage are of one cut, so they choose an order for it and no other placement.
    """
    pipe, chunks = config.parallel.pipe, config.pipeline.chunks
    if measured is not None and (pieces is None or not measured.pieces):
        return [tuple(range(pipe)) * (chunks or (measured.num_stages or pipe) // pipe)]
    if chunks is not None or pieces is None:
        options = (chunks or 1,)
    else:
        options = tuple(v for v in AUTO_CHUNKS if v * pipe <= len(pieces.names))
    found = [tuple(range(pipe)) * v for v in options]
    if 2 in options and pipe > 1:
        found.append((*range(pipe), *reversed(range(pipe))))
    return found


def _costs(
    config: RunConfig,
    pieces: ModelUnits | None,
    measured: CostsFile | None,
    cut: Sequence[range],
    num_stages: int,
) -> StageCosts:
    """As measured; else by operations, a mean rank's forward taking 1 and messages nothing."""
    if measured is not None and (pieces is None or not measured.pieces):
        return measured.of(num_stages)
    if measured is not None and pieces is not None:
        return measured.of_cut([[pieces.names[i] for i in span] for span in cut])
    if pieces is None:
        # of a model that nobody knows a stage takes its part of the rank's time
        shares = [1.0] * num_stages
    else:
        shares = [sum(pieces.computation[i] for i in span) for span in cut]
    unit = sum(shares) / config.parallel.pipe or 1.0
    forward = tuple(share / unit for share in shares)
    whole = tuple(2 * f for f in forward)
    return StageCosts(forward, whole, forward, forward, (0.0,) * num_stages)

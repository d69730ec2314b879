"""Choose where the model is cut into stages, and the order of their work. No torch.

The order is built before the cut, because it says how many stages there are and where they run;
only `auto` weighs several cuts, each with the best order for its costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

from torchdistpackage.config.rules_pipeline import custom_schedule, measured_costs
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.types import AUTO, CUSTOM
from torchdistpackage.models.model_spec import ModelSpec
from torchdistpackage.parallel.pipeline.partition.cost_split import (
    refine,
    split_by_cost,
    split_evenly,
)
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.autoschedule import synthesize
from torchdistpackage.schedule.costs import CostsFile, StageCosts
from torchdistpackage.schedule.engine import Timeline, simulate
from torchdistpackage.schedule.generators import build, computations

AUTO_CHUNKS = (1, 2)
"""Numbers of stages on a rank that `auto` tries; more would cut the model more finely than its
bubble is worth.
"""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Stages:
    """The stages of a run. cut: the pieces of each stage; () for a user's own model. own_cut: the
    same for a user's own model that is cut by time, whose build compares the pieces. costs: the
    costs behind the prediction: measured ones if a file has them, else operations. measured: the
    content of that file.
    """

    schedule: Schedule
    cut: tuple[range, ...]
    costs: StageCosts
    measured: CostsFile | None
    own_cut: tuple[range, ...] = ()

    @cached_property
    def timeline(self) -> Timeline:
        """The prediction of the order by its costs."""
        return simulate(self.schedule, self.costs)


@dataclass(frozen=True, slots=True)
class ModelUnits:
    """The names of a model's pieces, and the computation and number of parameters of each."""

    names: tuple[str, ...]
    computation: tuple[float, ...]
    parameters: tuple[int, ...]

    @classmethod
    def of(cls, model: ModelSpec) -> "ModelUnits":
        return cls(model.pieces(), model.piece_costs(), model.piece_parameters())


def stages(config: RunConfig, pieces: ModelUnits | None, *, messages: bool = True) -> Stages:
    """Return the stages of a run whose section has passed its rules. pieces: None for a user's own
    model. messages: the schedule has them, which a run needs; predictions need them not.

    Cut by time, an own model has the pieces that were measured; its build compares them.
    """
    section, measured = config.pipeline, measured_costs(config)
    if pieces is None and section.partition == "time" and measured is not None:
        undivided = stages(config, ModelUnits(tuple(measured.pieces), (), ()))
        return replace(undivided, cut=(), own_cut=undivided.cut)
    partitioner = _Partitioner(config, pieces, measured)
    if section.schedule == AUTO:
        return partitioner.synthesized()
    if section.schedule == CUSTOM:
        schedule = custom_schedule(config)
    else:
        pipe = config.parallel.pipe
        make = build if messages else computations
        schedule = make(section.schedule, pipe, section.microbatches, section.chunks)
    cut = partitioner.cut(schedule.placement)
    if section.partition == "time":
        time_of = partial(partitioner.costs, num_stages=schedule.num_stages)
        cut = refine(cut, schedule, lambda tried: simulate(schedule, time_of(tried)).total)
    return partitioner.stages(schedule, cut, partitioner.costs(cut, schedule.num_stages))


def cut_of(config: RunConfig, pieces: ModelUnits, placement: tuple[int, ...]) -> tuple[range, ...]:
    """Return the pieces of each stage of a run that is cut without simulating its schedule."""
    return _Partitioner(config, pieces, None).cut(placement)


@lru_cache(maxsize=64)
def _split(weights: tuple[float, ...], placement: tuple[int, ...]) -> tuple[range, ...]:
    """Cut once for all plans of a model, because a search makes many plans and a cut takes up to a
    second.
    """
    return split_by_cost(weights, len(placement), placement=placement)


@dataclass(frozen=True, slots=True)
class _Partitioner:
    """Makes the cuts of one run, and their costs. measured: the content of `pipeline.costs`."""

    run: RunConfig
    pieces: ModelUnits | None
    measured: CostsFile | None

    def stages(self, schedule: Schedule, cut: tuple[range, ...], costs: StageCosts) -> Stages:
        return Stages(schedule, cut, costs, self.measured)

    def cut(self, placement: Sequence[int]) -> tuple[range, ...]:
        """Cut the pieces so that the stages divide evenly what `pipeline.partition` names.

        Raises:
            ScheduleError: a piece has not been measured.
        """
        pieces, partition = self.pieces, self.run.pipeline.partition
        if pieces is None:
            return ()
        if partition == "uniform":
            return split_evenly(len(pieces.names), len(placement))
        weights = pieces.parameters if partition == "parameters" else pieces.computation
        if partition == "time" and self.measured is not None:
            weights = self.measured.weights(pieces.names)
        return _split(tuple(weights), tuple(placement))

    def synthesized(self) -> Stages:
        """Return the order and the number of stages per rank with the shortest time by their
        costs.
        """
        pipe, number = self.run.parallel.pipe, self.run.pipeline.microbatches
        candidates: list[Stages] = []
        for placement in self._placements():
            cut = self.cut(placement)
            costs, chunks = self.costs(cut, len(placement)), len(placement) // pipe
            schedule = synthesize(pipe, number, costs, chunks=chunks, placement=placement)
            candidates.append(self.stages(schedule, cut, costs))
        longest = min(x.timeline.total for x in candidates) * (1 + _ROUNDING)
        # microbatches on the fullest rank, each stage counting as its part of a rank
        return min(
            (x for x in candidates if x.timeline.total <= longest),
            key=lambda x: max(x.timeline.peak_live_of_rank) * pipe / x.schedule.num_stages,
        )

    def _placements(self) -> list[tuple[int, ...]]:
        """Return the placements to try: a loop over the ranks, and with two stages per rank also
        there and back.

        Costs by stage are of one cut, so they choose an order for it and no other placement.
        """
        pipe, chunks = self.run.parallel.pipe, self.run.pipeline.chunks
        if self._by_stage is not None:
            return [tuple(range(pipe)) * (chunks or (self._by_stage.num_stages or pipe) // pipe)]
        if chunks is not None or self.pieces is None:
            options = (chunks or 1,)
        else:
            options = tuple(v for v in AUTO_CHUNKS if v * pipe <= len(self.pieces.names))
        placements = [tuple(range(pipe)) * v for v in options]
        if 2 in options and pipe > 1:
            placements.append((*range(pipe), *reversed(range(pipe))))
        return placements

    @property
    def _by_stage(self) -> CostsFile | None:
        """Measured costs of whole stages rather than of pieces, or None."""
        measured = self.measured
        return measured if measured and (self.pieces is None or not measured.pieces) else None

    def costs(self, cut: Sequence[range], num_stages: int) -> StageCosts:
        """Return measured costs or, without any, operations: a mean rank's forward takes 1, and
        messages nothing.
        """
        if self._by_stage is not None:
            return self._by_stage.of(num_stages)
        pieces = self.pieces
        if self.measured is not None and pieces is not None:
            return self.measured.of_cut([[pieces.names[i] for i in span] for span in cut])
        # a stage of a user's own model takes its part of the rank's time
        shares = [1.0] * num_stages
        if pieces is not None:
            shares = [sum(pieces.computation[i] for i in span) for span in cut]
        unit = sum(shares) / self.run.parallel.pipe or 1.0
        forward = tuple(share / unit for share in shares)
        backward = tuple(2 * f for f in forward)
        return StageCosts(forward, backward, forward, forward, (0.0,) * num_stages)

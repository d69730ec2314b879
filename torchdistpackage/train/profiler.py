"""Compare the timeline of a recorded step with its simulation: the differences and their causes.

The pipe group of rank 0 records a step whenever the log has a line; other steps and ranks pay
nothing. The recording is read with the numbers of the step, so no device stops for it. Rank 0 keeps
the last one: a picture, and the costs, from which `pipeline.schedule: auto` finds a better order
for the next run.
"""

from collections.abc import Mapping
from typing import cast

from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.primitives import ranks_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.files import atomic_write
from torchdistpackage.parallel.pipeline.executor import Recording
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.run_files import COSTS, PICTURE
from torchdistpackage.schedule.costs import PieceCosts, StageCosts, costs_text
from torchdistpackage.schedule.draw import svg
from torchdistpackage.schedule.engine import Span
from torchdistpackage.schedule.trace_costs import BubbleAttribution, attribute_bubble, costs_of
from torchdistpackage.train.loop import Callback, Loop
from torchdistpackage.train.staged_model import TrainStages
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.step_stats import PendingStep, StepResult

Weights = Mapping[int, Mapping[str, float]]
"""Weights of the pieces of each stage, by which the stage's time is divided."""


class StepProfiler(Callback):
    """The profiler of one run with a pipeline. every: steps between two recordings."""

    def __init__(self, trainer: Trainer, every: int):
        self._trainer, self._every = trainer, every
        self._step = 0
        self._held: tuple[int, Recording | None] | None = None
        self._rows: list[list[Span]] = []
        self._weights = _weights(trainer.plan, trainer.stage)
        self._gap: BubbleAttribution | None = None
        pipe = tpc.get_group("pipe")
        self._group = on_cpu(pipe)
        self._takes_part = 0 in ranks_of(pipe)

    def records(self, step: int) -> bool:
        return self._takes_part and (step % self._every == 0 or step == self._trainer.num_steps)

    def on_issued(self, loop: Loop, step: int) -> None:
        if self.records(step):
            self._held = step, self._trainer.executor.recording

    def on_step(self, loop: Loop, result: StepResult, issued: PendingStep) -> None:
        if self._held is not None and self._held[0] == result.step:
            (_, recording), self._held = self._held, None
            assert recording is not None
            if (gap := self._read(result.step, recording)) is not None:
                loop.log.note(pipeline=str(gap))

    def _read(self, step: int, recording: Recording) -> BubbleAttribution | None:
        """Show the recording of `step` on rank 0; all ranks that recorded the step call it."""
        recorded = recording.spans(), self._weights
        gathered = cast(
            list[tuple[list[Span], Weights]], primitives.gather_objects(recorded, self._group)
        )
        if self._trainer.rank != 0:
            return None
        self._rows = [row for row, _ in gathered]
        self._weights = {
            stage: piece_weights
            for _, weights in gathered
            for stage, piece_weights in weights.items()
        }
        self._step, self._gap = step, attribute_bubble(self._trainer.plan.schedule, self._rows)
        return self._gap

    def on_end(self, loop: Loop) -> None:
        """Write picture and costs to the run folder."""
        if self._gap is None:
            return
        plan, folder = self._trainer.plan, loop.folder
        costs = costs_of(self._rows, plan.schedule.num_stages)
        note = f"seconds, measured in step {self._step} of {self._trainer.name}"
        atomic_write(folder / PICTURE, svg(self._gap.predicted, self._gap.measured))
        atomic_write(folder / COSTS, costs_text(costs, piece_costs(self._weights, costs), note))
        loop.artifacts += (PICTURE, COSTS)


def piece_costs(weights: Weights, costs: StageCosts) -> dict[str, PieceCosts]:
    """Return the time of each stage, divided among its pieces by weight, or evenly if they have
    none.
    """
    costs_by_piece: dict[str, PieceCosts] = {}
    for stage, piece_weights in sorted(weights.items()):
        total = sum(piece_weights.values())
        for name, weight in piece_weights.items():
            share = weight / total if total else 1 / len(piece_weights)
            costs_by_piece[name] = PieceCosts(
                costs.forward[stage] * share, costs.backward[stage] * share
            )
    return costs_by_piece


def _weights(plan: Plan, stages: TrainStages) -> Weights:
    """Return the cost of each of this rank's stages.

    For our models these are operations by piece; for the children of a user's model they are
    parameter counts, because nothing else is known.
    """
    if plan.model is None:
        return {
            int(stage): {
                n: sum(p.numel() for p in x.parameters()) for n, x in chain.named_children()
            }
            for stage, chain in stages.named_children()
        }
    computation, own_stages = plan.model.piece_costs(), map(int, stages)
    return {s: {plan.pieces[i]: computation[i] for i in plan.stages[s]} for s in own_stages}

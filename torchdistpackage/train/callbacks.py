"""Callbacks of the training loop: timing checks, non-finite numbers, records of saves.

Each value is compared with those of all peers. For data loading all ranks are peers, otherwise the
ranks of one stage. replica_check.py compares values that ranks must hold alike.
"""

from torchdistpackage.data.blend import BlendedDataset
from torchdistpackage.errors import ConfigError, NonFiniteError
from torchdistpackage.harness.stragglers.compare import Comparison
from torchdistpackage.launch.entrypoint import user_object
from torchdistpackage.launch.run_events import SAVE, note_event
from torchdistpackage.plan.run_plan import Plan, stage_loads
from torchdistpackage.train.log import SHARES
from torchdistpackage.train.loop import Callback, Loop
from torchdistpackage.train.nonfinite import explain
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.step_stats import PendingStep, StepResult


def own_callback(path: str) -> Callback:
    """Return the callback made by the user's code at an import path of `log.callbacks`.

    Raises:
        ConfigError: it returned something else.
    """
    callback: object = user_object(path)()
    if not isinstance(callback, Callback):
        raise ConfigError(
            f"log.callbacks: {path} returned a {type(callback).__name__}; return an object of a "
            "class derived from torchdistpackage.Callback"
        )
    return callback


class SaveEvents(Callback):
    """Records each checkpoint of the run when it is complete."""

    def on_save(self, loop: Loop, step: int, took_s: float) -> None:
        if loop.is_main:
            note_event(loop.folder, SAVE, step, took_s=round(took_s, 3))


class DeadExperts(Callback):
    """Names experts that no token chose in `every` steps."""

    def __init__(self, every: int):
        self._every = every
        self._chosen: dict[str, list[int]] = {}

    def on_step(self, loop: Loop, result: StepResult, issued: PendingStep) -> None:
        for name, load in result.experts.items():
            totals = self._chosen.get(name, [0] * len(load.choices))
            self._chosen[name] = [a + b for a, b in zip(totals, load.choices, strict=True)]
        if result.step % self._every:
            return
        dead = {n: [e for e, x in enumerate(xs) if not x] for n, xs in self._chosen.items()}
        self._chosen = {}
        named = [
            f"{name} {', '.join(map(str, experts))}" for name, experts in dead.items() if experts
        ]
        if named:
            loop.log.note(
                f"experts that no token chose in the last {self._every} steps: {'; '.join(named)}",
                dead_experts="; ".join(named),
            )


class SourceShares(Callback):
    """Records each source's share of a step, and how often the source was passed over."""

    def __init__(self, data: BlendedDataset, seed: int):
        self._data, self._seed = data, seed

    def on_step(self, loop: Loop, result: StepResult, issued: PendingStep) -> None:
        if loop.is_main:
            values = {SHARES: self._data.shares(self._seed, result.step)}
            loop.log.note(**values, epochs=self._data.epochs(self._seed, result.step))


class StragglerCheck(Callback):
    """Reports slow ranks after every `every` steps."""

    def __init__(self, trainer: Trainer, every: int):
        costs = planned_costs(trainer.plan)
        self.compare = Comparison(trainer.phases, every=every, everywhere=("data",), costs=costs)

    def on_issued(self, loop: Loop, step: int) -> None:
        if lines := self.compare(step):
            loop.log.note(*lines, stragglers="; ".join(lines))


def planned_costs(plan: Plan) -> dict[str, list[float]]:
    """Return shares of the computation or parameters, by phase and rank; nothing for a user's own
    model.
    """
    loads = stage_loads(plan)
    if not loads:
        return {}
    mesh = plan.topology.dense
    rank_loads = [loads[mesh.coord(rank)["pipe"]] for rank in range(mesh.size)]
    shares = [load.share for load in rank_loads]
    parameters = [float(load.num_trained) for load in rank_loads]
    return {"forward": shares, "backward": shares, "optimizer": parameters}


class NonFiniteCheck(Callback):
    """Reports the origin of a non-finite number, and ends the run or skips the step.

    Raises:
        NonFiniteError: a number of a step was not finite, unless `skips`; on all ranks.
    """

    def __init__(self, skips: bool):
        self._skips = skips

    def on_step(self, loop: Loop, result: StepResult, issued: PendingStep) -> None:
        if not result.skipped:
            return
        with loop.heartbeat.allow_slow():
            text = explain(loop.trainer, issued)
        if not self._skips:
            raise NonFiniteError(
                f"{text}. No rank has updated its weights with it; continue from the last "
                "checkpoint with other data or a lower optim.lr, or leave such steps out with "
                "train.on_nonfinite=skip"
            )
        loop.state.skipped += 1
        loop.log.note(f"{text}; left out, {loop.state.skipped} so far")

"""The loop as on a device, whose numbers come a step late: what is saved is what was computed.

The trainer is a stand-in that counts its updates; that needs no device, and real ones are slow.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchdistpackage.harness.stragglers.compare import Phases
from torchdistpackage.plan.run_plan import VOTE_ROOM
from torchdistpackage.train import saving
from torchdistpackage.train.log import StepLog
from torchdistpackage.train.loop import Loop
from torchdistpackage.train.metric_rows import read_metrics
from torchdistpackage.train.step_stats import Period, StepResult
from torchdistpackage.train.stop import StopController
from torchdistpackage.train.train_state import TrainState
from torchdistpackage.train.votes import Votes


@dataclass
class PendingStepDouble:
    result: StepResult
    period: Period = field(default_factory=lambda: Period(torch.device("cpu")))

    def wait(self) -> StepResult:
        return self.result


@dataclass
class Counting:
    """`updates`: steps that its weights have seen."""

    kind: str
    num_steps: int
    updates: int = 0
    rank: int = 0
    data: None = None
    task: None = None
    val_task: dict[str, float] = field(default_factory=dict)
    plan: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(timeline=SimpleNamespace(bubble=0.0))
    )
    runs_ahead: bool = field(init=False)
    phases: Phases = field(default_factory=Phases)
    votes: Votes = field(default_factory=Votes)

    def __post_init__(self) -> None:
        self.runs_ahead = self.kind == "cuda"

    def limit(self, seconds: float) -> None: ...

    def close(self, *, wait: bool = True) -> None: ...

    def train_step(self, step: int, *, measure: bool, record: bool):
        votes = dict(zip(self.votes.names, self.votes.cast(step), strict=False))  # room is left
        self.updates = step
        result = StepResult(step, 1.0, 1.0, 10, 0.01, 1e-3, None, votes=votes)
        return PendingStepDouble(result)

    def evaluate(self, stop: Callable[[], bool] | None = None) -> float | None:
        return None if stop is not None and stop() else 1.0

    def evaluate_sets(self, stop: Callable[[], bool] | None = None) -> dict[str, float] | None:
        return {}


@dataclass
class Wishing(StopController):
    """Wishes for the end from its `at`-th question on."""

    at: int = 10**9
    asked: int = 0

    def should_stop(self) -> bool:
        self.asked += 1
        return self.asked >= self.at


@pytest.fixture
def saved(monkeypatch) -> list[tuple[int, int]]:
    """(step it is called, updates in the weights) of each checkpoint."""
    found: list[tuple[int, int]] = []

    def begin_save(trainer: Counting, state: TrainState, *_: object) -> SimpleNamespace:
        found.append((state.step, trainer.updates))
        return SimpleNamespace(step=state.step, agree=lambda: True)

    monkeypatch.setattr(saving, "begin_save", begin_save)
    return found


def loop_of(trainer: Counting, folder: Path, life: StopController) -> Loop:
    log = StepLog(folder, trainer.num_steps, rank=trainer.rank)
    return Loop(trainer, TrainState(), folder, log, life, call_timeout_s=1.0, save_every_min=1.0)


def test_what_is_exported_at_the_end_is_saved_at_the_end_without_saves_before(
    tmp_path: Path, saved
):
    for save_last in (False, True):
        trainer = Counting("cpu", 6)
        log = StepLog(tmp_path / str(save_last), trainer.num_steps, rank=trainer.rank)
        Loop(
            trainer,
            TrainState(),
            tmp_path,
            log,
            StopController(),
            call_timeout_s=1.0,
            save_last=save_last,
        ).run()
        assert saved == [(6, 6)] * save_last


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_save_by_the_clock_is_made_once_and_of_the_step_it_is_named_after(
    tmp_path: Path, saved, kind
):
    loop = loop_of(Counting(kind, 6), tmp_path, StopController())
    loop._saved_at -= 61  # a minute is over
    loop.run()
    assert all(step == updates for step, updates in saved), saved
    assert len(saved) == len(set(saved)) == 2, "by the clock, and at the end"


@pytest.mark.parametrize("at", range(1, 7))
@pytest.mark.parametrize(("kind", "late"), [("cpu", 0), ("cuda", 1)])
def test_a_run_ends_after_the_step_of_the_wish_or_where_numbers_are_late_one_later(
    tmp_path: Path, saved, kind, late, at
):
    loop = loop_of(Counting(kind, 20), tmp_path, Wishing(at=at))
    assert loop.run() is None
    assert saved == [(at + late, at + late)]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(
        range(1, at + late + 1)
    )


def test_more_time_is_kept_free_where_numbers_come_late(tmp_path: Path):
    lives = {kind: StopController() for kind in ("cpu", "cuda")}
    for kind, life in lives.items():
        loop_of(Counting(kind, 1), tmp_path, life)
    assert lives["cuda"].ahead > lives["cpu"].ahead


def test_the_votes_of_a_run_fit_the_room_that_the_bytes_of_a_step_count(tmp_path: Path):
    """More make a step's message longer than `tdp plan` says: raise `VOTE_ROOM`."""
    trainer = Counting("cpu", 1)
    loop_of(trainer, tmp_path, StopController())
    saves = ("save_done", "save_failed", "local_done", "local_failed")
    assert trainer.votes.names == ("save", "stop", *saves)
    assert len(trainer.votes.names) + 2 <= VOTE_ROOM

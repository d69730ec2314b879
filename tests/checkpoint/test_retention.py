"""What keeps a checkpoint, and what goes first."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchdistpackage.checkpoint import commit as commits
from torchdistpackage.checkpoint.manifest import Fact, Manifest
from torchdistpackage.checkpoint.retention import Retention, reasons
from torchdistpackage.train import train_state


def write(folder: Path, step: int, keep: Retention, **facts: Fact) -> Path:
    temporary = commits.make_temporary(folder, step)
    final = commits.commit(temporary, Manifest(step, 0, (), {}, {}, facts))
    commits.retain(folder, keep, final)
    return final


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.iterdir())


def test_multiples_the_best_and_the_last_stay(tmp_path):
    keep = Retention(last=2, every=40, best="val_loss")
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 1.5, 50: None, 60: 1.25, 70: 4.0, 80: 5.0, 90: 6.0}
    for step, loss in losses.items():
        write(tmp_path, step, keep, **({} if loss is None else {"val_loss": loss}))
    assert steps(tmp_path) == [20, 40, 80, 90]
    found = reasons(keep, commits.candidates(tmp_path))
    assert {path.name: why for path, why in found.items()} == {
        "step_000090": ["keep_last=2"],
        "step_000080": ["keep_last=2", "keep_every=40"],
        "step_000040": ["keep_every=40"],
        "step_000020": ["keep_best=val_loss"],
    }
    write(tmp_path, 100, keep, val_loss=0.5)
    assert steps(tmp_path) == [40, 80, 90, 100], "a better one lets the best before go"


def test_a_loss_that_is_no_number_is_not_the_best(tmp_path):
    keep = Retention(last=1, best="val_loss")
    for step, value in ((1, 2.0), (2, "low"), (3, float("nan")), (4, None)):
        write(tmp_path, step, keep, val_loss=value)
    assert steps(tmp_path) == [1, 4]


@pytest.mark.parametrize("where", ["auto", "named", "elsewhere"])
def test_a_resume_removes_what_restarts_have_left_and_nothing_else(tmp_path, monkeypatch, where):
    own = tmp_path / "run" / "checkpoints"
    for step in range(10, 90, 10):
        write(own, step, Retention(last=99), val_loss=1.0 if step == 10 else 2.0)
    (own / "step_000040" / "manifest.json").write_text("{}")  # damaged: nobody removes it
    (own / "step_000080" / "manifest.json").write_text("{}")  # passed over
    (own / "step_000060.old-ab").mkdir()
    resumed = own / "step_000070"
    if where == "elsewhere":
        resumed = write(tmp_path / "other", 70, Retention())
    random = {"rng_cpu": torch.get_rng_state()}
    loaded = SimpleNamespace(step=70, tokens=0, extras=random, facts={}, degrees={})
    monkeypatch.setattr(train_state, "latest_together", lambda own, rank, saved: resumed)
    monkeypatch.setattr(train_state, "load", lambda *args, **more: loaded)
    monkeypatch.setattr(train_state, "tpc", SimpleNamespace(topology=None))
    trainer = SimpleNamespace(
        rank=0,
        optimizer=None,
        device=torch.device("cpu"),
        saved=lambda: None,
        update=SimpleNamespace(averages=None),
    )
    keep = Retention(last=2, every=30, best="val_loss")
    how = "auto" if where == "auto" else str(resumed)
    state = train_state.resume(trainer, tmp_path / "run", how, keep=keep)  # type: ignore
    assert state.step == 70
    gone = set() if where == "elsewhere" else {20, 50}
    left = {int(x.name[5:11]) for x in own.iterdir() if "old" not in x.name}
    assert left == set(range(10, 90, 10)) - gone
    assert (own / "step_000060.old-ab").is_dir()

"""The job gets what was written, and how it ends is what the shell gets."""

from pathlib import Path

import pytest

from torchdistpackage.checkpoint.manifest import Manifest
from torchdistpackage.cli.main import main
from torchdistpackage.train import job

TINY = str(Path(__file__).parents[2] / "configs" / "gpt_tiny.yaml")


@pytest.fixture
def called(monkeypatch) -> list[tuple]:
    """What the job was called with; its exit code is 7."""
    calls: list[tuple] = []

    def launch(*args: object) -> int:
        calls.append(args)
        return 7

    monkeypatch.setattr(job, "launch", launch)
    return calls


def test_the_job_gets_file_changes_and_resume_and_gives_the_exit_code(called):
    assert main(["train", TINY]) == 7
    assert main(["train", TINY, "optim.lr=1", "--resume", "runs/a", "train.steps=3"]) == 7
    assert called == [(TINY, [], "auto"), (TINY, ["optim.lr=1", "train.steps=3"], "runs/a")]


def test_procs_is_an_override_like_any_other(called, monkeypatch, capsys):
    assert main(["train", TINY, "--procs", "2", "train.steps=3"]) == 7
    assert called == [(TINY, ["train.steps=3", "launch.local.procs=2"], "auto")]
    assert main(["train", TINY, "-v"]) == 7
    assert called[1:] == [(TINY, ["log.verbose=true"], "auto")]
    monkeypatch.undo()
    assert main(["train", TINY, "--procs", "3"]) == 2
    assert "launch.local.procs=3 does not fit" in capsys.readouterr().err
    assert main(["train", TINY, "--procs", "4", "launch.local.procs=2"]) == 2
    assert "another override of launch.local.procs" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there_is_refused_before_a_rank_starts(tmp_path, capsys):
    run = f"run.dir={tmp_path / 'runs'}"
    assert main(["train", TINY, run, "--resume", str(tmp_path / "gone")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", [EOFError, BrokenPipeError, FileNotFoundError])
def test_a_failure_of_the_run_is_not_taken_for_a_closed_terminal(kind, monkeypatch, capsys):
    """A command-line library ends such errors without a word; a rank needs its traceback."""

    def fail(*_: object) -> int:
        raise kind(32, "the peer is gone")

    monkeypatch.setattr(job, "launch", fail)
    assert main(["train", TINY]) == 1
    said = capsys.readouterr().err
    assert said.startswith("tdp: Traceback")
    assert "in fail" in said
    assert "the peer is gone" in said


def test_data_that_is_not_there_is_refused_before_a_rank_starts(tmp_path, capsys):
    changes = ("data.name=text", f"data.path={tmp_path / 'gone'}", f"run.dir={tmp_path / 'runs'}")
    assert main(["train", TINY, *changes]) == 2
    assert "data.path" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("how", ["auto", "a path"])
def test_a_checkpoint_of_another_model_is_refused_before_a_rank_starts(tmp_path, capsys, how):
    step = tmp_path / "gpt_tiny" / "checkpoints" / "step_000003"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text(Manifest(3, 0, (), {}, {}).to_json())
    resume = "auto" if how == "auto" else str(step)
    assert main(["train", TINY, f"run.dir={tmp_path}", "--resume", resume]) != 0
    said = capsys.readouterr().err
    assert said.startswith(f"tdp: {step} is of another model than this run: ")
    assert "is missing; " in said and " more. Go on with the model it was written with" in said
    assert [x.name for x in step.parents[1].iterdir() if x.name[0] != "."] == ["checkpoints"]

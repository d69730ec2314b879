"""The job gets what was written, and how it ends is what the shell gets. No torch."""

from pathlib import Path

import pytest

from tests.tells import tells
from torchdistpackage.checkpoint.manifest import Manifest, TensorEntry
from torchdistpackage.cli.main import main
from torchdistpackage.config.load import load
from torchdistpackage.errors import CheckpointError
from torchdistpackage.plan import resume_check
from torchdistpackage.plan.resume_check import (
    refuse_other_model,
    refuse_other_optimizer,
    start_changes,
)
from torchdistpackage.plan.run_plan import make_plan
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
    assert tells(capsys.readouterr().err, "4 processes", "launch.local.procs", "3")
    assert main(["train", TINY, "--procs", "4", "launch.local.procs=2"]) == 2
    assert "would undo the override of launch.local.procs" in capsys.readouterr().err


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


def test_a_module_that_is_not_there_is_refused_before_a_rank_starts(tmp_path, capsys):
    own = tmp_path / "own.yaml"
    own.write_text("model: {target: 'nopkg.toy:build', loss: 'tests.train.sources:squared_error'}")
    assert main(["train", str(own), f"run.dir={tmp_path / 'runs'}"]) == 2
    said = capsys.readouterr().err
    assert tells(said, "own.yaml:1", "model.target", "nopkg.toy:build")
    assert "1 problem" in said and not (tmp_path / "runs").exists()


def checkpoint(folder: Path) -> Path:
    """A complete one, of no tensor."""
    step = folder / "step_000003"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text(Manifest(3, 0, (), {}, {}).to_json())
    return step


@pytest.mark.parametrize("how", ["auto", "a path"])
def test_a_checkpoint_of_another_model_is_refused_before_a_rank_starts(tmp_path, capsys, how):
    step = checkpoint(tmp_path / "gpt_tiny" / "checkpoints")
    resume = "auto" if how == "auto" else str(step)
    assert main(["train", TINY, f"run.dir={tmp_path}", "--resume", resume]) != 0
    said = capsys.readouterr().err
    assert said.startswith(f"tdp: {step} is of another model than this run: ")
    assert "is missing; " in said and " more. Go on with the model it was written with" in said
    assert [x.name for x in step.parents[1].iterdir() if x.name[0] != "."] == ["checkpoints"]


def test_under_torchrun_too_and_by_rank_0_alone(tmp_path, capsys, monkeypatch):
    step = checkpoint(tmp_path / "gpt_tiny" / "checkpoints")
    monkeypatch.setattr(job, "_worker_main", lambda *_: 7)
    for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(key, "4")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    for rank, code in (("0", 1), ("1", 7)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert main(["train", TINY, f"run.dir={tmp_path}"]) == code
    assert capsys.readouterr().err.startswith(f"tdp: {step} is of another model than this run: ")


def test_a_folder_that_is_no_checkpoint_is_refused_before_a_rank_starts(tmp_path, capsys):
    run = tmp_path / "gpt_tiny"
    step = checkpoint(run / "checkpoints")
    expected = {
        str(tmp_path): "has no manifest.json, so it is not a complete checkpoint",
        str(run): f"it is not a checkpoint, but has some; name one, such as {step}",
        str(step.parent): f"it is not a checkpoint, but has some; name one, such as {step}",
        "": "--resume '': there is no such folder",
    }
    for resume, text in expected.items():
        assert main(["train", TINY, f"run.dir={tmp_path}", "--resume", resume]) != 0
        said = capsys.readouterr().err
        assert said.startswith("tdp: ") and text in said and said.count("\n") == 1, said
    (step / "manifest.json").unlink()
    assert main(["train", TINY, f"run.dir={tmp_path}"]) == 1
    assert "1 checkpoints, but none is complete" in capsys.readouterr().err


def test_a_checkpoint_of_another_precision_is_refused_before_a_rank_starts(tmp_path, monkeypatch):
    plan = make_plan(load(TINY), 4)
    tensors = {x.name: TensorEntry(x.shape, "float32", ()) for x in plan.layouts.values()}
    monkeypatch.setattr(resume_check, "read_manifest", lambda _: Manifest(3, 0, (), tensors, {}))
    refuse_other_model(tmp_path, plan)
    with pytest.raises(CheckpointError, match="has weights of float32, which"):
        refuse_other_model(tmp_path, make_plan(load(TINY, ["precision.dtype=float64"]), 4))


def test_state_of_another_optimizer_is_refused_where_it_could_not_go_on(tmp_path, monkeypatch):
    def check(name: str, *keys: str) -> None:
        tensors = {f"w{key}": TensorEntry((2,), "float32", ()) for key in ("", *keys)}
        found = Manifest(3, 0, (), tensors, {})
        monkeypatch.setattr(resume_check, "read_manifest", lambda _: found)
        refuse_other_optimizer(tmp_path, load(TINY, [f"optim.name={name}"]))

    check("adamw")
    check("adamw8bit", "#step", "#state1", "#exp_avg")
    check("adafactor", "#step", "#variance")
    check("sgd", "#exp_avg", "#step")
    for name, key in (("adamw", "momentum_buffer"), ("adamw8bit", "exp_avg"), ("adafactor", "s")):
        with pytest.raises(CheckpointError, match=rf"another optimizer \({key}\), which optim"):
            check(name, "#step", "#master", f"#{key}")


def test_what_a_start_changes_is_said_as_far_as_numbers_follow_from_it(tmp_path):
    resolved = tmp_path / "resolved.yaml"
    assert start_changes(resolved, load(TINY)).keys == ()
    resolved.write_text(load(TINY).to_yaml())
    layout = ["parallel.pipe=4", "parallel.data=1", "train.accumulate=2", "log.every=3"]
    changed = ("parallel.data=1 (was 2)", "parallel.pipe=4 (was 2)")
    assert start_changes(resolved, load(TINY, layout)).keys == changed
    others = ["model.heads=2", "run.seed=3", "model.rope.theta=5", "train.steps=500"]
    changed = (
        "run.seed=3 (was 1234)",
        "model.heads=2 (was 4)",
        "model.rope.theta=5.0 (was 10000.0)",
    )
    changed += ("train.steps=500 (was 400)",)
    assert start_changes(resolved, load(TINY, others)).keys == changed
    resolved.write_text("model: {no_such: 1}")
    assert start_changes(resolved, load(TINY)).notes() == []


def test_changed_weights_of_sources_are_said_as_shares(tmp_path):
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(load(TINY, _sources(3, 1)).to_yaml())
    changes = start_changes(resolved, load(TINY, _sources(1, 1)))
    assert changes.keys == () and changes.shares == {"a": (0.75, 0.5), "b": (0.25, 0.5)}
    (note,) = changes.notes()
    assert tells(note, "75.0", "50.0", "25.0", "50.0")
    # the same shares draw the same samples
    assert start_changes(resolved, load(TINY, _sources(6, 2))).notes() == []
    (first, _) = start_changes(resolved, load(TINY, ["data.sources=[{path: a.txt}]"])).notes()
    assert first.startswith("changed since the last start: data.sources=")


def _sources(*weights: int) -> list[str]:
    rows = (f"{{path: {'ab'[i]}.txt, weight: {w}}}" for i, w in enumerate(weights))
    return [f"data.sources=[{', '.join(rows)}]"]

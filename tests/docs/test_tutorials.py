"""The tutorials, their commands one after another in one folder.

By default trainings are two steps long on ranks that are forked from one that has imported torch.
With `--full` a shell runs the commands as they are written.
"""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs import tutorials
from torchdistpackage.cli.main import main

SHORT = (
    *("train.eval_batches=1", "train.eval_every=0", "train.generate_tokens=4"),
    *("optim.warmup_steps=1", "log.every=1", "checkpoint.save_every=2"),
    *("log.plot=false", "log.report=false"),
)
SMALL = ("model.dim=32", "data.seq_len=32", "data.global_batch=16")
FULL = ("tdp prove", "tdp --version", "run.name=one", "runs/one", "run.name=two", "runs/two")
"""What a command has that only a shell runs, with `--full`."""
LOCAL = ("tutorial_first_run", "tutorial_fine_tune", "tutorial_own_model")
Tdp = Callable[[list[str]], tuple[int, str]]


def in_one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def walk(tdp: Tdp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict]:
    """Run the `tdp` commands of a page, trainings with changes; what each wrote, by its text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(name: str, *changes: str) -> dict[str, str]:
        tutorials.prepare(name, tmp_path)
        told, steps = {}, 0
        for words in tutorials.commands(name):
            text = shlex.join(words)
            if words[0] == "python":
                runpy.run_path(words[1])["main"](words[2:])
                continue
            if words[0] != "tdp" or any(x in text for x in FULL):
                continue
            if words[1] == "train":
                steps += 2  # the second command on a run resumes it
                words = [x for x in words if not x.startswith("train.steps=")]
                words += [f"train.steps={steps}", *SHORT, *changes]
            code, told[text] = tdp(words[1:])
            assert code == 0, told[text]
        return told

    return run


def test_a_first_run_and_its_report(walk: Callable[..., dict]):
    told = walk("tutorial_first_run", *SMALL)
    plan = tutorials.shown("tutorial_first_run")[0]
    assert in_one_line(told["tdp plan configs/gpt_tiny.yaml"]) == in_one_line(plan)
    assert "resumed after step 2 of 4" in told["tdp train configs/gpt_tiny.yaml train.steps=200"]
    assert re.search(r"^gpt_tiny +local +finished", told["tdp runs"], re.M)
    assert Path("runs/gpt_tiny/report.html").stat().st_size > 1e6


@pytest.mark.full
def test_fine_tuning_on_chats(walk: Callable[[str], dict]):
    told = walk("tutorial_fine_tune")
    assert Path("chat/train.jsonl").read_text().splitlines()[0] + "\n" in tutorials.shown(
        "tutorial_fine_tune"
    )
    replies = [text for command, text in told.items() if command.startswith("tdp generate")]
    assert len(replies) == 2 and replies[0] == replies[1]
    assert Path("runs/chat/hf/model.safetensors").exists()
    assert Path("chat/mine/tokenizer.json").exists()


@pytest.mark.full
def test_a_model_of_your_own_on_more_ranks(walk: Callable[[str], dict]):
    walk("tutorial_own_model")
    net, four = (first_loss(Path("runs", run)) for run in ("net", "four"))
    assert four == pytest.approx(net, abs=1e-4)  # float32, in another order


def first_loss(run: Path) -> float:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["loss"]


def test_a_job_on_slurm_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Where there is no Slurm; tests/slurm/test_tutorial.py submits it."""
    monkeypatch.chdir(tmp_path)
    commands = tutorials.commands("tutorial_slurm")
    assert [words[1] for words in commands] == [
        *("init", "plan", "plan", "submit", "jobs", "jobs", "requeue"),
        *("jobs", "jobs", "jobs", "jobs", "report"),
    ]
    for words in commands[:4]:
        dry = ["--dry-run"] * (words[1] == "submit")
        assert main([*words[1:], *dry]) == 0, capsys.readouterr().err
    assert "#SBATCH --nodes=2" in capsys.readouterr().out


def test_the_numbers_of_a_layout_are_those_of_the_plan(tmp_path, monkeypatch, capsys):
    """Each row of the table, and the warning, on the page that says which layout to choose."""
    text = tutorials.page("which_layout")
    monkeypatch.chdir(tmp_path)
    Path("big.yaml").write_text(re.search(r"```yaml\n(model:.*?)```", text, re.S)[1])
    command = tutorials.commands("which_layout")[0]
    rows = re.findall(r"^\| (?:none|`(.*?)`) \| (.*?) \| (.*?) \| (.*?) \|$", text, re.M)
    assert len(rows) == 10
    for keys, memory, num_bytes, bubble in rows:
        overrides = [x if "." in x else f"parallel.{x}" for x in keys.split()]
        assert main([*command[1:], *overrides]) == 0
        told = in_one_line(capsys.readouterr().out)
        assert f"memory of a rank {memory}" in told, keys
        assert f"bytes of a step {num_bytes}" in told, keys
        assert (f"predicted bubble {bubble}" in told) if bubble else ("bubble" not in told), keys
    shown = next(x for x in tutorials.shown("which_layout") if x.startswith("$ "))
    asked, _, warning = shown.partition("\n")
    assert main(asked.split()[2:]) == 0
    assert in_one_line(warning) in in_one_line(capsys.readouterr().out)


@pytest.mark.full
@pytest.mark.parametrize("name", LOCAL)
def test_a_shell_runs_the_commands_as_they_are_written(name: str, tmp_path: Path):
    tutorials.prepare(name, tmp_path)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", tutorials.script(name)], cwd=tmp_path,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    if name == "tutorial_first_run":
        assert (tmp_path / "both.html").exists()
    if name == "tutorial_own_model":
        assert "the same as one process" in done.stdout
        assert (tmp_path / "layouts.html").exists()
        runs = [first_loss(tmp_path / "runs" / run) for run in ("net", "two", "four", "eight")]
        assert runs == pytest.approx([runs[0]] * 4, abs=1e-4)

"""`Run(folder)`: one object for scripts and commands, so all of them say the same of a run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchdistpackage
from tests.launch.slurm.folders import started, submitted
from tests.report.folders import BEGAN_S, write_run
from torchdistpackage import Run
from torchdistpackage.cli.main import main
from torchdistpackage.environment.failure import Failure, FailureKind
from torchdistpackage.launch.lock import take
from torchdistpackage.report.page import html
from torchdistpackage.report.run import RunState

ROOT = Path(torchdistpackage.__file__).parents[1]
REQUEUED = RunState("requeued", "after step 100: USR1")


def keep_events(folder: Path, number: int) -> None:
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:number]))


@pytest.fixture
def folders(tmp_path: Path):
    """A run by how it is: of two starts, as `write_run` makes them, or cut off before."""
    runs = tmp_path / "runs"
    made = {name: write_run(runs / name) for name in ("finished", "requeued", "running", "damaged")}
    keep_events(made["requeued"], 3)
    keep_events(made["running"], 4)
    # of the damaged one nothing says how it ended: files are torn, and one is no text at all
    keep_events(made["damaged"], 4)
    with (made["damaged"] / "events.jsonl").open("a") as file:
        file.write('{"event": "end", "step": 2')
    with (made["damaged"] / "metrics.jsonl").open("a") as file:
        file.write('not json\n{"step": 201, "lo')
    (made["damaged"] / "resolved.yaml").write_bytes(b"\xff\xfe")
    lock = take(Run(made["running"]).files.run_lock, "the run running")
    yield made
    lock.release()


STATES = {
    "finished": RunState("finished"),
    "requeued": REQUEUED,
    "running": RunState("running"),
    "damaged": RunState("unknown", "no end noted"),
}


def table_of(text: str) -> dict[str, list[str]]:
    """By name of the run the cells of its row; columns are two spaces or more apart."""
    rows = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    return {row[0]: row for row in rows if row[0]}


@pytest.mark.parametrize("is_submitted", [False, True])
def test_every_command_says_the_same_state(
    folders: dict[str, Path], is_submitted, monkeypatch, capsys
):
    """Also of a submitted run, of whose job Slurm knows nothing any more."""
    monkeypatch.setenv("PATH", "/nonexistent")
    for folder in folders.values() if is_submitted else ():
        run = submitted(folder, "7", BEGAN_S - 5)
        started(run, "7.0", BEGAN_S, decision="requeue after step 100: USR1")
        if folder.name != "requeued":
            started(run, "7.1", BEGAN_S + 160, step=100)
    assert main(["runs", "--dir", str(next(iter(folders.values())).parent)]) == 0
    rows = table_of(capsys.readouterr().out)
    for name, folder in folders.items():
        run, state = Run(folder), STATES[name]
        assert run.state == state
        assert state.word in rows[name]
        if state.reason and not (is_submitted and state.word == "unknown"):
            assert rows[name][-1] == state.reason
        assert main(["watch", str(folder), "--once"]) == 0
        shown = re.search(r"^state +(.*)$", capsys.readouterr().out, re.MULTILINE)
        assert shown is not None
        assert shown[1].startswith(state.word) and state.reason in shown[1]
        assert f"state <b>{state}</b>" in html([run], BEGAN_S)
        if is_submitted:
            assert main(["jobs", "show", str(folder)]) == 0
            told = capsys.readouterr().out
            assert re.search(rf"^state +{state.word}\b", told, re.MULTILINE)


def test_a_run_that_ended_with_a_failure_names_the_rank(tmp_path: Path):
    folder = write_run(tmp_path / "a")
    keep_events(folder, 4)
    run = submitted(folder, "7", BEGAN_S - 5)
    failure = Failure(3, "n2", 1, BEGAN_S + 200, FailureKind.ERROR, error="ValueError: no")
    started(run, "7.0", BEGAN_S, decision="requeue after step 100: USR1")
    started(run, "7.1", BEGAN_S + 160, step=100, failures=(failure,))
    state = Run(folder).state
    assert state.word == "failed" and "rank 3 on n2" in state.reason


def test_a_run_is_read_again_with_what_is_new(tmp_path: Path):
    folder = write_run(tmp_path / "a", steps=40)
    run = Run(folder)
    assert (run.step, run.num_steps, run.slowest_rank) == (40, 40, 3)
    assert run.rank_text(3) == "rank 3 (data 1 pipe 1)"
    last = run.ranks[-1]
    busy_s = sum(times[3] for times in last["phases"].values())
    facts = ("rank 3 (data 1 pipe 1)", "40", f"{busy_s:.3g} s", "20.0 %", "2 ranks")
    assert all(fact in run.slowest_text for fact in facts)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 41, "loss": 1.5}) + "\n")
    assert run.step == 40
    run.read()
    assert run.step == 41 and len(run.rows) == 41 and run.holder is None


def test_the_lines_of_the_page_print_losses_state_and_the_slowest_rank(tmp_path: Path):
    """The block of docs/report.md, in a process that must not load torch."""
    write_run(tmp_path / "runs" / "gpt_tiny", steps=20)
    text = (ROOT / "docs" / "report.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in block.splitlines() if line]) == 5
    code = block + "\nimport sys\nassert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses, state, slowest = done.stdout.splitlines()
    assert len(losses.split(",")) == 20 and state == "finished"
    assert slowest.startswith("rank 3 (data 1 pipe 1) ") and "20.0 %" in slowest

"""`tdp watch` of run folders: once, in lines while a run writes, and as a page of a terminal.

No torch.
"""

import contextlib
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.launch.slurm.folders import submitted
from tests.launch.slurm.scripted import Programs, row
from tests.report.folders import metrics_row, write_run
from torchdistpackage.cli.main import main
from torchdistpackage.cli.watch import RunView
from torchdistpackage.report.run import Run
from torchdistpackage.report.status import curve, status_of
from torchdistpackage.text import duration


def test_a_finished_run_is_shown_once(tmp_path: Path, capsys):
    write_run(tmp_path / "done")
    assert main(["watch", "done", "--dir", str(tmp_path), "--once"]) == 0
    said = capsys.readouterr().out
    for text in ("step 200/200", "state", "finished", "restarts", "1, the last from step 100",
                 "5.0k tokens/s", "20.0%", "pipe 20.0%", "2 GiB at most, on rank 2",
                 "on rank 2 (data 1 pipe 0)", "rank 3 (data 1 pipe 1) +20 %"):  # fmt: skip
        assert text in said
    assert "ends in about" not in said and "█" in said


def test_the_queue_is_asked_for_a_submitted_run(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    slurm = Programs(tmp_path / "bin")
    folder = submitted(tmp_path / "waits", "41", time.time() - 100).folder
    waiting = row("41", "PENDING", nodes="").replace("|None|", "|Priority|")
    for said in (waiting, row("41", "RUNNING", nodes="n[1-2]")):
        slurm.say("squeue", said)
        assert main(["watch", str(folder), "--once"]) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith(("queue", "state"))]
    assert [" ".join(line.split()) for line in lines] == [
        "state no start noted", "queue PENDING Priority",
        "state no start noted", "queue RUNNING n[1-2]",
    ]  # fmt: skip
    view = RunView(folder)
    assert "RUNNING" in view.look()[1].facts["queue"]
    slurm.say("squeue", row("41", "COMPLETED"))
    assert "RUNNING" in view.look()[1].facts["queue"]  # for 10 s it is not asked again
    slurm.say("squeue", "slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    assert main(["watch", str(folder), "--once"]) == 0
    assert "Slurm does not answer: " in capsys.readouterr().out


def test_a_job_that_never_began_is_not_watched_for_ever(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    Programs(tmp_path / "bin").say("squeue", row("41", "CANCELLED", nodes=""))
    folder = submitted(tmp_path / "gone", "41", time.time() - 100).folder
    assert main(["watch", str(folder), "--plain", "--interval", "0.1"]) == 0
    assert "state no start noted" in capsys.readouterr().out


def test_what_others_wrote_moves_no_cursor(tmp_path: Path, capsys):
    folder = write_run(tmp_path / "a")
    text = (folder / "events.jsonl").read_text().replace('"finished"', '"\\u001b[2Jdone\\r"')
    (folder / "events.jsonl").write_text(text)
    view = RunView(folder)
    shown = view.text(*view.look())
    assert "done" in shown and not set(shown) & {"\x1b", "\r"}


def half_written(folder: Path) -> None:
    """As it is while the second start runs: its end is not there, and a row is torn."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in lines[:4]]
    kept[3] |= {"at_s": time.time() - 30, "job_end_s": time.time() + 7200.5}
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 201, "lo')
    config = (folder / "resolved.yaml").read_text().replace("steps: 200", "steps: 1000")
    (folder / "resolved.yaml").write_text(config + "checkpoint: {save_every: 300}\n")


def test_times_that_are_left_follow_from_steps_and_the_job(tmp_path: Path, monkeypatch):
    folder = write_run(tmp_path / "half")
    half_written(folder)
    monkeypatch.setattr("torchdistpackage.launch.slurm.runs.holder_of", lambda path: "me")
    status = status_of(Run(folder), time.time())
    assert not status.ended and status.facts["state"] == "running"
    assert status.facts["ends in about"] == "2 min 40 s"
    assert status.facts["next checkpoint in"] == "20 s"
    assert status.facts["job ends in"] == "2 h 00 min"
    assert "quiet" in status_of(Run(folder), time.time() + 600).facts["state"]


def test_lines_follow_a_run_to_its_end(tmp_path: Path, monkeypatch, capsys):
    folder = write_run(tmp_path / "half")
    end = (folder / "events.jsonl").read_text().splitlines()[-1]
    half_written(folder)
    holder = ["me"]
    monkeypatch.setattr("torchdistpackage.launch.slurm.runs.holder_of", lambda path: holder[0])

    def go_on() -> None:
        time.sleep(0.5)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('ss": 1.5}\n' + json.dumps(metrics_row(202, 0.01)) + "\n")
        time.sleep(0.5)
        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({**json.loads(end), "at_s": time.time()}) + "\n")

    writer = threading.Thread(target=go_on)
    writer.start()
    assert main(["watch", str(folder), "--plain", "--interval", "0.1"]) == 0
    writer.join()
    said = capsys.readouterr().out
    steps = [line.split()[1] for line in said.splitlines() if line.startswith("step")]
    assert list(dict.fromkeys(steps)) == ["200/1000", "202/1000"]
    assert "a line is cut off or invalid" in said
    assert said.splitlines()[-1].endswith(
        "tokens/s  bubble 20.0%  lagging rank 3 (data 1 pipe 1) +20 %"
    )
    assert "state finished" in said.splitlines()[-1]


@pytest.mark.full
def test_q_leaves_the_page_of_a_terminal(tmp_path: Path):
    folder = write_run(tmp_path / "done")
    own, other = pty.openpty()
    command = [sys.executable, "-m", "torchdistpackage", "watch", str(folder)]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=env)
    os.close(other)
    said, limit = b"", time.monotonic() + 60
    while b"q leaves" not in said and time.monotonic() < limit:
        if select.select([own], [], [], 0.2)[0]:
            said += os.read(own, 1 << 16)
    os.write(own, b"q")
    while process.poll() is None and time.monotonic() < limit:
        if select.select([own], [], [], 0.2)[0]:
            try:
                os.read(own, 1 << 16)
            except OSError:
                break
    assert process.wait(timeout=90) == 0
    os.close(own)
    text = said.decode(errors="replace")
    assert "step 200/200" in text and "throughput" in text and "5.0k tokens/s" in text


def test_a_run_that_is_not_there_is_refused_by_name(tmp_path: Path, capsys):
    assert main(["watch", "nothing", "--dir", str(tmp_path)]) == 2
    assert "no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.9, "12 s"), (250, "4 min 10 s"), (7500, "2 h 05 min"), (274_000, "3 d 4 h")],
)
def test_durations(seconds: float, text: str):
    assert duration(seconds) == text


def test_a_curve_of_characters():
    assert curve([0, 1, 2, 3], 4, 1) == ["▁▃▆█"]
    assert curve([0.0, 15.0], 2, 2) == [" █", "▁█"]
    assert [len(line) for line in curve(list(range(1000)), 50, 3)] == [50] * 3
    assert curve([], 10, 2) == []
    assert curve([1e308, -1e308, 1e308, 1e308], 2, 1) == ["▁█"]


@contextlib.contextmanager
def as_nobody():
    """Files that only root may read are closed inside, also where the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


COMMANDS = (
    ["watch", "{}", "--once"],
    ["report", "{}", "-o", "{}.html"],
    ["checkpoint", "ls", "{}"],
)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda x: x[0])
def test_a_folder_that_may_not_be_read_is_named(tmp_path, capfd, words):
    whole, closed = write_run(tmp_path / "whole", steps=20), tmp_path / "closed"
    shutil.copytree(whole, closed)
    main([word.format(whole) for word in words])  # loads what it needs
    capfd.readouterr()
    closed.chmod(0)
    with as_nobody():
        code = main([word.format(closed) for word in words])
    closed.chmod(0o700)
    said = capfd.readouterr().err
    assert code == 1 and said.count("\n") == 1, said
    assert str(tmp_path) in said and "Permission denied; ask its owner" in said

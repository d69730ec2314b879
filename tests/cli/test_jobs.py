"""`tdp jobs` as a shell sees it, over run folders and programs in the place of Slurm's.

No torch.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.slurm.folders import measured, started, submitted
from tests.launch.slurm.scripted import Programs, row
from tests.tells import tells
from torchdistpackage.cli.main import main
from torchdistpackage.environment.failure import Failure, FailureKind
from torchdistpackage.launch.slurm.node_blocklist import NodeIncident, record
from torchdistpackage.launch.slurm.runs import SubmittedRun

NOW_S = time.time()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.chdir(tmp_path)
    return Programs(folder)


@pytest.fixture
def run(tmp_path: Path, slurm: Programs) -> SubmittedRun:
    """A run of job 7 that came back once, failed once and is at step 3 of 10."""
    run = submitted(tmp_path / "runs" / "tiny", "7", NOW_S - 600)
    failure = Failure(2, "n2", 77, NOW_S - 300, FailureKind.SIGNAL, -9)
    started(run, "7.0", NOW_S - 500, decision="requeue after step 2: preempted", nodes="n[1-2]")
    started(run, "7.1", NOW_S - 400, step=2, failures=(failure,), nodes="n[2-3]")
    measured(run, 3.0, 2.0, 1.2345)
    run.files.main_log.write_text("one\ntwo\n")
    return run


def table(text: str) -> list[list[str]]:
    """Cells of a table, by the columns of its first line."""
    first, *lines = text.splitlines()
    starts = [i for i, c in enumerate(first) if c != " " and (i == 0 or first[i - 1] == " ")]
    ends = [*starts[1:], None]
    return [[line[a:b].strip() for a, b in zip(starts, ends, strict=True)] for line in lines]


def test_ls_has_a_line_for_each_run_the_latest_last(run: SubmittedRun, slurm: Programs, capsys):
    submitted(run.folder.parent / "waits", "8_0", NOW_S - 100)
    new = submitted(run.folder.parent / "new", "9", time.time() - 1)
    text = row("7", "RUNNING", nodes="n[2-3]") + row("8_0", "PENDING", nodes="")
    slurm.say("squeue", text.replace("|None|", "|Resources|"))
    assert main(["jobs", "ls"]) == 0
    said = capsys.readouterr()
    assert table(said.out) == [
        ["tiny", "7", "RUNNING", "1", "3/10", "1.2345", "n[2-3]", "Resources"],
        ["waits", "8_0", "PENDING", "0", "", "", "2", "Resources"],
        ["new", "9", "submitted", "0", "", "", "2", "Slurm does not show it yet"],
    ]
    assert said.err == "note: no word from the accounting: Slurm accounting storage is disabled\n"
    assert main(["jobs", "ls", "--dir", str(new.folder)]) == 0
    assert "no run in" in capsys.readouterr().out


def test_ls_without_any_slurm_tells_what_the_folders_tell(run: SubmittedRun, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["jobs", "ls"]) == 0
    said = capsys.readouterr()
    assert table(said.out)[0][2] == "failed"
    assert said.err.startswith("note: there is no squeue here")


def test_show_tells_the_whole_story(run: SubmittedRun, slurm: Programs, capsys):
    slurm.say("squeue", row("7", "FAILED", code=137 << 8, nodes="n[2-3]", used="6:40"))
    slurm.say("sacct", "7|FAILED|137:0|400|n[2-3]|None\n")
    record(run.files.suspects, NodeIncident("n9", "down", 1.0, NOW_S, NOW_S + 1e6, "6.0"))
    assert main(["jobs", "show", "tiny"]) == 0
    out = capsys.readouterr().out
    facts = dict(re.split(" {2,}", line, maxsplit=1) for line in out.split("\n\n")[0].splitlines())
    assert facts["run"] == "tiny"
    assert facts["folder"] == str(run.folder)
    assert facts["job"].startswith("7, submitted ")
    assert facts["state"] == "FAILED"
    assert facts["nodes"] == "n[2-3]"
    assert facts["step"] == "3/10, loss 1.2345"
    assert facts["script"] == str(run.files.script)
    assert facts["exit code"] == "137"
    assert facts["running for"] == "0:06:40"
    starts = table(out.split("\n\n")[1])
    assert [cells[0] for cells in starts] == ["7.0", "7.1"]
    assert [cells[2:] for cells in starts] == [
        ["n[1-2]", "0", "requeue after step 2: preempted"],
        [
            "n[2-3]",
            "2",
            "rank 2 on n2 failed: killed by signal 9 (SIGKILL) (perhaps the kernel, out of memory)",
        ],
    ]
    assert "leaving out n9: down" in out
    assert main(["jobs", "show", "7"]) == 0
    assert capsys.readouterr().out == out


def test_logs_of_the_run_and_of_a_rank(run: SubmittedRun, capsys):
    for restart in (0, 1):
        run.files.rank_log(2, restart).write_text(f"rank 2, start {restart}\n")
    assert main(["jobs", "logs", "tiny"]) == 0
    assert capsys.readouterr().out == "one\ntwo\n"
    assert main(["jobs", "logs", "tiny", "--rank", "2"]) == 0
    assert capsys.readouterr().out == "rank 2, start 0\nrank 2, start 1\n"
    assert main(["jobs", "logs", "tiny", "--rank", "2", "--restart", "1"]) == 0
    assert capsys.readouterr().out == "rank 2, start 1\n"
    assert main(["jobs", "logs", "tiny", "--rank", "5"]) == 2
    assert "rank 5 has no log" in capsys.readouterr().err
    assert main(["jobs", "logs", "tiny", "--restart", "1"]) == 2
    assert "give --rank too" in capsys.readouterr().err


@pytest.mark.parametrize(("state", "code"), [("COMPLETED", 0), ("FAILED", 1), ("CANCELLED", 1)])
def test_following_ends_as_the_job_did(
    run: SubmittedRun, slurm: Programs, state: str, code: int, capsys
):
    slurm.say("squeue", row("7", state))
    assert main(["jobs", "logs", "-f", "tiny"]) == code
    said = capsys.readouterr()
    assert said.out == "one\ntwo\n"
    assert said.err == f"tdp: tiny is {state}\n"


def test_cancel_and_resubmit(run: SubmittedRun, slurm: Programs, capsys):
    slurm.say("squeue", row("7", "RUNNING"))
    assert main(["jobs", "resubmit", "tiny"]) == 1
    assert tells(capsys.readouterr().err, "job 7", "RUNNING")
    assert main(["jobs", "cancel", "tiny"]) == 0
    assert capsys.readouterr().out == "cancelled job 7\n"
    assert slurm.asked[-1] == ["scancel", "7"]
    slurm.say("squeue", row("7", "CANCELLED", code=15))
    slurm.say("sbatch", "8\n")
    record(run.files.suspects, NodeIncident("n9", "down", 1.0, NOW_S, NOW_S + 1e6, "6.0"))
    assert main(["jobs", "resubmit", "tiny"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("leaving out n9: down")
    assert last == "submitted tiny as job 8"
    assert slurm.asked[-1] == ["sbatch", "--parsable", "--exclude=n9", str(run.files.script)]
    assert main(["jobs", "cancel", "tiny"]) == 0
    assert slurm.asked[-1] == ["scancel", "8"]


@pytest.mark.parametrize("command", ["show", "logs", "cancel", "resubmit", "monitor"])
def test_an_unknown_name_is_answered_with_the_nearest(run: SubmittedRun, command: str, capsys):
    assert main(["jobs", command, "tinny"]) == 2
    assert "no run in runs has the name or job id 'tinny'; did you mean tiny" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(("state", "code"), [("COMPLETED", 0), ("CANCELLED", 1), ("FAILED", 1)])
def test_monitor_says_in_its_code_how_the_job_ended(
    run: SubmittedRun, slurm: Programs, state: str, code: int, capsys
):
    slurm.say("squeue", row("7", state))
    assert main(["jobs", "monitor", "tiny", "--max-resubmits", "0"]) == code
    assert f"job 7 is {state}" in capsys.readouterr().out


def test_ctrl_c_ends_the_monitor_and_not_the_job(run: SubmittedRun, slurm: Programs):
    slurm.say("squeue", row("7", "RUNNING"))
    watching = subprocess.Popen(
        [sys.executable, "-m", "torchdistpackage", "jobs", "monitor", "tiny", "--every", "30"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert watching.stdout is not None
    assert "job 7 is RUNNING" in watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=90)
    assert (watching.returncode, err) == (130, "")
    assert [asked[0] for asked in slurm.asked] == ["squeue"]


def test_jobs_load_no_more_than_they_need(run: SubmittedRun, slurm: Programs):
    code = """
import sys
sys.modules["torch"] = None
from torchdistpackage.cli.main import main
main(["jobs", "ls"])
print(sorted({"numpy", "rich", "yaml", "submitit"} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("command", "place", "is_refused"),
    [
        ("ls", lambda run: run.files.records, True),
        ("show", lambda run: run.files.starts, True),
        ("show", lambda run: run.files.suspects, False),
        *(
            pytest.param(command, place, False, marks=pytest.mark.full)
            for command, place in (
                ("show", lambda run: run.files.decision("7.1")),
                ("show", lambda run: run.files.failures("7.1") / "rank3.json"),
                ("ls", lambda run: run.folder / "metrics.jsonl"),
                ("logs", lambda run: run.files.main_log),
            )
        ),
    ],
    ids=["records", "starts", "suspects", "decision", "report", "metrics", "main-log"],
)
def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(
    run: SubmittedRun, slurm: Programs, command, place, is_refused
):
    """Records and starts are named and refused: what they say decides; the rest is left out."""
    path = place(run)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    slurm.say("squeue", row("7", "RUNNING", nodes="n[2-3]"))
    done = subprocess.run(
        [sys.executable, "-m", "torchdistpackage", "jobs", command, *["tiny"][: command != "ls"]],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == is_refused, done.stderr
    assert (f"{path.name} is a pipe" in done.stderr) is (is_refused or "suspects" in path.name)


def test_evidence_is_not_written_into_a_pipe(run: SubmittedRun, caplog: pytest.LogCaptureFixture):
    os.mkfifo(run.files.suspects)
    record(run.files.suspects, NodeIncident("n1", "it broke", 1.0, NOW_S, NOW_S + 9, "7.0"))
    assert "is a pipe" in caplog.text


def test_ls_lists_local_runs_after_those_submitted(run: SubmittedRun, slurm: Programs, capsys):
    slurm.say("squeue", row("7", "RUNNING", nodes="n[2-3]"))
    local = run.folder.parent / "here"
    local.mkdir()
    (local / "resolved.yaml").write_text("train:\n  steps: 9\n")
    (local / "metrics.jsonl").write_text('{"step": 4, "loss": 2.5}\n')
    for words in (["jobs", "ls"], ["runs"]):
        assert main(words) == 0
        names, last = table(capsys.readouterr().out)
        assert names[0] == "tiny"
        assert last == ["here", "local", "unknown", "0", "4/9", "2.5000", "", ""]

"""`tdp jobs` and the functions under it on real jobs, with accounting and without, and on a node
that breaks. Each scenario runs beside the others; a test looks at what it found."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.launch.slurm.folders import started
from tests.slurm.cluster import Cluster
from torchdistpackage.launch.slurm import node_blocklist
from torchdistpackage.launch.slurm.jobs import resubmit, sbatch
from torchdistpackage.launch.slurm.query import (
    CompletedCommand,
    QueryResult,
    query_jobs,
    run_command,
)
from torchdistpackage.launch.slurm.run_dir import Submission, append_record
from torchdistpackage.launch.slurm.runs import SubmittedRun, read_run
from torchdistpackage.run_files import RunDir

Done = subprocess.CompletedProcess[str]


class Commands:
    """Slurm's commands on a cluster; those in `broken` fail as if there were no accounting."""

    def __init__(self, cluster: Cluster, *broken: str) -> None:
        self._cluster, self._broken = cluster, broken

    def __call__(
        self, args: Sequence[str], env: Mapping[str, str] | None = None
    ) -> CompletedCommand:
        if args[0] in self._broken:
            return CompletedCommand(1, "", "Slurm accounting storage is disabled")
        return run_command(args, self._cluster.env if env is None else env)


def submit_run(cluster: Cluster, folder: Path, body: str, *options: str) -> SubmittedRun:
    """A run of a batch script, as `tdp submit` leaves it, but without the training."""
    files = RunDir(folder)
    for made in (files.job, files.logs):
        made.mkdir(parents=True, exist_ok=True)
    head = ["#!/bin/bash", f"#SBATCH --output={files.main_log}", "#SBATCH --open-mode=append"]
    lines = [*head, *(f"#SBATCH {option}" for option in options), body]
    files.script.write_text("\n".join(lines) + "\n")
    job = sbatch(files.script, cluster.env, Commands(cluster))
    record = Submission(job, time.time(), "sbatch", str(files.script), "", "1", "login")
    append_record(files.records, record)
    run = read_run(folder)
    assert run is not None
    return run


def submit(cluster: Cluster, folder: Path) -> dict[str, Future[Any]]:
    scenarios = (cancel_and_resubmit, follow_a_requeue, keep_going, give_way, an_array)
    scenarios += (without_accounting, lose_a_node)
    return {s.__name__: cluster.beside(s, cluster, folder / s.__name__) for s in scenarios}


def cancel_and_resubmit(cluster: Cluster, runs: Path) -> dict[str, Done]:
    """A job that sleeps in its first submission and ends in its second."""
    flag = runs / "flag"
    run = submit_run(
        *(cluster, runs / "sleeper"),
        f"echo here I am; if [ -f {flag} ]; then exit 0; fi; touch {flag}; sleep 300",
    )

    def jobs(*words: str, check: bool = True) -> Done:
        return cluster.tdp("jobs", *words, "--dir", runs, check=check)

    said: dict[str, Done] = {}
    cluster.wait_for(flag.exists, what="start of the sleeper")
    said["ls"] = jobs("ls")
    said["logs"] = jobs("logs", run.latest.job)
    said["refused"] = jobs("resubmit", "sleeper", check=False)
    said["cancel"] = jobs("cancel", "sleeper")
    cluster.wait_state(run.latest.job, "CANCELLED")
    cluster.wait_for(lambda: "by uid" in jobs("ls").stdout, what="word of who cancelled it")
    said["cancelled"] = jobs("ls")
    said["cancel again"] = jobs("cancel", "sleeper", check=False)
    said["resubmit"] = jobs("resubmit", "sleeper")
    again = read_run(run.folder)
    assert again is not None
    cluster.wait_state(again.latest.job, "COMPLETED")
    said["show"] = jobs("show", "sleeper")
    said["unknown"] = jobs("show", "sleepr", check=False)
    return said


def follow_a_requeue(cluster: Cluster, runs: Path) -> Done:
    flag = runs / "flag"
    run = submit_run(
        *(cluster, runs / "twice"),
        f"echo start ${{SLURM_RESTART_COUNT:-0}}; [ -f {flag} ] && exit 0; touch {flag}; sleep 300",
        "--requeue",
    )
    following = cluster.beside(
        lambda: cluster.tdp("jobs", "logs", "-f", run.folder, check=False, limit_s=90)
    )
    cluster.wait_for(flag.exists, what="first start")
    cluster.run("scontrol", "requeue", run.latest.job)
    return following.result(90)


def keep_going(cluster: Cluster, folder: Path) -> Done:
    """A script of anybody's that fails at first."""
    folder.mkdir()
    script = folder / "job.sbatch"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --output={folder}/log --open-mode=append\n"
        f"echo try; [ -f {folder}/flag ] && exit 0; touch {folder}/flag; exit 3\n"
    )
    return cluster.run(
        *(cluster.python, "-m", "torchdistpackage", "jobs", "monitor", script),
        *("--interval", "1", "--delay", "1"),
        check=False,
        limit_s=90,
    )


def give_way(cluster: Cluster, folder: Path) -> Done:
    """A monitored job that the user cancels."""
    folder.mkdir()
    script = folder / "job.sbatch"
    script.write_text(
        f"#!/bin/bash\n#SBATCH -o {folder}/log -J give_way\ntouch {folder}/flag\nsleep 300\n"
    )
    watching = cluster.beside(
        lambda: cluster.tdp(
            *("jobs", "monitor", script, "--every", "1", "--wait", "0"), check=False, limit_s=90
        )
    )
    cluster.wait_for((folder / "flag").exists, what="start of the monitored job")
    cluster.run("scancel", "--name=give_way")
    return watching.result(90)


def an_array(cluster: Cluster, folder: Path) -> tuple[str, QueryResult, QueryResult]:
    """(id, while its first task runs and the others wait, after all were cancelled but one)."""
    folder.mkdir()
    job = cluster.sbatch(
        f"-o{folder}/%a", "--array=0-2%1", script=f"touch {folder}/flag; sleep 300"
    )
    ask = Commands(cluster)
    cluster.wait_for((folder / "flag").exists, what="start of the first task")
    during = query_jobs([job, f"{job}_0", f"{job}_2", "999999"], ask)
    cluster.cancel(f"{job}_0")
    cluster.wait_state(f"{job}_0", "CANCELLED")
    after = query_jobs([job, f"{job}_0"], ask)
    cluster.cancel(job)
    return job, during, after


def without_accounting(cluster: Cluster, runs: Path) -> dict[str, str]:
    with cluster.sibling(nodes=1) as own:
        failing = submit_run(own, runs / "fails", "exit 3")
        right_away = own.tdp("jobs", "ls", "--dir", runs).stdout
        own.wait_state(failing.latest.job, "FAILED")
        later = own.tdp("jobs", "show", failing.folder).stdout
        waiting = submit_run(own, runs / "waits", "exit 0", "--begin=now+1hour")
        pending = own.tdp("jobs", "ls", "--dir", runs).stdout
        own.tdp("jobs", "cancel", waiting.folder)
        own.wait_state(waiting.latest.job, "CANCELLED")
        # Ids of another cluster: what is left of jobs that this one has long forgotten.
        forgotten = query_jobs(["999999"], Commands(own))
    return {
        "right away": right_away,
        "later": later,
        "pending": pending,
        "note": forgotten.notes[0],
        "forgotten": forgotten.jobs["999999"].outcome,
    }


def lose_a_node(cluster: Cluster, runs: Path) -> dict[str, Any]:
    """A node dies under a run. It is noted while it is down, and after it has come back."""
    with cluster.sibling(nodes=3, accounting=True) as own:
        dead, back = runs / "dead" / "run", runs / "back" / "run"
        run = submit_run(own, dead, f"touch {runs}/flag; sleep 300", "--nodes=2", "--no-requeue")
        job = run.latest.job
        own.wait_for((runs / "flag").exists, what="start of the run")
        nodes = own.job(job)["NodeList"]
        for each in (run, submit_run(own, back, "exit 0", "--begin=now+1hour")):
            started(each, f"{job}.0", time.time(), nodes=nodes)
        own.power_off("n2")
        own.wait_state(job, "NODE_FAIL")
        found = {"state": query_jobs([job], Commands(own)).jobs[job]}
        # What the accounting knows is not needed here.
        found["down"] = [
            node_blocklist.record_failed_nodes(run.files, {}, Commands(own, "sacctmgr"))
            for _ in range(2)
        ]
        own.node("boot", "n2")
        own.wait_for(lambda: own.node_states()["n2"] == "idle", what="n2 back")
        files = RunDir(back)
        own.wait_for(
            lambda: node_blocklist.record_failed_nodes(files, {}, Commands(own)),
            what="word of the outage",
        )
        found["was down"] = node_blocklist.read(files.suspects)
        record = resubmit(run, own.env, Commands(own))
        own.wait_for(lambda: own.job_state(record.job), what="new job")
        found["left out"] = own.job(record.job)["ExcNodeList"]
    return found


def of(submitted: dict[str, Future[Any]], scenario: Any) -> Any:
    return submitted[scenario.__name__].result(120)


def line_of(text: str, name: str) -> list[str]:
    """The cells of a run in `tdp jobs ls`."""
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return re.split(r" {2,}", line)


def test_a_job_is_listed_cancelled_and_submitted_again(submitted):
    said = of(submitted, cancel_and_resubmit)
    running = line_of(said["ls"].stdout, "sleeper")
    first = running[1]
    assert running[2] == "RUNNING"
    assert re.fullmatch(r"n\d", running[4])
    assert said["logs"].stdout == "here I am\n"
    assert said["refused"].returncode == 1
    assert f"sleeper is not over: job {first} is RUNNING; cancel it first" in said["refused"].stderr
    assert said["cancel"].stdout == f"cancelled job {first}\n"
    assert line_of(said["cancelled"].stdout, "sleeper")[2] == "CANCELLED"
    assert line_of(said["cancelled"].stdout, "sleeper")[-1] == "by uid 0"
    assert said["cancel again"].returncode == 1
    assert "nothing to cancel" in said["cancel again"].stderr
    assert re.fullmatch(r"submitted sleeper as job \d+\n", said["resubmit"].stdout)
    assert re.search(rf"^earlier jobs +{first}$", said["show"].stdout, re.MULTILINE)
    assert re.search(r"^state +COMPLETED$", said["show"].stdout, re.MULTILINE)
    assert re.search(r"^exit code +0$", said["show"].stdout, re.MULTILINE)
    assert said["unknown"].returncode == 2
    assert "did you mean sleeper" in said["unknown"].stderr


def test_a_log_is_followed_across_a_requeue(submitted):
    done = of(submitted, follow_a_requeue)
    own = [line for line in done.stdout.splitlines() if line.startswith("start")]
    assert own == ["start 0", "start 1"]
    assert (done.returncode, done.stderr) == (0, "tdp: twice is COMPLETED\n")


def test_a_job_that_failed_once_is_submitted_again_and_completes(submitted):
    done = of(submitted, keep_going)
    assert done.returncode == 0, done.stderr
    said = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    first, second = dict.fromkeys(re.findall(r"job (\d+)", done.stdout))
    assert f"job {first} ended as FAILED; resubmission 1 of at most 5" in said
    assert said[-1] == f"job {second} is COMPLETED"


def test_a_job_that_the_user_cancelled_stays_cancelled(submitted):
    done = of(submitted, give_way)
    assert done.returncode == 1
    assert re.search(r"job (\d+) was cancelled( by uid 0)?, and that is final\n$", done.stdout)
    assert len(set(re.findall(r"job (\d+)", done.stdout))) == 1


def test_tasks_of_an_array_are_told_apart(submitted):
    job, during, after = of(submitted, an_array)
    states = {name: info.state for name, info in during.jobs.items()}
    assert states == {job: "RUNNING", f"{job}_0": "RUNNING", f"{job}_2": "PENDING", "999999": ""}
    assert after.jobs[f"{job}_0"].state == "CANCELLED"
    assert after.jobs[job].state in ("PENDING", "RUNNING")


def test_without_accounting_the_controller_is_enough(submitted):
    found = of(submitted, without_accounting)
    assert line_of(found["right away"], "fails")[2] in (
        "PENDING",
        "RUNNING",
        "COMPLETING",
        "FAILED",
    )
    assert re.search(r"^state +FAILED: NonZeroExitCode$", found["later"], re.MULTILINE)
    assert re.search(r"^exit code +3$", found["later"], re.MULTILINE)
    assert line_of(found["pending"], "waits")[2] == "PENDING"
    assert line_of(found["pending"], "waits")[-1] == "BeginTime"
    assert found["note"].startswith("no word from the accounting: ")
    assert found["forgotten"] == "unknown"


@pytest.mark.parametrize("when", ["down", "was down"])
def test_a_node_that_failed_is_left_out_of_the_next_submission(submitted, when: str):
    found = of(submitted, lose_a_node)
    assert found["state"].state == "NODE_FAIL"
    first = found["down"][0] if when == "down" else found["was down"]
    assert [(e.node, e.weight) for e in first] == [("n2", 1.0)]
    assert first[0].reason.startswith("down (crash) under job ")
    assert found["down"][1] == []
    assert found["left out"] == "n2"

"""What is done to jobs: what Slurm is told to do, and when it is not."""

from pathlib import Path

import pytest

from tests.launch.slurm.folders import submitted
from tests.launch.slurm.scripted import Scripted, row
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm.jobs import (
    active_jobs,
    cancel,
    exclusion,
    query_runs,
    resubmit,
    sbatch,
)
from torchdistpackage.launch.slurm.node_blocklist import NodeIncident, record
from torchdistpackage.launch.slurm.query import CommandTimeout, CompletedCommand
from torchdistpackage.launch.slurm.runs import read_run

ENV = {
    "PATH": "/bin",
    "MINE": "kept",
    "SLURM_CPU_BIND": "mask",
    "SBATCH_PARTITION": "p",
    "RANK": "3",
}
LATER_S = 9000.0


def test_looking_at_runs_without_slurm_is_a_note(tmp_path: Path):
    run = submitted(tmp_path / "a", "7")
    looked = query_runs([run], Scripted(squeue=LaunchError("there is no squeue here")))
    assert looked.notes == ("there is no squeue here",)
    assert looked.jobs["7"].reason == "Slurm does not answer"


def test_a_new_job_may_live_although_slurm_does_not_show_it(tmp_path: Path):
    run, slurm = submitted(tmp_path / "a", "7", 1000.0), Scripted()
    assert [info.job for info in active_jobs(run, slurm, now_s=1030.0)] == ["7"]
    assert active_jobs(run, slurm, now_s=1100.0) == []


def test_all_jobs_of_a_run_that_live_are_cancelled(tmp_path: Path):
    submitted(tmp_path / "a", "7")
    run = submitted(tmp_path / "a", "8")
    text = row("7", "COMPLETING") + row("8", "PENDING")
    slurm = Scripted(squeue=text)
    assert cancel([run], slurm) == ["7", "8"]
    assert slurm.asked[-1] == ["scancel", "7", "8"]


def test_a_task_is_cancelled_alone_and_an_array_by_its_runs(tmp_path: Path):
    runs = [submitted(tmp_path / name, f"7_{i}") for i, name in enumerate("abc")]
    text = row("7_0", "RUNNING") + row("7_1", "COMPLETED") + row("7_2", "PENDING")
    slurm = Scripted(squeue=text)
    assert cancel(runs[:1], slurm) == ["7_0"]
    assert cancel(runs, slurm) == ["7_0", "7_2"]


def test_nothing_to_cancel_and_a_refusal_are_told(tmp_path: Path):
    run = submitted(tmp_path / "a", "7")
    slurm = Scripted(squeue=row("7", "COMPLETED"))
    with pytest.raises(LaunchError, match=r"nothing to cancel: a \(job 7\) are over"):
        cancel([run], slurm)
    assert slurm.count("scancel") == 0
    slurm = Scripted(
        squeue=row("7", "RUNNING"), scancel=CompletedCommand(1, "", "scancel: error: Denied\n")
    )
    with pytest.raises(LaunchError, match="scancel 7 failed: scancel: error: Denied"):
        cancel([run], slurm)


def test_resubmission_is_the_kept_script_from_a_clean_environment(tmp_path: Path):
    run = submitted(tmp_path / "a", "7")
    slurm = Scripted(squeue=row("7", "FAILED"), sbatch="8\n")
    new = resubmit(run, ENV, slurm, now_s=LATER_S)
    assert slurm.asked[-1] == ["sbatch", "--parsable", str(run.files.script)]
    assert slurm.envs[-1] == {"PATH": "/bin", "MINE": "kept"}
    assert (new.job, new.time_s, new.code) == ("8", LATER_S, run.latest.code)
    again = read_run(run.folder)
    assert again is not None
    assert [r.job for r in again.records] == ["7", "8"]


def test_a_task_of_an_array_is_submitted_again_alone(tmp_path: Path):
    run = submitted(tmp_path / "a", "7_3")
    slurm = Scripted(squeue=row("7_3", "TIMEOUT"), sbatch="8;cluster\n")
    assert resubmit(run, ENV, slurm, now_s=LATER_S).job == "8_3"
    assert slurm.asked[-1][2:-1] == ["--array=3"]


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING", "REQUEUE_HOLD", "HYPERSLEEPING"])
def test_a_run_is_not_submitted_beside_a_living_job(tmp_path: Path, state: str):
    run = submitted(tmp_path / "a", "7")
    slurm = Scripted(squeue=row("7", state))
    with pytest.raises(LaunchError, match=f"a is not over: job 7 is {state}; cancel it first"):
        resubmit(run, ENV, slurm, now_s=LATER_S)
    with pytest.raises(LaunchError, match="just submitted"):
        resubmit(run, ENV, Scripted(), now_s=run.latest.time_s + 1)
    assert slurm.count("sbatch") == 0


def test_suspects_are_left_out_beside_those_that_the_script_leaves_out(tmp_path: Path):
    run = submitted(tmp_path / "a", "7")
    record(run.files.suspects, NodeIncident("n3", "down", 1.0, 0.0, LATER_S + 1, "7.0"))
    record(run.files.suspects, NodeIncident("n4", "down", 1.0, 0.0, LATER_S - 1, "7.0"))
    slurm = Scripted(squeue=row("7", "NODE_FAIL"), sbatch="8\n")
    resubmit(run, ENV, slurm, now_s=LATER_S)
    assert slurm.asked[-1][2:-1] == ["--exclude=n3"]


def partition(up: set[str], needed: int, must: str = ""):
    """sbatch of a partition: `needed` of its nodes that are `up`, among them `must`."""

    def sbatch(args):
        words = [word.removeprefix("--exclude=") for word in args if word.startswith("--exclude=")]
        out = set(",".join(words).split(","))
        if "--test-only" not in args:
            return "8\n"
        if must in out - {""}:
            return CompletedCommand(1, "", "allocation failure: Invalid node name specified\n")
        if len(up - out) < needed:
            why = "allocation failure: Requested node configuration is not available\n"
            return CompletedCommand(1, "", why)
        return CompletedCommand(0, "", "sbatch: Job 1 to start at 2027-11-28T18:59:17\n")

    return sbatch


@pytest.mark.parametrize(
    ("up", "needed", "must", "left"),
    [
        ("n1 n2 n3 n4 n5", 1, "", "n2,n3,n4"),
        ("n1 n2 n3 n4 n5", 3, "", "n2,n4"),  # n3 only went down, and n2 after it
        ("n1 n2 n3 n4 n5", 4, "", "n4"),
        ("n1 n2 n3 n4 n5", 5, "", ""),  # every node is needed
        ("n2 n3 n4", 1, "", "n2,n4"),  # all nodes are suspects
        ("n1 n2 n3 n4 n5", 1, "n4", ""),  # a nodelist that needs the worst
        ("n1", 2, "", ""),  # it waits for whichever comes
    ],
)
def test_no_more_suspects_are_left_out_than_the_job_can_do_without(
    tmp_path: Path, up: str, needed: int, must: str, left: str
):
    run = submitted(tmp_path / "a", "7")
    for node, weight, job in (
        *(("n4", 0.5, "1.0"), ("n4", 0.5, "2.0")),  # its GPUs have failed twice
        *(("n2", 1.0, "5.0"), ("n3", 1.0, "4.0")),
    ):
        at = float(job)
        record(run.files.suspects, NodeIncident(node, "down", weight, at, LATER_S + 9, job))
    slurm = Scripted(squeue=row("7", "NODE_FAIL"), sbatch=partition({*up.split()}, needed, must))
    resubmit(run, ENV, slurm, now_s=LATER_S)
    assert slurm.asked[-1][2:-1] == ([f"--exclude={left}"] if left else [])
    assert slurm.count("sbatch") <= 4, "tries are few"


@pytest.mark.parametrize(
    "answer",
    [
        CompletedCommand(1, "", "sbatch: error: Unable to contact slurm controller\n"),
        CompletedCommand(1, "", "allocation failure: Invalid account or account/partition\n"),
        CommandTimeout("no answer"),
    ],
)
def test_suspects_are_left_out_where_slurm_does_not_say_that_nodes_are_too_few(
    tmp_path: Path, answer
):
    run = submitted(tmp_path / "a", "7")
    record(run.files.suspects, NodeIncident("n3", "down", 1.0, 0.0, LATER_S + 1, "7.0"))
    says = lambda args: answer if "--test-only" in args else "8\n"  # noqa: E731
    slurm = Scripted(squeue=row("7", "NODE_FAIL"), sbatch=says)
    resubmit(run, ENV, slurm, now_s=LATER_S)
    assert slurm.asked[-1][2:-1] == ["--exclude=n3"]


@pytest.mark.parametrize("line", ["--exclude=n[7-8]", "--exclude n[7-8]", "-x n[7-8]", "-xn[7-8]"])
def test_an_exclusion_keeps_the_scripts_own(tmp_path: Path, line: str):
    script = tmp_path / "job.sbatch"
    script.write_text(f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH {line}\n")
    assert exclusion(script, ("n3", "n4")) == ["--exclude=n[7-8],n3,n4"]
    assert exclusion(script, ()) == []


def test_what_sbatch_says_is_passed_on(tmp_path: Path):
    script = tmp_path / "job.sbatch"
    with pytest.raises(LaunchError, match="there is no batch script"):
        sbatch(script, ENV, Scripted())
    script.write_text("#!/bin/bash\n")
    refusal = CompletedCommand(
        1, "", "sbatch: error: Batch job submission failed: Invalid partition\n"
    )
    with pytest.raises(LaunchError, match=r"refused .*Invalid partition"):
        sbatch(script, ENV, Scripted(sbatch=refusal))
    with pytest.raises(LaunchError, match="sbatch refused"):
        sbatch(script, ENV, Scripted(sbatch="queued, trust me\n"))

"""Whom we believe about a job: the controller, the accounting, or nobody."""

import time

import pytest

from tests.launch.slurm.scripted import NO_ACCOUNTING, UNHEARD_OF, Scripted, row
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm.query import (
    CompletedCommand,
    JobInfo,
    Outcome,
    QueryResult,
    query_jobs,
)


def test_jobs_that_are_alive_cost_one_question():
    slurm = Scripted(squeue=row("1", "RUNNING") + row("2_0", "PENDING", nodes=""))
    looked = query_jobs(["1", "2_0"], slurm)
    assert [info.state for info in looked.jobs.values()] == ["RUNNING", "PENDING"]
    assert looked.notes == ()
    (asked,) = slurm.asked
    assert asked[-2:] == ["-j", "1,2"]


def test_nothing_is_asked_for_nobody():
    slurm = Scripted()
    assert query_jobs([], slurm) == QueryResult({})
    assert slurm.asked == []


def test_right_after_submission_nobody_knows_the_job_and_that_is_no_error():
    looked = query_jobs(["7"], Scripted(squeue=UNHEARD_OF, sacct=""))
    assert looked == QueryResult({"7": JobInfo("7")})
    assert looked.jobs["7"].outcome is Outcome.UNKNOWN
    assert not looked.jobs["7"].ended


def test_without_accounting_a_forgotten_job_is_unknown_with_a_note():
    looked = query_jobs(["7"], Scripted(sacct=NO_ACCOUNTING))
    assert looked.jobs["7"].outcome is Outcome.UNKNOWN
    assert looked.notes == ("no word from the accounting: Slurm accounting storage is disabled",)


def test_without_accounting_what_the_controller_remembers_is_enough():
    looked = query_jobs(["7"], Scripted(squeue=row("7", "FAILED", code=768)))
    assert (looked.jobs["7"].state, looked.jobs["7"].exit_code) == ("FAILED", 3)
    assert looked.notes == ()


def test_a_machine_without_sacct_is_one_without_accounting():
    slurm = Scripted(squeue="", sacct=LaunchError("there is no sacct here"))
    assert query_jobs(["7"], slurm).notes == ("there is no sacct here",)


def test_the_accounting_speaks_for_what_the_controller_forgot():
    looked = query_jobs(["7"], Scripted(sacct="7|FAILED|3:0|61|n[1-2]|None\n"))
    assert looked.jobs["7"] == JobInfo("7", "FAILED", "", "n[1-2]", 3, 0, 61.0)


def test_the_accounting_is_late_so_the_controller_wins():
    """Between a node's death and the requeue the accounting says that the job is dead."""
    slurm = Scripted(squeue=row("11", "COMPLETING"), sacct="11|NODE_FAIL|0:0|3|n[1-3]|None\n")
    assert query_jobs(["11"], slurm).jobs["11"].outcome is Outcome.ALIVE
    slurm = Scripted(squeue=row("11", "TIMEOUT"), sacct="11|RUNNING|0:0|3|n[1-3]|None\n")
    assert query_jobs(["11"], slurm).jobs["11"].state == "TIMEOUT"


def test_the_accounting_knows_who_cancelled():
    slurm = Scripted(squeue=row("4", "CANCELLED", code=15), sacct="4|CANCELLED by 1000|0:0|2|n1|\n")
    info = query_jobs(["4"], slurm).jobs["4"]
    assert (info.by, info.exit_code) == ("1000", 143)


def test_a_job_that_only_the_accounting_takes_for_alive_is_unknown():
    """Accounting keeps such rows for ever when a controller lost the job."""
    info = query_jobs(["9"], Scripted(squeue="", sacct="9|RUNNING|0:0|99|n1|None\n")).jobs["9"]
    assert info.outcome is Outcome.UNKNOWN
    assert "sacct says RUNNING" in info.reason


def test_an_array_is_its_tasks():
    text = row("3_0", "COMPLETED") + row("3_1", "FAILED", code=256) + row("31_0", "RUNNING")
    looked = query_jobs(["3", "3_0"], Scripted(squeue=text))
    assert looked.jobs["3"].state == "FAILED"
    assert looked.jobs["3_0"].state == "COMPLETED"


def test_a_controller_that_is_away_is_an_error_and_no_dead_job():
    away = CompletedCommand(1, "", "slurm_load_jobs error: Unable to contact slurm controller\n")
    with pytest.raises(LaunchError, match=r"squeue cannot say how jobs 7 are.*Unable to contact"):
        query_jobs(["7"], Scripted(squeue=away, sacct="7|FAILED|1:0|9|n1|None\n"))


def test_the_accounting_is_asked_from_an_hour_before_the_submission_on():
    slurm = Scripted(sacct="")
    query_jobs(["7"], slurm, since_s=1_000_000_000.0)
    query_jobs(["7"], slurm)
    hour_before = time.localtime(1_000_000_000 - 3600)
    assert slurm.asked[1][-2:] == ["-S", time.strftime("%Y-%m-%dT%H:%M:%S", hour_before)]
    assert "-S" not in slurm.asked[3]

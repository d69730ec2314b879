"""Coming back without a batch script of ours: asked once, and only while the job runs."""

import pytest

from tests.launch.slurm.scripted import Scripted
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm.query import CompletedCommand
from torchdistpackage.launch.slurm.requeue import (
    EXIT_REQUEUE_DENIED,
    EXIT_TEMPFAIL,
    Decision,
    RequeueDecision,
    requeue_id,
    requeue_self,
    why_not,
)
from torchdistpackage.run_files import RunDir

JOB = {"SLURM_JOB_ID": "12"}
TASK = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1"}


def decided(tmp_path, word: RequeueDecision | None, env=JOB) -> RunDir:
    files = RunDir(tmp_path)
    if word is not None:
        files.job.mkdir()
        start = f"{env['SLURM_JOB_ID']}.0"
        files.decision(start).write_text(f"{Decision(word, 'after step 3')}\n")
    return files


def shown(state: str, reason: str = "None", batch: int = 1) -> str:
    return (
        f"JobId=12 JobName=x JobState={state} Reason={reason} Dependency=(null) BatchFlag={batch}"
    )


def slurm_that_says(text: str) -> Scripted:
    return Scripted(scontrol=lambda args: "" if "requeue" in args else text)


@pytest.mark.parametrize(("env", "job"), [(JOB, "12"), (TASK, "12_1")])
@pytest.mark.parametrize("text", [shown("RUNNING"), shown("COMPLETING", "TimeLimit")])
def test_a_running_job_is_requeued_once_and_of_an_array_one_task(tmp_path, env, job, text):
    """Also one that ran into its time limit, while its processes still have time to save."""
    slurm = slurm_that_says(text)
    assert requeue_self(decided(tmp_path, RequeueDecision.REQUEUE, env), env, slurm) == 0
    assert requeue_id(env) == job
    assert slurm.asked == [["scontrol", "-o", "show", "job", job], ["scontrol", "requeue", job]]


@pytest.mark.parametrize(
    "text",
    [shown("COMPLETING"), shown("PENDING", "BeginTime"), shown("CANCELLED"), shown("NEW_WORD")],
)
def test_a_job_that_slurm_is_ending_is_left_to_it(tmp_path, text, capsys):
    slurm = slurm_that_says(text)
    assert (
        requeue_self(decided(tmp_path, RequeueDecision.REQUEUE), JOB, slurm) == EXIT_REQUEUE_DENIED
    )
    assert slurm.count("scontrol") == 1
    assert "is not requeued here, it is" in capsys.readouterr().out


def test_a_job_without_a_script_is_not_requeued(tmp_path, capsys):
    """A shell of salloc."""
    slurm = slurm_that_says(shown("RUNNING", batch=0))
    assert (
        requeue_self(decided(tmp_path, RequeueDecision.REQUEUE), JOB, slurm) == EXIT_REQUEUE_DENIED
    )
    assert slurm.count("scontrol") == 1 and "no batch script" in capsys.readouterr().out


@pytest.mark.parametrize(
    "word", [RequeueDecision.FINISHED, RequeueDecision.STOP, RequeueDecision.CHAIN, None]
)
def test_nothing_is_asked_for_where_nothing_was_decided(tmp_path, word):
    slurm = Scripted()
    assert requeue_self(decided(tmp_path, word), JOB, slurm) == (
        EXIT_TEMPFAIL if word is RequeueDecision.STOP else 0
    )
    assert slurm.asked == []


def test_a_batch_script_of_ours_asks_itself(tmp_path):
    slurm = Scripted()
    env = {**JOB, "TDP_BATCH": "1"}
    assert (
        requeue_self(decided(tmp_path, RequeueDecision.REQUEUE), env, slurm) == 0
        and slurm.asked == []
    )


def refuses(args):
    said = "Requested operation is disabled\n"
    return CompletedCommand(1, "", said) if "requeue" in args else shown("RUNNING")


@pytest.mark.parametrize(
    ("scontrol", "said"),
    [
        (LaunchError("there is no scontrol here"), "there is no scontrol here"),
        (refuses, "scontrol requeue 12 said: Requested operation is disabled"),
    ],
)
def test_a_refusal_is_told(tmp_path, scontrol, said):
    with pytest.raises(LaunchError, match="not requeued") as caught:
        requeue_self(decided(tmp_path, RequeueDecision.REQUEUE), JOB, Scripted(scontrol=scontrol))
    assert said in str(caught.value)


def test_a_slurm_that_shows_nothing_is_asked_again(tmp_path):
    answers = ["", "", shown("RUNNING")]
    slurm = Scripted(scontrol=lambda args: "" if "requeue" in args else answers.pop(0))
    slept: list[float] = []
    assert requeue_self(decided(tmp_path, RequeueDecision.REQUEUE), JOB, slurm, slept.append) == 0
    assert slept == [0.0, 1.0, 4.0] and slurm.asked[-1] == ["scontrol", "requeue", "12"]
    silent = Scripted(scontrol=CompletedCommand(0, "", "scontrol: warning: odd JobState=RUNNING"))
    with pytest.raises(LaunchError, match="shows no state of job 12"):
        requeue_self(RunDir(tmp_path), JOB, silent, slept.append)
    assert silent.count("scontrol") == 3


@pytest.mark.parametrize(
    ("mode", "scontrol", "said"),
    [
        ("requeue", shown("RUNNING"), ""),
        ("requeue", shown("RUNNING") + " Requeue=0", "--no-requeue"),
        ("requeue", shown("RUNNING", batch=0), "no batch script"),
        ("requeue", LaunchError("there is no scontrol here"), "there is no scontrol here"),
        ("requeue", "", "shows no state"),
        ("chain", shown("RUNNING"), "only the script of tdp submit chains jobs"),
        ("never", LaunchError("not asked"), ""),
    ],
)
def test_a_job_that_will_not_come_back_says_so_before_it_starts(mode, scontrol, said):
    why = why_not(mode, JOB, Scripted(scontrol=scontrol))
    assert said in why and bool(why) is bool(said)
    assert why_not(mode, {**JOB, "TDP_BATCH": "1"}, Scripted()) == ""

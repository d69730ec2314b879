"""Coming back without a batch script of ours: asked once, and only while the job runs."""

import pytest

from tests.launch.slurm.scripted import Scripted
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.requeue import Decision, Word
from torchdistpackage.launch.slurm.again import come_back, requeue_id
from torchdistpackage.launch.slurm.commands import Ran
from torchdistpackage.launch.slurm.files import JobFiles

JOB = {"SLURM_JOB_ID": "12"}
TASK = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1"}


def decided(tmp_path, word: Word | None, env=JOB) -> JobFiles:
    files = JobFiles(tmp_path)
    if word is not None:
        files.job.mkdir()
        start = f"{env['SLURM_JOB_ID']}.0"
        files.decision(start).write_text(f"{Decision(word, 'after step 3')}\n")
    return files


@pytest.mark.parametrize(("env", "job"), [(JOB, "12"), (TASK, "12_1")])
def test_a_running_job_is_requeued_once_and_of_an_array_one_task(tmp_path, env, job):
    slurm = Scripted(squeue="RUNNING\n", scontrol="")
    come_back(decided(tmp_path, Word.REQUEUE, env), env, slurm)
    assert requeue_id(env) == job
    assert slurm.asked == [
        ["squeue", "-h", "-j", job, "-o", "%T"],
        ["scontrol", "requeue", job],
    ]


@pytest.mark.parametrize("state", ["COMPLETING", "PENDING", "CANCELLED", ""])
def test_a_job_that_slurm_is_ending_is_left_to_it(tmp_path, state, capsys):
    slurm = Scripted(squeue=f"{state}\n")
    come_back(decided(tmp_path, Word.REQUEUE), JOB, slurm)
    assert slurm.count("squeue") == 1 and slurm.count("scontrol") == 0
    assert f"it is {state or 'gone'}" in capsys.readouterr().out


@pytest.mark.parametrize("word", [Word.FINISHED, Word.STOP, Word.CHAIN, None])
def test_nothing_is_asked_for_where_nothing_was_decided(tmp_path, word):
    slurm = Scripted()
    come_back(decided(tmp_path, word), JOB, slurm)
    assert slurm.asked == []


def test_a_batch_script_of_ours_asks_itself(tmp_path):
    slurm = Scripted()
    come_back(decided(tmp_path, Word.REQUEUE), {**JOB, "TDP_BATCH": "1"}, slurm)
    assert slurm.asked == []


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"squeue": LaunchError("there is no squeue here")}, "there is no squeue here"),
        ({"squeue": "RUNNING", "scontrol": Ran(1, "", "Requested operation is disabled\n")},
         "scontrol requeue 12 said: Requested operation is disabled"),
    ],
)  # fmt: skip
def test_a_refusal_says_that_the_run_is_saved(tmp_path, answers, said):
    with pytest.raises(LaunchError, match="saved, but not requeued") as caught:
        come_back(decided(tmp_path, Word.REQUEUE), JOB, Scripted(**answers))
    assert said in str(caught.value)

"""The earlier monitor's functions, over programs that say what they are told to say."""

from pathlib import Path

import pytest

from tests.launch.slurm.scripted import Programs, row
from tests.tells import facts_pattern
from torchdistpackage.compat.torchdistpackage import job_monitor
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm.monitor import Stop
from torchdistpackage.launch.slurm.query import JobInfo, Outcome


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return Programs(tmp_path)


@pytest.mark.parametrize(
    ("state", "alive", "finished"),
    [
        ("RUNNING", True, False),
        ("COMPLETING", True, False),
        ("SUSPENDED", True, False),
        ("REQUEUED", True, False),
        ("COMPLETED", False, True),
        ("FAILED", False, False),
        ("CANCELLED", False, False),
    ],
)
def test_alive_and_finished(slurm: Programs, state: str, alive: bool, finished: bool):
    slurm.say("squeue", row("7", state))
    assert job_monitor.determine_job_is_alive("7") is alive
    assert job_monitor.job_is_finished(7) is finished
    assert job_monitor.get_slurm_jobinfo(7).state == state


def test_a_new_job_that_slurm_does_not_show_yet_is_alive(slurm: Programs):
    """The earlier function raised IndexError here."""
    assert job_monitor.get_slurm_jobinfo("7") == JobInfo("7")
    assert job_monitor.determine_job_is_alive("7")
    assert not job_monitor.job_is_finished("7")


def test_a_script_is_submitted_and_watched_to_its_end(slurm: Programs, tmp_path: Path):
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n")
    slurm.say("sbatch", "7\n")
    slurm.say("squeue", row("7", "CANCELLED", code=15))
    assert job_monitor.launch_job(str(script)) == "7"
    assert job_monitor.monitor_job(str(script), query_interval=1) == Stop(
        Outcome.CANCELLED, "job 7 was cancelled, and that is final"
    )
    submissions = [asked for asked in slurm.asked if asked[0] == "sbatch"]
    assert submissions == [["sbatch", "--parsable", str(script)]] * 2


def test_a_job_is_cancelled_and_a_refusal_told(slurm: Programs):
    job_monitor.scancel_slurm_job(7)
    assert slurm.asked == [["scancel", "7"]]
    slurm.say("scancel", "scancel: error: Invalid job id 9\n", code=1)
    with pytest.raises(LaunchError, match=facts_pattern("9 failed", "id 9")):
        job_monitor.scancel_slurm_job("9")

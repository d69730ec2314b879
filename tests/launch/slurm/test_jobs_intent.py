"""One submission is one job, whatever becomes of the answer of sbatch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launch.slurm.folders import submitted
from tests.launch.slurm.scripted import Answer, Scripted, row
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm import jobs
from torchdistpackage.launch.slurm.jobs import resubmit
from torchdistpackage.launch.slurm.query import CommandTimeout, CompletedCommand
from torchdistpackage.launch.slurm.run_dir import read_records
from torchdistpackage.launch.slurm.runs import SubmittedRun

ENV = {"PATH": "/bin"}
NOW = 90_000.0
SENT = CompletedCommand(
    1, "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv\n"
)
REFUSED = CompletedCommand(1, "", "sbatch: error: invalid partition specified: nosuch\n")


class Taking(Scripted):
    """Takes every job, and answers sbatch as told; a job is seen after `seen_after` questions."""

    def __init__(self, script: Path, answer: Answer, seen_after: int = 0, takes: bool = True):
        super().__init__(sbatch=self._sbatch, squeue=self._squeue)
        self.script, self.answer = script, answer
        self.seen_after, self.takes, self.jobs = seen_after, takes, list[int]()

    def _sbatch(self, args: Sequence[str]) -> Answer:
        self.jobs += [8 + len(self.jobs)] if self.takes else []
        return self.answer

    def _squeue(self, args: Sequence[str]) -> Answer:
        if "--me" not in args:
            return row("7", "COMPLETED")
        self.seen_after -= 1
        seen = self.jobs if self.seen_after < 0 else []
        others = [f"3|{NOW:.0f}|/other/job.sbatch", f"7|{NOW:.0f}|{self.script}", "squeue: odd"]
        return "\n".join([*others, *(f"{j}|{NOW:.0f}|{self.script} a1" for j in seen)])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SubmittedRun:
    monkeypatch.setattr(jobs, "_TRIES_S", (0.0, 0.0))
    return submitted(tmp_path / "a", "7")


def jobs_of(run: SubmittedRun) -> list[str]:
    return [record.job for record in read_records(run.files.records)]


@pytest.mark.parametrize("answer", [CommandTimeout("60 s"), SENT, CompletedCommand(0, "", "")])
@pytest.mark.parametrize("seen_after", [0, 1])
def test_a_job_that_was_taken_without_an_answer_is_found_and_noted(run, answer, seen_after):
    slurm = Taking(run.files.script, answer, seen_after)
    assert resubmit(run, ENV, slurm, now_s=NOW).job == "8"
    assert jobs_of(run) == ["7", "8"] and slurm.jobs == [8]
    assert not run.files.intent.exists()


def test_a_job_that_shows_later_is_noted_by_the_next_submission_and_is_its_answer(run):
    slurm = Taking(run.files.script, CommandTimeout("60 s"), seen_after=2)
    with pytest.raises(CommandTimeout):
        resubmit(run, ENV, slurm, now_s=NOW)
    assert jobs_of(run) == ["7"] and run.files.intent.exists()
    assert resubmit(run, ENV, slurm, now_s=NOW + 1).job == "8"
    assert jobs_of(run) == ["7", "8"] and slurm.jobs == [8]


def test_a_submission_that_was_cut_off_is_waited_for_and_then_forgotten(run):
    """Killed between the intent and sbatch: Slurm has no job, but could still be given one."""
    slurm = Taking(run.files.script, LaunchError("killed"), takes=False)
    slurm.answers["squeue"] = LaunchError("no controller")
    with pytest.raises(LaunchError, match="killed"):
        jobs.submit_with_intent(
            [(run.files, read_records(run.files.records)[0])], lambda: slurm(["sbatch"]).out, slurm
        )
    assert run.files.intent.exists()
    sent_s = read_records(run.files.intent)[0].time_s
    with pytest.raises(LaunchError, match="no controller"):
        jobs.resolve_intent(run.files, slurm, sent_s + 1)
    slurm.answers["squeue"] = "3|5|/other\n"
    with pytest.raises(LaunchError, match="try again in 59 s"):
        jobs.resolve_intent(run.files, slurm, sent_s + 1)
    assert jobs.resolve_intent(run.files, slurm, sent_s + jobs.GRACE_S + 1) is None
    assert not run.files.intent.exists() and jobs_of(run) == ["7"]


def test_a_refusal_leaves_no_intent(run):
    slurm = Taking(run.files.script, REFUSED, takes=False)
    for _ in range(2):
        with pytest.raises(LaunchError, match="nosuch") as refused:
            resubmit(run, ENV, slurm, now_s=NOW)
        assert not isinstance(refused.value, CommandTimeout)
    assert not run.files.intent.exists() and slurm.count("sbatch") == 2


def test_a_task_of_an_array_keeps_its_number(run):
    record = read_records(run.files.records)[0]
    slurm = Taking(Path(record.script), SENT)
    tasks = [(run.files, replace(record, job=f"_{i}", time_s=NOW)) for i in (0, 1)]

    def sbatch() -> str:
        slurm(["sbatch"])
        raise CommandTimeout("60 s")

    assert [r.job for r in jobs.submit_with_intent(tasks, sbatch, slurm)] == ["8_0", "8_1"]

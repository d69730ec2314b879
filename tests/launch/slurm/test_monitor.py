"""The loop around the policy: what it asks, says and submits, with a clock of its own."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch.slurm.folders import measured, started, submitted
from tests.launch.slurm.scripted import UNHEARD_OF, Answer, Scripted, ids_of, row
from tests.tells import tells
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm.monitor import (
    ResubmitLimits,
    RunTarget,
    ScriptTarget,
    Stop,
    Target,
    monitor,
)
from torchdistpackage.launch.slurm.query import CommandTimeout, CompletedCommand, Outcome
from torchdistpackage.launch.slurm.runs import read_run

ENV = {"PATH": "/bin"}


class Clock:
    """Time passes only by sleeping."""

    def __init__(self) -> None:
        self.now_s = 100_000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


class Story(Scripted):
    """Answers of squeue in turn, the last one for ever; sbatch counts from 8 on."""

    def __init__(self, *squeue: Answer, **answers: Answer) -> None:
        turns = list(squeue)
        super().__init__(
            **{
                "squeue": lambda args: turns.pop(0) if len(turns) > 1 else turns[0],
                "sbatch": lambda args: f"{7 + self.count('sbatch')}\n",
                **answers,
            }
        )


def run_monitor(target: Target, slurm: Scripted, clock: Clock) -> tuple[Stop, list[str]]:
    said: list[str] = []
    stop = monitor(target, runner=slurm, clock=clock, sleep=clock.sleep, say=said.append)
    return stop, said


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.sbatch"
    path.write_text("#!/bin/bash\nexit 1\n")
    return path


def test_a_script_is_submitted_watched_and_submitted_again(script: Path):
    clock = Clock()
    slurm = Story(
        UNHEARD_OF,
        row("8", "PENDING", nodes=""),
        row("8", "RUNNING"),
        row("8", "RUNNING"),
        row("8", "COMPLETING"),
        row("8", "FAILED", code=256, used="20:00"),
        row("8", "FAILED", code=256, used="20:00"),
        row("9", "RUNNING"),
        row("9", "COMPLETED"),
    )
    stop, said = run_monitor(ScriptTarget(script, ENV, slurm), slurm, clock)
    assert stop == Stop(Outcome.SUCCEEDED, "job 9 is COMPLETED")
    assert said == [
        "job 8 is not known to Slurm, yet or any more",
        "job 8 is PENDING",
        "job 8 is RUNNING on n1",
        "job 8 is COMPLETING on n1",
        "job 8 is FAILED on n1",
        "job 8 is submitted again in 30 s",
        "job 8 ended as FAILED; resubmission 1 of at most 5",
        "job 9 is RUNNING on n1",
        "job 9 is COMPLETED on n1",
        "job 9 is COMPLETED",
    ]
    assert clock.slept == [10.0] * 5 + [30.0, 10.0]
    assert slurm.count("sbatch") == 2
    assert slurm.count("scancel") == 0


def test_a_job_that_the_user_cancelled_stays_cancelled(script: Path):
    slurm = Story(row("8", "RUNNING"), row("8", "CANCELLED", code=15))
    stop, _ = run_monitor(ScriptTarget(script, ENV, slurm), slurm, Clock())
    assert stop.outcome is Outcome.CANCELLED
    assert slurm.count("sbatch") == 1


def test_a_script_that_always_fails_is_given_up(script: Path):
    slurm = Story(lambda args: row(ids_of(args)[0], "FAILED", code=256))
    stop, _ = run_monitor(ScriptTarget(script, ENV, slurm), slurm, Clock())
    assert stop.outcome is Outcome.FAILED
    assert slurm.count("sbatch") == 2


def test_bad_nodes_are_borne_longer_and_ever_more_slowly(script: Path):
    clock, slurm = Clock(), Story(lambda args: row(ids_of(args)[0], "NODE_FAIL"))
    stop, _ = run_monitor(ScriptTarget(script, ENV, slurm), slurm, clock)
    assert stop.reason == "job 13 ended as NODE_FAIL after 5 resubmissions, the limit"
    assert clock.slept == [30.0, 60.0, 120.0, 240.0, 480.0]


def test_a_job_that_slurm_revives_in_the_meantime_is_not_doubled(script: Path):
    slurm = Story(row("8", "NODE_FAIL"), row("8", "PENDING"), row("8", "COMPLETED"))
    stop, _ = run_monitor(ScriptTarget(script, ENV, slurm), slurm, Clock())
    assert stop.outcome is Outcome.SUCCEEDED
    assert slurm.count("sbatch") == 1


def test_a_controller_that_is_away_is_waited_for_and_told_once(script: Path):
    away = CompletedCommand(1, "", "slurm_load_jobs error: Unable to contact slurm controller\n")
    slurm = Story(row("8", "RUNNING"), away, away, away, row("8", "COMPLETED"))
    stop, said = run_monitor(ScriptTarget(script, ENV, slurm), slurm, Clock())
    assert stop.outcome is Outcome.SUCCEEDED
    assert sum("Unable to contact" in line for line in said) == 1


def test_a_refusal_is_tried_again_and_a_silence_is_not(script: Path):
    full = CompletedCommand(1, "", "sbatch: error: QOSMaxSubmitJobPerUserLimit\n")
    answers: list[Answer] = ["8\n", full, full, "9\n"]
    slurm = Story(
        *[row("8", "FAILED")] * 2, row("9", "COMPLETED"), sbatch=lambda args: answers.pop(0)
    )
    clock = Clock()
    stop, said = run_monitor(ScriptTarget(script, ENV, slurm), slurm, clock)
    assert stop.outcome is Outcome.SUCCEEDED
    assert clock.slept == [30.0, 60.0, 120.0]
    assert sum("QOSMaxSubmit" in line for line in said) == 2

    silent: list[Answer] = ["8\n", CommandTimeout("sbatch gave no answer")]
    slurm = Story(row("8", "FAILED"), sbatch=lambda args: silent.pop(0))
    with pytest.raises(CommandTimeout):
        run_monitor(ScriptTarget(script, ENV, slurm), slurm, Clock())


def test_a_refusal_for_good_ends_it(script: Path):
    answers: list[Answer] = ["8\n"]
    refusal = CompletedCommand(1, "", "sbatch: error: Invalid account\n")
    slurm = Story(row("8", "FAILED"), sbatch=lambda args: answers.pop(0) if answers else refusal)
    with pytest.raises(LaunchError, match="Invalid account"):
        run_monitor(ScriptTarget(script, ENV, slurm), slurm, Clock())
    assert slurm.count("sbatch") == 7


def test_an_array_is_refused_before_it_is_submitted(tmp_path: Path):
    script, slurm = tmp_path / "array.sbatch", Scripted()
    script.write_text("#!/bin/bash\n#SBATCH --array=0-3\n")
    with pytest.raises(LaunchError, match="is an array"):
        ScriptTarget(script, ENV, slurm)
    assert slurm.asked == []


def test_a_run_is_watched_from_its_latest_job_on(tmp_path: Path):
    run = submitted(tmp_path / "a", "7")
    started(run, "7.0", 1010.0)
    measured(run, 3.0, 2.0)
    slurm = Story(*[row("7", "TIMEOUT")] * 3, row("8", "COMPLETED"))
    stop, _ = run_monitor(RunTarget(run, ENV, slurm), slurm, Clock())
    assert stop == Stop(Outcome.SUCCEEDED, "job 8 is COMPLETED")
    again = read_run(run.folder)
    assert again is not None
    assert [record.job for record in again.records] == ["7", "8"]


def test_a_job_that_chains_its_successor_is_not_submitted_again(tmp_path: Path):
    """The job of a run that chains ends well, and its successor is in the run's records."""
    run = submitted(tmp_path / "a", "7")

    def chains(args: Sequence[str]) -> str:
        if read_run(run.folder) == run:
            submitted(run.folder, "8", 2000.0)
            return row("7", "RUNNING")
        return row("8", "COMPLETED")

    slurm = Story(chains)
    stop, said = run_monitor(RunTarget(run, ENV, slurm), slurm, Clock())
    assert stop == Stop(Outcome.SUCCEEDED, "job 8 is COMPLETED")
    assert tells(said, "job 8", "job 7")
    assert slurm.count("sbatch") == 0


def test_a_successor_chained_at_the_last_moment_is_seen(tmp_path: Path):
    run = submitted(tmp_path / "a", "7")

    def chains(args: Sequence[str]) -> str:
        if ids_of(args) == ["7"]:
            submitted(run.folder, "8", 2000.0)
        return row(ids_of(args)[0], "COMPLETED")

    stop, _ = run_monitor(RunTarget(run, ENV, Story(chains)), Story(chains), Clock())
    assert stop == Stop(Outcome.SUCCEEDED, "job 8 is COMPLETED")


def test_a_run_that_decided_to_stop_is_not_submitted_again(tmp_path: Path):
    run = submitted(tmp_path / "a", "7")
    started(run, "7.0", 1010.0, decision="stop after step 5: not again")
    slurm = Story(row("7", "FAILED", code=75 << 8))
    stop, _ = run_monitor(RunTarget(run, ENV, slurm), slurm, Clock())
    assert stop.reason == "job 7 ended as FAILED: its ranks decided so after step 5: not again"
    assert slurm.count("sbatch") == 0


def test_progress_of_a_run_is_counted_in_steps(tmp_path: Path):
    """Seconds alive do not count: the first life made steps, the second and third made none."""
    run = submitted(tmp_path / "a", "7")

    def trains(args: Sequence[str]) -> str:
        measured(run, *[2.0] * 5)
        return row("7", "RUNNING")

    dies: list[Answer] = [trains, row("7", "FAILED", used="9:00:00")]

    def squeue(args: Sequence[str]) -> Answer:
        jobs = ids_of(args)
        if jobs == ["7"] and len(dies) > 1:
            return dies.pop(0)
        return "".join(row(job, "FAILED", used="9:00:00") for job in jobs)

    slurm = Story(squeue)
    stop, _ = run_monitor(RunTarget(run, ENV, slurm), slurm, Clock())
    assert stop.reason == "job 9 ended as FAILED without progress, as the one before it"


def test_an_interrupt_ends_the_watching_and_not_the_job(script: Path):
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    slurm = Story(row("8", "RUNNING"))
    target = ScriptTarget(script, ENV, slurm)
    with pytest.raises(KeyboardInterrupt):
        monitor(target, limits=ResubmitLimits(), runner=slurm, sleep=interrupt)
    assert {args[0] for args in slurm.asked} == {"sbatch", "squeue"}

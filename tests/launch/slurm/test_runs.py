"""What run folders say, whole, half-written or forgotten by Slurm."""

import json
from pathlib import Path

import pytest

from tests.launch.slurm.folders import measured, started, submitted
from tests.tells import facts_pattern
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.environment.failure import Failure, FailureKind
from torchdistpackage.errors import ConfigError
from torchdistpackage.launch.slurm.query import JobInfo, Outcome
from torchdistpackage.launch.slurm.runs import (
    RunProgress,
    Status,
    attempt_results,
    find,
    find_runs,
    progress,
    read_run,
    restarts,
    single,
    status,
)

FAILED = Failure(2, "n2", 77, 1100.0, FailureKind.EXIT, 3)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs, one of them in a folder of a sweep, and folders that are none."""
    submitted(tmp_path / "gpt_tiny", "12", 1000.0)
    submitted(tmp_path / "gpt_tiny", "15", 3000.0)
    submitted(tmp_path / "gpt_large", "13", 2000.0)
    submitted(tmp_path / "sweep" / "lr_0.1", "14_0", 2500.0)
    (tmp_path / "local_run" / "logs").mkdir(parents=True)
    (tmp_path / "suspects.jsonl").write_text("")
    return tmp_path


def test_runs_are_found_by_their_submissions_latest_last(runs: Path):
    found = [(run.name, run.latest.job) for run in find_runs(runs)]
    assert found == [("gpt_large", "13"), ("lr_0.1", "14_0"), ("gpt_tiny", "15")]
    assert read_run(runs / "local_run") is None
    assert find_runs(runs / "nowhere") == []


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("gpt_tiny", ["gpt_tiny"]),
        ("15", ["gpt_tiny"]),
        ("12", ["gpt_tiny"]),
        ("14_0", ["lr_0.1"]),
        ("14", ["lr_0.1"]),
        ("lr_0.1", ["lr_0.1"]),
        ("sweep", ["lr_0.1"]),
        ("sweep/lr_0.1", ["lr_0.1"]),
    ],
)
def test_a_run_has_several_names(runs: Path, name: str, found: list[str]):
    assert [run.name for run in find(name, runs)] == found


def test_a_path_is_a_name(runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(runs)
    assert find("./gpt_large", Path("runs"))[0].latest.job == "13"
    assert find(str(runs / "sweep"), Path("elsewhere"))[0].name == "lr_0.1"


def test_an_unknown_name_is_answered_with_the_nearest(runs: Path):
    with pytest.raises(ConfigError, match=r"'gpt_tinny'; did you mean gpt_tiny"):
        find("gpt_tinny", runs)
    with pytest.raises(ConfigError, match=facts_pattern("'99'", "mean 15", "gpt_tiny")):
        find("99", runs)
    with pytest.raises(ConfigError, match="no run there was ever submitted"):
        find("x", runs / "local_run")


def test_one_run_is_asked_for_where_several_are_meant(runs: Path):
    with pytest.raises(ConfigError, match=r"3 runs are meant: .*gpt_large, .*; name one of them"):
        single(find_runs(runs))


def test_progress_is_the_last_row_that_is_whole(tmp_path: Path):
    run = submitted(tmp_path / "a", "1")
    assert progress(run.files) == RunProgress()
    measured(run, 3.5, 2.5, num_steps=40)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "loss": None, "val_loss": 2.0}) + "\n")
        file.write('{"step": 4, "lo')
    assert progress(run.files) == RunProgress(3, 40, 2.5)


def test_the_number_of_steps_is_read_from_the_file_that_we_write(tmp_path: Path):
    run = submitted(tmp_path / "a", "1")
    run.files.config.write_text(RunConfig.model_validate({"train": {"steps": 123}}).to_yaml())
    assert progress(run.files) == RunProgress(None, 123, None)


def test_how_each_start_ended(tmp_path: Path):
    run = submitted(tmp_path / "a", "7")
    first = started(run, "7.0", 1010.0, decision="requeue after step 5: the job ends in 60 s")
    second = started(run, "7.1", 1100.0, step=5, failures=(FAILED,))
    ends = attempt_results(run)
    assert [end.start for end in ends] == [first, second]
    assert str(ends[0].decision) == "requeue after step 5: the job ends in 60 s"
    assert (ends[1].decision, ends[1].failures) == (None, (FAILED,))
    run.files.decision("7.1").write_text("perhaps")
    assert attempt_results(run)[1].decision is None
    assert restarts(run, JobInfo("7")) == 1
    assert restarts(run, JobInfo("7", restarts=3)) == 3


def test_starts_of_earlier_submissions_are_no_restarts_of_this_one(tmp_path: Path):
    run = submitted(tmp_path / "a", "7", 1000.0)
    started(run, "7.0", 1010.0)
    started(run, "7.1", 1110.0)
    run = submitted(tmp_path / "a", "8", 2000.0)
    assert restarts(run, JobInfo("8")) == 0
    started(run, "8.0", 2010.0)
    assert restarts(run, JobInfo("8")) == 0
    assert len(attempt_results(run)) == 3


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (JobInfo("7", "PENDING", "Priority"), Status("PENDING", Outcome.ALIVE, "Priority")),
        (JobInfo("7", "CANCELLED", by="0"), Status("CANCELLED", Outcome.CANCELLED, "by uid 0")),
        (JobInfo("7", "FAILED", "NonZeroExitCode"), None),
    ],
)
def test_slurms_word_comes_first(tmp_path: Path, info: JobInfo, expected: Status | None):
    run = submitted(tmp_path / "a", "7")
    started(run, "7.0", 1010.0, decision="finished all 10 steps")
    expected = expected or Status("FAILED", Outcome.FAILED, "NonZeroExitCode")
    assert status(run, info, 5000.0) == expected


def test_a_run_that_slurm_forgot_tells_of_itself(tmp_path: Path):
    run, nothing = submitted(tmp_path / "a", "7", 1000.0), JobInfo("7")
    assert status(run, nothing, 1059.0).word == "submitted"
    assert status(run, nothing, 1059.0).outcome is Outcome.ALIVE
    unknown = status(run, nothing, 1061.0)
    assert (unknown.word, unknown.outcome) == ("unknown", Outcome.UNKNOWN)
    assert unknown.reason == "Slurm knows nothing of job 7 any more"
    started(run, "7.0", 1010.0, failures=(FAILED,))
    assert (status(run, nothing, 1061.0).word) == "failed"
    run.files.decision("7.0").write_text("stop after step 5: told so\n")
    stopped = Status("stopped", Outcome.FAILED, "after step 5: told so")
    assert status(run, nothing, 1061.0) == stopped
    run.files.decision("7.0").write_text("finished all steps\n")
    assert status(run, nothing, 1061.0) == Status("finished", Outcome.SUCCEEDED, "all steps")


def test_the_word_of_an_earlier_submission_is_not_taken_for_this_ones(tmp_path: Path):
    run = submitted(tmp_path / "a", "7", 1000.0)
    started(run, "7.0", 1010.0, decision="finished all steps")
    run = submitted(tmp_path / "a", "8", 2000.0)
    assert status(run, JobInfo("8"), 3000.0).word == "unknown"

"""The end of a job's log and its exit code, from the reports that ranks left."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchdistpackage.environment.failure import Failure, FailureKind, to_json
from torchdistpackage.launch.slurm.failure_report import (
    CANNOT_WRITE,
    keep,
    start_again,
    verdict,
)
from torchdistpackage.launch.slurm.node_blocklist import excluded, read, record_bad_node
from torchdistpackage.launch.slurm.run_dir import append_start, this_start
from torchdistpackage.run_files import RunDir

START = "7.1"
NOW = time.time()


def failed(rank: int, kind: FailureKind, code: int, error: str = "", after_s: float = 0) -> Failure:
    detail = f"Traceback\n{error}" if kind is FailureKind.ERROR else ""
    return Failure(rank, f"n{rank + 1}", 100 + rank, NOW + after_s, kind, code, error, detail)


def closed(rank: int, after_s: float = 0) -> Failure:
    return failed(rank, FailureKind.ERROR, 1, "RuntimeError: Connection closed by peer", after_s)


def of(tmp_path: Path, *failures: Failure, code: int = 143, num_ranks: int = 4) -> tuple[str, int]:
    files = RunDir(tmp_path / "run")
    files.failures(START).mkdir(parents=True)
    for failure in failures:
        (files.failures(START) / f"rank{failure.rank}.json").write_text(to_json(failure))
    return verdict(files.run, START, code, num_ranks)


RAISED = failed(2, FailureKind.ERROR, 3, "ValueError: no such sample", 0.5)


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (RAISED, 3),
        (failed(2, FailureKind.SIGNAL, -9, after_s=0.5), 137),
        (failed(2, FailureKind.SIGNAL, -11, after_s=0.5), 139),
        (failed(2, FailureKind.EXIT, 5, after_s=0.5), 5),
        (failed(2, FailureKind.EXIT, 256, after_s=0.5), 1),
    ],
)
def test_the_first_failing_rank_gives_the_code_and_the_last_block(tmp_path, first, code):
    """Not srun's own 143, and not the peers that were quicker to complain."""
    ended = failed(1, FailureKind.ENDED, -9, after_s=2)
    text, got = of(tmp_path, closed(0), first, closed(3, 0.1), ended)
    assert got == code
    lines = text.splitlines()
    assert lines[0].startswith("rank 2 of 4 failed: ")
    block = next(line for line in lines if line.startswith("--- "))
    assert block.startswith("--- rank 2 on host n3")
    assert "rank 1" not in text, "who was ended by its own watcher explains nothing"
    if first is RAISED:
        assert lines[-1] == "ValueError: no such sample"


def test_where_all_reports_are_consequences_the_silent_ranks_are_named(tmp_path):
    """As when a node is lost with its rank and the process that watched it."""
    files = RunDir(tmp_path / "run")
    env = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "SLURM_JOB_NODELIST": "n[1-4]"}
    append_start(files, this_start(files, env, 0))
    text, code = of(tmp_path, closed(0), closed(3), code=143)
    assert code == 143
    last = text.splitlines()[-1]
    assert (
        "no report from 2 of 4 ranks (1 on n2, 2 on n3; job on n[1-4])" in last
        and "code 143" in last
    )
    assert "Traceback" not in text


def test_the_report_of_a_hang_is_the_last_block_whoever_wrote_it(tmp_path):
    """Rank 0 wrote it, rank 2 is to blame, and what came after the alarm is how it ended."""
    report = "hang: rank 2 is in data loading\nwho waits for whom:\n  ..."
    hung = Failure(2, "n3", 102, NOW, FailureKind.HUNG, 1, "is in data loading", report)
    ended = [failed(rank, FailureKind.ENDED, 1, after_s=1) for rank in (1, 3)]
    killed = failed(2, FailureKind.SIGNAL, -9, after_s=2)
    files = RunDir(tmp_path / "run")
    files.failures(START).mkdir(parents=True)
    for rank, failure in enumerate([hung, ended[0], killed, ended[1]]):
        (files.failures(START) / f"rank{rank}.json").write_text(to_json(failure))
    text, code = verdict(files.run, START, 143, 4)
    assert code == 1 and text.endswith(f"(pid 102): hang: it is in data loading ---\n{report}")
    assert not files.suspects.exists(), "slow data is not the node's fault"


@pytest.mark.parametrize(
    ("last", "suspects"),
    [
        (None, ["n3"]),
        (closed(2, after_s=-3), ["n3"]),
        (failed(1, FailureKind.ENDED, 1, after_s=2), ["n3"]),
        (failed(2, FailureKind.ENDED, -9, after_s=2), []),
        (failed(2, FailureKind.ENDED, -9, after_s=-60), []),
        (failed(2, FailureKind.SIGNAL, -9, after_s=2), []),
    ],
    ids=["silent", "before", "elsewhere", "ended", "clock behind", "killed"],
)
def test_a_node_whose_watcher_reports_after_the_alarm_is_not_gone(tmp_path, last, suspects):
    hung = Failure(
        2, "n3", 102, NOW, FailureKind.HUNG, 1, "does not answer: no rank on n3 does", ""
    )
    files = RunDir(tmp_path / "run")
    files.failures(START).mkdir(parents=True)
    for name, failure in (("rank0", hung), ("rank2", last)):
        if failure is not None:
            (files.failures(START) / f"{name}.json").write_text(to_json(failure))
    verdict(files.run, START, 143, 4)
    assert [evidence.node for evidence in read(files.suspects)] == suspects


def test_a_report_of_a_rank_that_this_step_has_not_is_another_steps(tmp_path):
    text, code = of(tmp_path, failed(6, FailureKind.SIGNAL, -9, after_s=-60), RAISED)
    assert code == 3 and "rank 6" not in text


def test_without_any_report_sruns_code_stands_and_is_never_a_success(tmp_path):
    text, code = of(tmp_path, code=0, num_ranks=2)
    assert code == 1 and "no report from 2 of 2 ranks (0, 1)" in text


def test_all_ranks_that_blame_each_other_are_a_report_as_well(tmp_path):
    text, code = of(tmp_path, closed(0), closed(1, 1), num_ranks=2)
    assert code == 1 and text.splitlines()[0].startswith("rank 0 of 2 failed")


def test_the_batch_script_calls_it_as_a_program(tmp_path):
    files = RunDir(tmp_path)
    files.failures(START).mkdir(parents=True)
    (files.failures(START) / "rank2.json").write_text(to_json(RAISED))
    program = [sys.executable, "-m", "torchdistpackage.launch.slurm.failure_report"]
    done = subprocess.run(
        [*program, str(tmp_path), START, "143", "4"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3 and done.stdout.rstrip().endswith("ValueError: no such sample")
    wrong = subprocess.run([*program, "x"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "usage" in wrong.stderr


CHECKED = "LaunchError: the node check failed on rank 1 on n2, which is slow: 9 ms; leave out n2"


@pytest.mark.parametrize(("spare_nodes", "word"), [(0, "stop"), (1, "again")])
def test_a_node_that_the_check_named_is_left_out_if_the_job_has_another(
    tmp_path, spare_nodes, word
):
    """The ranks all say the same, and that rank is first which stands on the node."""
    files = RunDir(tmp_path / "run")
    env = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    record_bad_node(files, env, "n2", 1, "is slow: 9 ms")
    said = [failed(rank, FailureKind.ERROR, 1, CHECKED, rank / 10) for rank in (0, 2, 1)]
    text, code = of(tmp_path, *said, num_ranks=3)
    assert code == 1 and text.startswith("rank 1 of 3 failed: ")
    decided = start_again(files.run, START, 3, 2, 30.0, None, spare_nodes)
    assert decided.word == word
    assert files.decision(START).exists() is (word == "again")
    assert files.left_out(START).exists() is (word == "again")
    if word == "again":
        assert files.left_out(START).read_text() == "n2\n"
    else:
        assert decided.reason.endswith("to blame: rank 1: slow or wrong before the first step")
    assert excluded(files.suspects, NOW) == ("n2",), "of the next submission"


def test_a_run_folder_that_takes_nothing_is_named_with_a_code_of_its_own(tmp_path):
    """Not the code of srun's own killing of the ranks, as if these had never been started."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "job").write_text("in the way of every report")
    text, code = verdict(run, START, 143, 4)
    assert code == CANNOT_WRITE and f"{run} cannot be written: File exists" in text
    assert "metrics.jsonl has no row" in text
    (run / "metrics.jsonl").write_text('{"step": 7}\n')
    text, _ = verdict(run, START, 143, 4)
    assert "metrics.jsonl goes up to step 7" in text and "could train" not in text


def test_where_the_log_was_removed_the_reason_is_left_anew(tmp_path, capsys):
    for log, kept in ((tmp_path / "gone" / "main.log", True), (tmp_path / "there", False)):
        (tmp_path / "there").write_text("")
        keep(log, "--- rank 1 failed ---")
        assert (log.read_text() == "--- rank 1 failed ---\n") is kept

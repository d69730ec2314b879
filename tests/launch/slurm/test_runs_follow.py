"""Logs that grow while they are read, over several starts."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch.slurm.folders import submitted
from tests.launch.slurm.scripted import Scripted, ids_of, row
from torchdistpackage.errors import ConfigError, LaunchError
from torchdistpackage.launch.slurm.query import Outcome
from torchdistpackage.launch.slurm.runs import LogTail, Status, SubmittedRun, follow, rank_logs


@pytest.fixture
def run(tmp_path: Path) -> SubmittedRun:
    return submitted(tmp_path / "a", "7")


class Day:
    """A clock, and what happens when somebody sleeps: the next event of a list."""

    def __init__(self, *events) -> None:
        self.now_s, self.events = 5000.0, list(events)

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += 5.0
        if self.events:
            self.events.pop(0)()


def add(path: Path, text: str):
    def write() -> None:
        with path.open("a") as file:
            file.write(text)

    return write


def follow_main(run: SubmittedRun, slurm: Scripted, day: Day) -> tuple[Status, str]:
    parts: list[str] = []
    end = follow(
        run,
        lambda: [run.files.main_log],
        parts.append,
        runner=slurm,
        clock=day,
        sleep=day.sleep,
    )
    return end, "".join(parts)


def test_a_log_is_followed_through_a_requeue_to_the_end(run: SubmittedRun):
    answers = [row("7", s) for s in ("PENDING", "RUNNING", "COMPLETING", "PENDING", "RUNNING")]
    answers.append(row("7", "COMPLETED"))
    slurm = Scripted(squeue=lambda args: answers.pop(0))
    log = run.files.main_log
    day = Day(add(log, "one\n"), add(log, "tw"), add(log, "o\n"), add(log, "again\n"), add(log, ""))
    end, text = follow_main(run, slurm, day)
    assert (end.word, end.outcome) == ("COMPLETED", Outcome.SUCCEEDED)
    assert text == "one\ntwo\nagain\n"


def test_what_a_job_wrote_last_is_read_although_it_has_ended(run: SubmittedRun):
    def ends(args: Sequence[str]) -> str:
        add(run.files.main_log, "last words\n")()
        return row("7", "FAILED", code=256)

    end, text = follow_main(run, Scripted(squeue=ends), Day())
    assert (end.word, text) == ("FAILED", "last words\n")


def test_a_chained_job_is_followed_too(run: SubmittedRun):
    def chains(args: Sequence[str]) -> str:
        if ids_of(args) == ["7"]:
            submitted(run.folder, "8", 2000.0)
        return row(ids_of(args)[0], "COMPLETED")

    slurm = Scripted(squeue=chains)
    follow_main(run, slurm, Day())
    assert [ids_of(args) for args in slurm.asked if args[0] == "squeue"] == [["7"], ["8"]]


def test_a_controller_that_is_away_ends_nothing(run: SubmittedRun):
    answers: list = [LaunchError("no answer"), LaunchError("no answer"), row("7", "COMPLETED")]
    slurm = Scripted(squeue=lambda args: answers.pop(0))
    end, text = follow_main(run, slurm, Day(add(run.files.main_log, "x\n")))
    assert (end.outcome, text) == (Outcome.SUCCEEDED, "x\n")


def test_a_tail_reads_each_byte_once_also_of_a_file_that_begins_anew(tmp_path: Path):
    tail, path = LogTail(), tmp_path / "log"
    assert tail.read_new([path]) == ""
    path.write_text("abc\n")
    assert tail.read_new([path]) == "abc\n"
    assert tail.read_new([path]) == ""
    path.write_text("d\n")
    assert tail.read_new([path, tmp_path / "none"]) == "d\n"
    assert LogTail({path: 1}).read_new([path]) == "\n"


def test_a_character_that_is_written_in_parts_is_passed_on_whole(tmp_path: Path):
    one, other, tail = tmp_path / "a", tmp_path / "b", LogTail()
    snake, cut = "\N{SNAKE}".encode(), b"\xff"
    said = ""
    for byte in snake:
        with one.open("ab") as file:
            file.write(bytes([byte]))
        with other.open("ab") as file:
            file.write(b".")
        said += tail.read_new([one, other])
    assert said == "...\N{SNAKE}."
    one.write_bytes(snake[:2])  # a new file, and what is no character at all
    assert tail.read_new([one]) == ""
    one.write_bytes(snake[:2] + cut + b"x")
    assert tail.read_new([one]) == "\N{REPLACEMENT CHARACTER}" * 2 + "x"


def test_a_ranks_logs_are_those_of_all_its_starts_in_order(run: SubmittedRun):
    for name in ("rank1.restart10", "rank1.restart2", "rank1.restart0", "rank10.restart0"):
        (run.files.logs / f"{name}.log").write_text("")
    names = [path.name for path in rank_logs(run, 1)]
    assert names == ["rank1.restart0.log", "rank1.restart2.log", "rank1.restart10.log"]
    assert [path.name for path in rank_logs(run, 1, 2)] == ["rank1.restart2.log"]


def test_a_rank_without_a_log_is_answered_with_those_that_have_one(run: SubmittedRun):
    with pytest.raises(ConfigError, match=r"rank 4 has no log in .*; there is no log at all"):
        rank_logs(run, 4)
    (run.files.logs / "rank1.restart0.log").write_text("")
    with pytest.raises(ConfigError, match=r"of restart 3 in .*; there is rank1.restart0.log"):
        rank_logs(run, 1, 3)

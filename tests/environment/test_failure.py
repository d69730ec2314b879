"""Which rank is blamed: a table of what supervisors see, and the report made from it."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tells import tells
from torchdistpackage.environment.failure import (
    Failure,
    FailureKind,
    from_exception,
    is_secondary,
    note_stacks,
    only_returns,
    report,
    root_cause,
    summary,
    with_crash,
)
from torchdistpackage.errors import RankError


def error(rank: int, time_s: float, text: str) -> Failure:
    return Failure(rank, "n1", 10 + rank, time_s, FailureKind.ERROR, 1, text, f"Traceback\n{text}")


def killed(rank: int, time_s: float, signum: int, detail: str = "") -> Failure:
    return Failure(rank, "n1", 10 + rank, time_s, FailureKind.SIGNAL, -signum, "", detail)


def stopped(rank: int) -> Failure:
    return Failure(rank, "n1", 10 + rank, 99.0, FailureKind.STOPPED)


def left(rank: int, time_s: float, code: int) -> Failure:
    return Failure(rank, "n1", 10 + rank, time_s, FailureKind.EXIT, code)


GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3"
WAITED = "RuntimeError: Timed out waiting 30000ms for recv operation to complete"
STORE = "DistNetworkError: failed to recv, got 0 bytes. Broken pipe"
SAVING = "CheckpointError: saving step_2 failed on rank 1 on n1: OSError: timed out"
BITS = "CommError: step 2: 1 tensors of their groups differ in bits: a.b#step on rank 2; values"
NAN = "NonFiniteError: step 1: on rank 2, stage 0 the gradient of a.b is not finite"
NCCL = "DistBackendError: NCCL error: remote process exited or there was a network error"


def called(rank: int, number: int, shape: str) -> Failure:
    text = f"all_reduce over the data group of ranks (0, 1, 2, 3) failed (number {number}, "
    return error(rank, rank, f"CommError: {text}float32{shape}): {GLOO}")


@pytest.mark.parametrize(
    ("failures", "blamed"),
    [
        ([error(0, 1, "ValueError: x")], 0),
        ([error(0, 1, BITS), error(2, 2, BITS)], 2),
        ([error(0, 1, NAN), error(2, 2, NAN)], 2),
        ([called(0, 7, "[4]"), called(1, 7, "[4]"), called(2, 7, "[5]"), killed(3, 0, 6)], 2),
        ([called(0, 7, "[4]"), called(1, 7, "[4]"), called(2, 8, "[9]"), killed(3, 0, 6)], 2),
        ([called(0, 7, "[4]"), called(1, 7, "[4]"), called(2, 7, "[4]"), killed(3, 0, 6)], 3),
        ([error(0, 1, "ValueError: x"), error(1, 2, "KeyError: y")], 0),
        ([error(0, 2, "ValueError: x"), error(1, 1, "KeyError: y")], 1),
        ([error(0, 1, GLOO), error(1, 2, "KeyError: y")], 1),
        ([error(0, 1, SAVING), error(1, 2, SAVING)], 1),
        ([error(0, 1, STORE), error(1, 2, NCCL), error(2, 3, "OSError: disk full")], 2),
        ([error(0, 1, GLOO), error(1, 2, WAITED)], 0),
        ([error(0, 1, GLOO), killed(1, 2, signal.SIGKILL)], 1),
        ([error(0, 1, "ValueError: x"), killed(1, 2, signal.SIGKILL)], 1),
        ([error(0, 1, WAITED), stopped(1)], 1),
        ([stopped(1), killed(2, 100.0, signal.SIGSEGV)], 2),
        ([error(0, 1, GLOO), left(1, 2, 3)], 1),
        ([killed(0, 1, signal.SIGABRT, f"terminate called: {WAITED}"), error(1, 2, "E: z")], 1),
        ([killed(0, 1, signal.SIGABRT, "double free"), error(1, 2, GLOO)], 0),
    ],
)
def test_the_culprit_is_what_no_other_failure_explains(
    failures: list[Failure], blamed: int
) -> None:
    assert root_cause(failures).rank == blamed
    assert root_cause(failures[::-1]).rank == blamed


def test_the_report_ends_with_the_culprit_and_gives_the_others_a_line_each() -> None:
    text = report([error(2, 1.0, GLOO), error(1, 2.0, "ValueError: bad"), left(3, 3.0, 7)], 4)
    lines = text.splitlines()
    assert lines[0] == "rank 1 of 4 failed: exit code 1: ValueError: bad"
    assert lines[1] == f"rank 2 also failed: {GLOO}"
    assert lines[2] == "rank 3 then failed: exit code 7"
    assert lines[3] == "--- rank 1 on host n1 (pid 11): exit code 1: ValueError: bad ---"
    assert lines[4:] == ["Traceback", "ValueError: bad"]


def test_an_exception_keeps_its_traceback_cause_and_notes() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            inner.add_note("look here")
            raise ValueError("outer\nsecond line") from inner
    except ValueError as outer:
        failure = from_exception(3, outer)
    assert (failure.kind, failure.exit_code) == (FailureKind.ERROR, 1)
    assert failure.error == "ValueError: outer"
    assert failure.detail.endswith("ValueError: outer\nsecond line")
    assert "KeyError: 'inner'\nlook here" in failure.detail
    assert not is_secondary(failure)


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        (SystemExit(3), 3, ""),
        (SystemExit(-1), 255, ""),
        (SystemExit("no such file"), 1, "no such file"),
    ],
)
def test_sys_exit_is_an_exit_code_and_no_traceback(end: SystemExit, code: int, text: str) -> None:
    failure = from_exception(0, end)
    assert (failure.kind, failure.exit_code, failure.error) == (FailureKind.EXIT, code, text)
    assert failure.detail == ""


@pytest.mark.parametrize(("code", "raised"), [(0, RankError), (None, RankError), (3, SystemExit)])
def test_an_exit_without_a_code_is_an_error_of_a_rank(code: int | None, raised: type) -> None:
    """Only returning ends a rank well; the line that exited is named."""
    with pytest.raises(raised) as found, only_returns():
        sys.exit(code)
    failure = from_exception(0, found.value)
    shown = "" if code is None else code
    assert f'sys.exit({shown}) at "{__file__}", line ' in failure.error
    assert failure.exit_code == (code or 1) and not is_secondary(failure)
    with only_returns():
        pass


STACKS = """Fatal Python error: Aborted

Thread 0x00007fd53cff96c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Thread 0x00007fd568a7cb80 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in f
  File "/home/me/data.py", line 18 in extra
  File "/home/me/data.py", line 12 in timed_out

Extension modules: torch._C (total: 1)
"""


def test_a_rank_that_a_signal_killed_is_reported_with_its_line(tmp_path: Path) -> None:
    """As gloo aborts one that is sent too much, where only C could write its stacks."""
    stacks, place = tmp_path / "rank1@n1.stacks", 'at "/home/me/data.py", line 18, in extra'
    note_stacks(tmp_path / "failure1.json", stacks)
    plain = killed(1, 2.0, signal.SIGABRT, "its last output:\ndata size doesn't match")
    assert with_crash(plain, tmp_path / "failure1.json") == plain, "it has left none"
    stacks.write_text(STACKS)
    found = with_crash(plain, tmp_path / "failure1.json")
    assert summary(found) == f"killed by signal 6 (SIGABRT), {place}"
    assert found.detail.startswith(plain.detail) and "Extension" not in found.detail
    assert not is_secondary(found), "names in its stack are no words of gloo's"
    assert with_crash(plain, tmp_path / "failure2.json") == plain
    # the call too many may be another rank's
    trace = 'Traceback:\n  File "/home/me/other.py", line 7, in step\nRuntimeError: reset'
    other = replace(error(0, 3.0, "RuntimeError: connection reset by peer"), detail=trace)
    text = report([found, other], 2)
    assert text.startswith(f"rank 1 of 2 failed: killed by signal 6 (SIGABRT), {place}\n")
    assert '\n  at "/home/me/other.py", line 7, in step\n' in text


def test_of_three_ranks_the_one_in_another_call_is_named_and_not_the_one_that_gloo_aborted():
    """Rank 1 alone calls a collective; gloo aborts rank 0, which is sent too much."""

    def at(line: int) -> str:
        return f'  File "/home/me/net.py", line {line}, in step\n    call()'

    def lost(rank: int, line: int) -> Failure:
        return replace(error(rank, 2.0, GLOO), detail=f"Traceback\n{at(line)}\n{GLOO}")

    aborted = killed(0, 1.0, signal.SIGABRT, at(12))
    failures = [aborted, lost(1, 9), lost(2, 12)]
    assert root_cause(failures).rank == 1
    text = report(failures, 3)
    assert text.startswith("rank 1 of 3 failed: exit code 1: RuntimeError: ")
    assert tells(text, '"/home/me/net.py"', "line 9")
    assert 'at "/home/me/net.py", line 12, in step' in text
    # two ranks do not say which of them is in the wrong call, and an error of one's own comes first
    assert root_cause(failures[:2]) is aborted
    assert "compare the lines" in report(failures[:2], 2)
    assert root_cause([*failures, error(3, 3.0, "KeyError: y")]).rank in (0, 3)
    assert root_cause([aborted, lost(1, 12), lost(2, 12)]) is aborted
    assert root_cause([*failures, killed(3, 4.0, signal.SIGKILL)]).rank == 3

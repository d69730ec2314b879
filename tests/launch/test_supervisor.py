"""A watched rank: real forks that return, raise, are killed, told to end, or lose their peers."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from torchdistpackage.environment.failure import (
    Failure,
    FailureKind,
    from_json,
    read_failure_reports,
    to_json,
)
from torchdistpackage.launch.supervisor import noted_stopped

HOST = socket.gethostname()
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from torchdistpackage.launch.process import SignalFlag
from torchdistpackage.launch.supervisor import WatchedRank, supervise

folder = Path(sys.argv[1])
noted = SignalFlag()
noted.listen(["USR1", "TERM"])

def body():
{body}

logs = folder / "logs" / "rank.log"
place = WatchedRank({rank}, logs, folder / "failures", folder / "decision")
sys.exit(supervise(body, place, noted))
"""


def start(
    folder: Path, body: str, rank: int = 1, most_bytes: int = resource.RLIM_INFINITY
) -> subprocess.Popen[str]:
    """most_bytes: of any file that it writes."""
    code = PROGRAM.format(body=textwrap.indent(textwrap.dedent(body), "    "), rank=rank)
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes)),
    )


def run(folder: Path, body: str, rank: int = 1, **limits: int) -> tuple[int, str, str]:
    process = start(folder, body, rank, **limits)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def wait_for(path: Path) -> None:
    wait_until(path.exists, f"no {path}")


def wait_until(condition: Callable[[], object], what: str = "") -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def log(folder: Path) -> str:
    return (folder / "logs" / "rank.log").read_text()


def test_what_a_rank_says_is_in_its_log_and_rank_0_speaks_for_all(tmp_path):
    body = "print('hello'); print('trouble', file=sys.stderr); return 0"
    code, out, err = run(tmp_path / "one", body, rank=1)
    assert (code, out, err) == (0, "", "")
    assert log(tmp_path / "one") == "hello\ntrouble\n"
    code, out, err = run(tmp_path / "zero", body, rank=0)
    assert (code, out, err) == (0, "hello\ntrouble\n", "")
    assert log(tmp_path / "zero") == out
    assert not (tmp_path / "one" / "failures").exists()


def test_a_log_is_appended(tmp_path):
    for word in ("first", "second"):
        run(tmp_path, f"print({word!r}); return 0")
    assert log(tmp_path) == "first\nsecond\n"


def test_an_exception_is_reported_with_its_traceback(tmp_path):
    code, out, err = run(tmp_path, "raise ValueError('no such sample')")
    assert code == 1 and out == ""
    (failure,) = read_failure_reports(tmp_path / "failures")
    assert (failure.rank, failure.host, failure.kind) == (1, HOST, FailureKind.ERROR)
    assert failure.error == "ValueError: no such sample" and "Traceback" in failure.detail
    assert "supervisor.py" not in failure.detail, "frames before the rank's own tell nothing"
    assert f"rank 1 on {HOST}: exit code 1: ValueError: no such sample" in err
    assert "[rank 1] ValueError: no such sample" in err.splitlines()
    assert log(tmp_path).rstrip().endswith("ValueError: no such sample")


def test_of_a_consequence_the_main_log_gets_one_line(tmp_path):
    code, _, err = run(tmp_path, "raise RuntimeError('Connection closed by peer')")
    assert code == 1
    assert err.splitlines() == [
        f"rank 1 on {HOST}: exit code 1: RuntimeError: Connection closed by peer"
    ]


@pytest.mark.parametrize(
    ("end", "code", "kind", "own"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, FailureKind.SIGNAL, -9),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, FailureKind.SIGNAL, -11),
        ("os._exit(5)", 5, FailureKind.EXIT, 5),
        ("sys.exit(7)", 7, FailureKind.EXIT, 7),
    ],
)
def test_what_a_rank_cannot_say_its_watcher_does(tmp_path, end, code, kind, own):
    got, _, err = run(tmp_path, f"print('last words'); {end}")
    assert got == code
    (failure,) = read_failure_reports(tmp_path / "failures")
    assert (failure.kind, failure.exit_code) == (kind, own)
    if "sys.exit" not in end:
        assert "last words" in failure.detail and "[rank 1] last words" in err


@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)"])
def test_a_rank_that_ends_before_its_function_returned_has_failed(tmp_path, end):
    """Whatever its exit code: nothing was trained to the end."""
    code, _, err = run(tmp_path, end)
    assert code == 1
    (failure,) = read_failure_reports(tmp_path / "failures")
    assert failure.kind is FailureKind.EXIT and "before its function returned" in failure.error
    assert "before its function returned" in err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_return_leaves_its_last_words_in_a_file(tmp_path, rank):
    """As the thread that watches for hangs does; the rank in it is the one to blame."""
    hung = Failure(
        3, "n4", 7, time.time(), FailureKind.HUNG, 1, "is in data loading", "who waits: ..."
    )
    (tmp_path / "failures").mkdir()
    words = f"Path(os.environ['TDP_FAILURE']).write_text({to_json(hung)!r})"
    code, _, err = run(tmp_path, f"{words}; os._exit(1)", rank=rank)
    assert code == 1 and read_failure_reports(tmp_path / "failures") == [hung]
    assert err.splitlines() == [
        "rank 3 on n4: hang: it is in data loading",
        "[rank 3] who waits: ...",
    ]


def test_a_full_disk_under_the_log_does_not_end_the_rank(tmp_path):
    code, out, _ = run(tmp_path, "print('x' * 100_000); return 0", rank=0, most_bytes=1000)
    assert code == 0 and len(out) == 100_001
    assert len(log(tmp_path)) == 1000


@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_a_log_that_somebody_else_has_planted_is_not_written(tmp_path, planted):
    (tmp_path / "logs").mkdir()
    (tmp_path / "mine").write_text("dear")
    place = tmp_path / "logs" / "rank.log"
    place.symlink_to(tmp_path / "mine") if planted == "link" else os.mkfifo(place)
    code, _, err = run(tmp_path, "print('x'); return 0")
    assert code == 1 and f"rank 1 cannot write its log {place}" in err
    assert (tmp_path / "mine").read_text() == "dear"


def test_where_no_report_can_be_written_the_code_is_right_all_the_same(tmp_path):
    (tmp_path / "failures").write_text("a file where the folder should be")
    code, _, err = run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert code == 137 and "cannot be written" in err and "SIGKILL" in err


def test_a_report_of_an_earlier_step_is_no_reason_to_end(tmp_path):
    (tmp_path / "failures").mkdir()
    old = Failure(7, "n7", 1, time.time(), FailureKind.ERROR, 1, "ValueError: x", "Traceback")
    report = tmp_path / "failures" / "rank7.json"
    report.write_text(to_json(old))
    os.utime(report, (time.time() - 60, time.time() - 60))
    process = start(
        tmp_path,
        """
        (folder / "ready").touch()
        while not noted.received:
            time.sleep(0.02)
        time.sleep(4)  # as a save takes
        return 0
        """,
    )
    wait_for(tmp_path / "ready")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_report_of_a_peer_that_was_quicker_is_one(tmp_path):
    """It failed before this watcher had even started."""
    (tmp_path / "failures").mkdir()
    peer = Failure(3, "n3", 1, time.time(), FailureKind.ERROR, 1, "ValueError: x", "Traceback")
    (tmp_path / "failures" / "rank3.json").write_text(to_json(peer))
    process = start(tmp_path, "(folder / 'ready').touch(); time.sleep(600)")
    wait_for(tmp_path / "ready")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 137


def test_signals_reach_the_rank_and_only_leave_a_note(tmp_path):
    process = start(
        tmp_path,
        """
        (folder / "ready").touch()
        while not noted.received:
            time.sleep(0.02)
        print(noted.received)
        return 0
        """,
    )
    wait_for(tmp_path / "ready")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=60)
    assert process.returncode == 0 and log(tmp_path) == "SIGUSR1\n"


def test_a_signal_while_the_rank_still_imports_is_not_lost(tmp_path):
    """The handlers are there before the fork: no moment at which a signal would kill."""
    process = start(
        tmp_path,
        """
        (folder / "ready").touch()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)  # as an import takes
        print(noted.received)
        return 0
        """,
    )
    process.communicate(timeout=60)
    assert process.returncode == 0 and log(tmp_path) == "SIGTERM\n"


def test_a_rank_whose_peer_failed_is_ended_when_the_launcher_says_so(tmp_path):
    """As srun does with --kill-on-bad-exit; the rank itself hangs and takes SIGTERM for a note."""
    process = start(tmp_path, "(folder / 'ready').touch(); time.sleep(600)")
    wait_for(tmp_path / "ready")
    peer = Failure(3, "n3", 1, time.time(), FailureKind.ERROR, 1, "ValueError: x", "Traceback")
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures" / "rank3.json").write_text(to_json(peer))
    time.sleep(0.6)
    assert process.poll() is None, "before it is told, it is the launcher's affair"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert process.returncode == 137 and "because another rank failed" in err
    own, culprit = read_failure_reports(tmp_path / "failures")
    assert (own.rank, own.kind) == (1, FailureKind.ENDED) and culprit.rank == 3


def test_a_rank_that_waits_for_one_that_has_ended_is_ended_when_told_so(tmp_path):
    """Rank 0 decides not to train, and srun tells the others to end."""
    process = start(tmp_path, "(folder / 'ready').touch(); time.sleep(600)")
    wait_for(tmp_path / "ready")
    (tmp_path / "decision").write_text("stop not started again")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 137


def test_a_rank_does_not_outlive_its_watcher(tmp_path):
    process = start(tmp_path, "(folder / 'pid').write_text(str(os.getpid())); time.sleep(600)")
    wait_for(tmp_path / "pid")
    time.sleep(0.1)
    pid = int((tmp_path / "pid").read_text())
    process.kill()
    process.communicate()
    end = time.monotonic() + 10
    while (
        Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    ):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_watcher_notes_that_its_rank_is_stopped_for_as_long_as_it_is(tmp_path):
    process = start(
        tmp_path,
        """
        (folder / "ready").write_text(str(os.getpid()))
        while not (folder / "go").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0
        """,
    )
    wait_for(tmp_path / "ready")
    pid, report = int((tmp_path / "ready").read_text()), tmp_path / "failures" / "rank1.json"
    for _ in range(2):
        os.kill(pid, signal.SIGSTOP)
        wait_for(report.with_suffix(".stopped"))
        assert noted_stopped(report) == "T" and read_failure_reports(report.parent) == []
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: not noted_stopped(report))
    (tmp_path / "go").touch()
    wait_until(lambda: noted_stopped(report))
    os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == 137 and noted_stopped(report) == "", (
        "a rank that is gone is not stopped"
    )


def test_a_process_with_threads_forks_no_rank(tmp_path):
    code = textwrap.dedent(
        """
        import sys, threading, time
        from pathlib import Path
        from torchdistpackage.errors import LaunchError
        from torchdistpackage.launch.process import SignalFlag
        from torchdistpackage.launch.supervisor import WatchedRank, supervise
        threading.Thread(target=time.sleep, args=(1,), name="sleeper").start()
        try:
            supervise(lambda: 0, WatchedRank(0, Path("x.log"), Path("f")), SignalFlag())
        except LaunchError as error:
            print(error)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "2 threads" in done.stdout and "sleeper" in done.stdout


def test_reports_survive_the_way_through_a_file_and_torn_ones_are_left_out(tmp_path):
    failure = Failure(2, "n1", 7, 1.5, FailureKind.STOPPED, None, "e", "d")
    assert from_json(to_json(failure)) == failure
    (tmp_path / "rank2.json").write_text(to_json(failure))
    (tmp_path / "rank3.json").write_text(to_json(failure)[:-5])
    (tmp_path / "rank4.json").write_text(json.dumps({"kind": "signal"}))
    assert read_failure_reports(tmp_path) == [failure]
    assert read_failure_reports(tmp_path / "none") == []

"""Real ranks: they return, fail, get killed or stopped, and never survive."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tests.tells import facts_pattern, tells
from torchdistpackage.environment.failure import Failure, FailureKind, to_json
from torchdistpackage.errors import CommError, LaunchError, RankError
from torchdistpackage.launch.fork_server_client import ForkServer
from torchdistpackage.launch.workers import run_local

# The ranks import this file, and with it pytest: once in the server is quicker than in each.
PRELOAD = ("pytest",)
ROOT = Path(__file__).resolve().parents[2]


def rank() -> int:
    return int(os.environ["RANK"])


def note_pid(folder: Path) -> None:
    (folder / f"{os.getpid()}.pid").touch()


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def pids(folder: Path, num: int) -> list[int]:
    """The pids noted in `folder`, once there are `num`."""
    end = time.monotonic() + 20
    while len(found := [int(path.stem) for path in folder.glob("*.pid")]) < num:
        assert time.monotonic() < end, f"{len(found)} of {num} processes came"
        time.sleep(0.02)
    return found


def assert_gone(found: list[int], within_s: float = 5) -> None:
    end = time.monotonic() + within_s
    while alive := [pid for pid in found if is_alive(pid)]:
        assert time.monotonic() < end, f"{alive} of {found} survive"
        time.sleep(0.02)


def wait_for_peer_that_leaves() -> None:
    """Ranks 0 and 1 connect; rank 0 then waits for a message that never comes."""
    path = os.environ["TDP_STORE"] + ".sock"
    if rank() == 0:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            with listener.accept()[0] as peer:
                peer.settimeout(0.5)
                if not peer.recv(1):
                    raise ConnectionError("Connection closed by peer")
    while True:
        try:
            peer = socket.socket(socket.AF_UNIX)
            peer.connect(path)
            break
        except OSError:
            peer.close()
            time.sleep(0.01)
    globals()["kept"] = peer


def tell(value: object) -> tuple[object, ...]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "EXTRA")
    store = Path(os.environ["TDP_STORE"])
    assert store.parent.stat().st_mode & 0o777 == 0o700
    assert not store.exists()
    return (value, *(os.environ[name] for name in names))


def test_results_come_back_by_rank() -> None:
    results = run_local(
        tell, ({"a": 1},), num_procs=3, env={"EXTRA": "x", "RANK": "7"}, preload=PRELOAD
    )
    assert results == [({"a": 1}, str(r), "3", str(r), "3", "127.0.0.1", "x") for r in range(3)]


def fail_in_rank_1(folder: Path) -> None:
    note_pid(folder)
    pids(folder, 3)  # else the launcher may end a rank that has not come this far
    if rank() < 2:
        wait_for_peer_that_leaves()
        raise ValueError("the tensor is not square")
    time.sleep(60)


def test_an_exception_ends_all_ranks_and_is_told_apart_from_its_consequences(
    tmp_path: Path,
) -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_local(fail_in_rank_1, (tmp_path,), num_procs=3, preload=PRELOAD)
    assert time.monotonic() - start < 10
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 of 3 failed: exit code 1: ValueError: the tensor is not square"
    assert tells(lines, "rank 0", "ConnectionError")
    assert f"--- rank 1 on host {socket.gethostname()} (pid " in str(caught.value)
    assert lines[-1] == "ValueError: the tensor is not square"
    first = lines[lines.index("Traceback (most recent call last):") + 1]
    assert first.endswith("in fail_in_rank_1"), "the launcher's own frames say nothing"
    assert_gone(pids(tmp_path, 3), 0)


def return_in_rank_1() -> None:
    if rank() != 1:
        time.sleep(0.3)
        raise ConnectionError("Connection closed by peer")


def test_a_rank_that_returned_while_its_peers_waited_is_the_culprit() -> None:
    with pytest.raises(RankError, match=r"^rank 1 of 3 failed: exit code 0") as caught:
        run_local(return_in_rank_1, num_procs=3, preload=PRELOAD)
    # "also" where the peer was seen to fail before rank 1's end was.
    assert re.search("rank 0 (then|also) failed: .*ConnectionError", str(caught.value))


def signal_in_rank_1(folder: Path, signum: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note_pid(folder)
    print(f"rank {rank()} was here")
    pids(folder, 3)
    if rank() < 2:
        wait_for_peer_that_leaves()
        os.kill(os.getpid(), signum)
    time.sleep(60)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("signum", "how", "consequence"),
    [
        (signal.SIGKILL, r"killed by signal 9 \(SIGKILL\)", "Connection closed by peer"),
        (signal.SIGSTOP, r"stopped \(process state T\)", "timed out"),
        (signal.SIGSEGV, r"killed by signal 11 \(SIGSEGV\)", "Connection closed by peer"),
    ],
)
def test_a_killed_or_stopped_rank_is_the_culprit(
    tmp_path: Path, signum: int, how: str, consequence: str
) -> None:
    """Its peer notices first and raises; rank 2 ignores SIGTERM and needs SIGKILL."""
    start = time.monotonic()
    with pytest.raises(RankError, match=f"^rank 1 of 3 failed: {how}") as caught:
        run_local(signal_in_rank_1, (tmp_path, signum), num_procs=3, grace_s=0.3, preload=PRELOAD)
    assert time.monotonic() - start < 10
    assert consequence in str(caught.value).splitlines()[1]
    assert str(caught.value).endswith("rank 1 was here"), "the end of its output explains most"
    assert_gone(pids(tmp_path, 3), 0)


def leave(code: object) -> None:
    sys.exit(code if rank() == 1 else 0)  # type: ignore[arg-type]


def test_sys_exit_counts_by_its_code() -> None:
    assert run_local(leave, (0,), num_procs=2, preload=PRELOAD) == [None, None]
    with pytest.raises(RankError, match=facts_pattern("rank 1", "2 failed", "code 3")) as caught:
        run_local(leave, (3,), num_procs=2, preload=PRELOAD)
    assert "Traceback" not in str(caught.value)


def vanish() -> None:
    os._exit(0)


def return_a_lock() -> object:
    return threading.Lock()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("target", "text"),
    [
        (vanish, "ended before its function returned"),
        (return_a_lock, "cannot pickle"),
        ("torchdistpackage.errors:nothing", "no function 'nothing'"),
        ("no_such_module:f", "No module named 'no_such_module'"),
    ],
)
def test_ranks_without_a_result_are_failures(target: object, text: str) -> None:
    with pytest.raises(RankError, match=text):
        run_local(target, num_procs=1, preload=PRELOAD)  # type: ignore[arg-type]


def talk() -> None:
    print(f"to stdout from {rank()}")
    os.system("echo from a child of the rank")
    print("no end of line", end="", file=sys.stderr)


def test_output_of_ranks_goes_to_logs_that_are_kept(tmp_path: Path) -> None:
    heard: list[tuple[int, str]] = []
    for _ in range(2):
        run_local(
            talk,
            num_procs=2,
            log_dir=tmp_path / "logs",
            env={"TDP_RESTART": "4"},
            preload=PRELOAD,
            on_line=lambda rank, line: heard.append((rank, line)),
        )
    once = "to stdout from 1\nfrom a child of the rank\nno end of line"
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["rank1.restart4.log"]
    assert (tmp_path / "logs" / "rank1.restart4.log").read_text() == once * 2
    assert heard == [(1, line) for line in once.splitlines()] * 2


def leave_a_process_behind(folder: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    child.returncode = 0  # or its finaliser would warn that it still runs
    (folder / f"{child.pid}.pid").touch()


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    run_local(leave_a_process_behind, (tmp_path,), num_procs=2, preload=PRELOAD)
    assert_gone(pids(tmp_path, 2))


SCRIPT = """
import os, signal, subprocess, sys, time
from pathlib import Path
from torchdistpackage.launch.workers import run_local

class Box:
    def __init__(self, value):
        self.value = value

def rank_main(box, folder):
    print("rank", os.environ["RANK"], "tty", sys.stdout.isatty(), "name", __name__)
    return Box(box.value + int(os.environ["RANK"]))

def wait(folder):
    def on_signal(signum, frame):
        (folder / f"rank{os.environ['RANK']}.signal{signum}").touch()
        time.sleep(0.2)
        sys.exit(0)
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    child = subprocess.Popen(["sleep", "60"])
    for pid in (os.getpid(), child.pid, os.getppid()):
        (folder / f"{pid}.pid").touch()
    time.sleep(60)

def main():
    folder = Path(sys.argv[1])
    if sys.argv[2] == "box":
        print([box.value for box in run_local(rank_main, (Box(10), folder), num_procs=2)])
    else:
        run_local(wait, (folder,), num_procs=2)
"""
GUARD = '\nif __name__ == "__main__":\n    main()\n'


def start_script(folder: Path, mode: str, end: str = GUARD, **kwargs: object) -> subprocess.Popen:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT) + end)
    command = [sys.executable, str(script), str(folder), mode]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        text=True,
        # in the background of a shell SIGINT is ignored, which processes inherit
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **kwargs,
    )


def test_a_function_of_the_main_script_runs_and_its_terminal_stays_one(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    with start_script(tmp_path, "box", stdout=slave) as process:
        assert process.wait(timeout=30) == 0
    os.close(slave)
    text = os.read(master, 10000).decode().replace("\r", "")
    os.close(master)
    assert text == "rank 0 tty True name __tdp_main__\n[10, 11]\n"


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    with start_script(tmp_path, "box", "\nmain()\n", stderr=subprocess.PIPE) as process:
        _, text = process.communicate(timeout=30)
    assert process.returncode == 1
    assert 'put the part that starts them under `if __name__ == "__main__":`' in text


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nobody_survives_the_caller(tmp_path: Path, signum: int) -> None:
    """Two ranks, a child of each, and the server; a soft signal is passed on, once."""
    with start_script(tmp_path, "wait", stderr=subprocess.DEVNULL) as process:
        found = pids(tmp_path, 5)
        process.send_signal(signum)
        assert process.wait(timeout=60) == -signum
    assert_gone(found, 5)
    assert not list(tmp_path.glob("tdp-*")), "the folder to meet in goes with them"
    passed_on = sorted(path.name for path in tmp_path.glob("*.signal*"))
    soft = [] if signum == signal.SIGKILL else [f"rank{r}.signal{int(signum)}" for r in range(2)]
    assert passed_on == soft


def sleep_long(folder: Path) -> None:
    note_pid(folder)
    if rank() == 1:
        pids(folder, 2)
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def test_ranks_die_with_their_server(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="fork server ended with exit code -9"):
        run_local(sleep_long, (tmp_path,), num_procs=2, preload=PRELOAD)
    assert_gone(pids(tmp_path, 2))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "import threading, time\n"
            "threading.Thread(target=time.sleep, args=(60,), name='ticker', daemon=True).start()",
            r"importing 'preloaded' started 1 thread\(s\) .*'ticker'",
        ),
        ("import not_there", "(?s)preloading 'preloaded' failed.*No module named 'not_there'"),
    ],
)
def test_a_server_that_cannot_fork_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, text: str
) -> None:
    (tmp_path / "preloaded.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LaunchError, match=text):
        run_local("os:getpid", num_procs=1, preload=("preloaded",))


def test_a_run_has_at_least_one_process() -> None:
    with pytest.raises(LaunchError, match="num_procs is 0"):
        run_local("os:getpid", num_procs=0)


def wait_a_moment() -> None:
    time.sleep(0.05)
    sys.exit(5)


def test_a_server_forks_and_reports_ends() -> None:
    with ForkServer(PRELOAD) as server:
        start = time.monotonic()
        children = [server.spawn(wait_a_moment) for _ in range(8)]
        print(f"{(time.monotonic() - start) / 8 * 1e3:.1f} ms a fork, server start included")
        end = start + 20
        while any(child.exit is None for child in children) and time.monotonic() < end:
            server.reap()
            time.sleep(0.01)
        assert [child.exit and child.exit.exit_code for child in children] == [5] * 8
    server.close()


def told_of_a_hang_and_raises() -> None:
    """Rank 0 has written the report of a hang, and then meets the end of a peer."""
    if rank() == 0:
        hung = Failure(1, socket.gethostname(), 7, time.time(), FailureKind.HUNG, 1, "sleeps")
        Path(os.environ["TDP_FAILURE"]).write_text(to_json(hung))
    raise CommError("receive from rank 1 failed: Connection closed by peer")


def test_the_report_of_a_hang_outlives_what_is_raised_after_it():
    with pytest.raises(RankError, match=facts_pattern("rank 1", "2 failed")):
        run_local(told_of_a_hang_and_raises, num_procs=2)


def test_a_server_that_has_forked_nothing_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As where somebody gives up while it imports."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(8)\n")
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer(["slow"])
    folder = server.folder
    start_s = time.monotonic()
    server.close()
    assert time.monotonic() - start_s < 4
    assert not folder.exists()

"""One holder at a time, whoever was killed before, on one machine and on several."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from torchdistpackage.errors import HeldError, LaunchError
from torchdistpackage.launch.lock import (
    STALE_S,
    LockHolder,
    from_json,
    hold,
    holder_of,
    take,
    take_away,
    this_process,
    to_json,
)
from torchdistpackage.launch.slurm.query import CompletedCommand

NO_FLOCK = """
import fcntl
def refuse(*args): raise OSError(37, "No locks available")
fcntl.flock = refuse
"""
HOLD = """
import sys, time
from pathlib import Path
from torchdistpackage.launch import lock
lock.HEARTBEAT_S = 0.1
with lock.hold(Path(sys.argv[1]), "the run x"):
    print("held", flush=True)
    time.sleep(60)
"""
CONTEND = """
import sys
from pathlib import Path
from torchdistpackage.errors import HeldError
from torchdistpackage.launch import lock
print("ready", flush=True)
for go in iter(sys.stdin.readline, ""):
    try:
        with lock.hold(Path(sys.argv[1]), "the run x"):
            print("held", flush=True)
            sys.stdin.readline()
    except HeldError:
        print("refused", flush=True)
        sys.stdin.readline()
    print("done", flush=True)
"""


def python(program: str, *args: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, args)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@contextlib.contextmanager
def holder(path: Path, before: str = ""):
    process = python(before + HOLD, path)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n", process.communicate()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(params=["flock", "no flock"])
def before(request, monkeypatch) -> str:
    """What a holder runs first: on some shared file systems no process has flock."""
    if request.param == "flock":
        return ""

    def refuse(*args):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    return NO_FLOCK


def test_a_second_one_is_told_who_holds_it_and_gets_it_once_that_one_was_killed(tmp_path, before):
    path = tmp_path / "new" / ".x.running"
    with holder(path, before) as process:
        with pytest.raises(HeldError) as caught:
            take(path, "the run x")
        text = str(caught.value)
        assert f"process {process.pid}" in text and f"kill {process.pid}" in text
        assert socket.gethostname() in text
        assert (held := holder_of(path)) is not None and held.flocked is (before == "")
        began_s = time.monotonic()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert path.exists() and holder_of(path) is None
        with hold(path, "the run x"):
            assert time.monotonic() - began_s < 2
            assert (held := holder_of(path)) is not None and held.pid == os.getpid()
    assert list(path.parent.iterdir()) == [], "the folder was another's to make"


def test_only_what_was_made_for_the_lock_goes_with_it(tmp_path):
    own = tmp_path / "made" / "by hand"
    own.mkdir(parents=True)
    for path in (own / ".x.lock", own / "a" / "b" / ".x.lock"):
        with hold(path, "a submission of x"):
            with pytest.raises(HeldError, match="a submission of x is under way elsewhere"):
                take(path, "a submission of x")
            assert [p.name for p in path.parent.iterdir()] == [".x.lock"]
        assert list(own.iterdir()) == [] and own.is_dir()


def test_a_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"\.x\.lock cannot be made: File exists"):
        take(tmp_path / "file" / ".x.lock", "a submission of x")


# What other machines have left


def left(path: Path, age_s: float = 0.0, **changes) -> LockHolder:
    """A lock file as a process of another machine writes it."""
    here = this_process("the run x", {})
    found = replace(here, host="n9", boot="another", pid=7, token="theirs", **changes)
    path.write_text(to_json(found))
    then = time.time() - age_s
    os.utime(path, (then, then))
    return found


def test_a_holder_elsewhere_is_believed_while_its_heart_beats(tmp_path):
    path = tmp_path / ".x.running"
    left(path, STALE_S - 10)
    with pytest.raises(HeldError, match=rf"on n9 .* last heartbeat 5\d s ago.* {STALE_S:.0f} s"):
        take(path, "the run x")
    left(path, STALE_S + 10)
    take(path, "the run x").release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{}", '{"token": 1}', "[" * 100_000, "\0\0\0"])
def test_a_file_that_says_nothing_is_believed_as_long(tmp_path, text):
    path = tmp_path / ".x.running"
    path.write_text(text)
    with pytest.raises(HeldError):
        take(path, "the run x")
    then = time.time() - STALE_S - 1
    os.utime(path, (then, then))
    take(path, "the run x").release()


def test_what_is_no_record_of_ours_reaches_no_command():
    good = asdict(this_process("x", {}))
    assert from_json(json.dumps(good)) is not None
    for bad in ({"job": "1;x"}, {"step": "-t all"}, {"pid": True}, {"pid": "7"}, {"more": 1}):
        assert from_json(json.dumps({**good, **bad})) is None


def slurm(state: str, steps: str = ""):
    """squeue and sacct as a real one answers of job 12."""

    def runner(args, env=None):
        if args[0] == "sacct":
            return CompletedCommand(1, "", "Slurm accounting storage is disabled")
        if "-s" in args:
            return CompletedCommand(0, steps)
        if not state:
            return CompletedCommand(1, "", "slurm_load_jobs error: Invalid job id specified")
        return CompletedCommand(0, f"12|{state}|0|0|0:10|n9|None|\n")

    return runner


def away(args, env=None):
    raise LaunchError("there is no squeue here")


IN_JOB = {"job": "12", "step": "0"}


@pytest.mark.parametrize(
    ("runner", "age_s", "gone"),
    [
        (slurm("COMPLETED"), 0, True),
        (slurm("NODE_FAIL"), 0, True),
        (slurm("RUNNING"), 10_000, False),  # stopped, or its file system is away
        (slurm("PENDING"), 10_000, False),  # it comes back
        (slurm(""), 0, False),  # another cluster may know it
        (slurm(""), 10_000, True),
        (away, 0, False),
        (away, 10_000, True),
    ],
)
def test_slurm_knows_of_a_job_before_its_heartbeats_tell(tmp_path, runner, age_s, gone):
    path = tmp_path / ".x.running"
    left(path, age_s, **IN_JOB)
    with contextlib.ExitStack() as stack:
        if not gone:
            stack.enter_context(pytest.raises(HeldError, match=r"job 12\.0 of Slurm.*`scancel 12`"))
        take(path, "the run x", {}, runner).release()


def test_a_process_beside_its_job_may_outlive_it(tmp_path):
    path = tmp_path / ".x.running"
    left(path, 0, job="12")
    with pytest.raises(HeldError):
        take(path, "the run x", {}, slurm("COMPLETED"))


STEP = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "1"}


@pytest.mark.parametrize(
    ("env", "record", "runner", "gone"),
    [
        ({**STEP, "SLURM_RESTART_COUNT": "1"}, {}, away, True),
        ({**STEP, "TDP_BATCH": "1"}, {"batch": True}, away, True),
        ({**STEP, "TDP_BATCH": "1"}, {"batch": True, "step": "2"}, away, False),
        ({**STEP, "TDP_BATCH": "1"}, {"batch": True, "restart": 1}, away, False),
        (STEP, {}, slurm("RUNNING", "12.1\n12.extern\n"), True),
        (STEP, {}, slurm("RUNNING", "12.0\n12.1\n"), False),  # two sruns side by side
        (STEP, {}, away, False),
        ({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"},
         {"job": "", "step": "", "elastic": "a"}, away, True),
        ({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"},
         {"job": "", "step": "", "elastic": "b"}, away, False),
    ],
)  # fmt: skip
def test_who_was_started_again_succeeds_at_once(tmp_path, env, record, runner, gone):
    path = tmp_path / ".x.running"
    left(path, 0, **{**IN_JOB, **record})
    with contextlib.ExitStack() as stack:
        if not gone:
            stack.enter_context(pytest.raises(HeldError))
        take(path, "the run x", env, runner).release()


# Several at once, and locks that were lost


@pytest.mark.parametrize(("times", "num"), [(1, 4), pytest.param(20, 6, marks=pytest.mark.full)])
def test_of_many_that_find_a_dead_one_one_succeeds(tmp_path, times, num):
    path = tmp_path / ".x.running"
    contenders = [python(CONTEND, path) for _ in range(num)]

    def said() -> list[str]:
        return sorted(p.stdout.readline() for p in contenders if p.stdout is not None)

    def tell() -> None:
        for process in contenders:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    try:
        assert said() == ["ready\n"] * num
        for _ in range(times):
            left(path, 10_000)
            tell()
            assert said() == ["held\n"] + ["refused\n"] * (num - 1)
            tell()
            assert said() == ["done\n"] * num
            assert list(tmp_path.iterdir()) == []
    finally:
        for process in contenders:
            process.kill()
            process.communicate()


def test_the_file_of_one_who_was_faster_is_neither_waited_for_nor_removed(tmp_path):
    path = tmp_path / ".x.running"
    dead = left(path, 10_000)
    path.unlink()
    with hold(path, "the run x"):
        assert take_away(path, dead, by_force=False)
        assert path.exists()


def test_who_has_lost_its_lock_ends_and_leaves_the_others(tmp_path):
    path = tmp_path / ".x.running"
    with holder(path) as process:
        path.unlink()
        end_s = time.monotonic() + 10
        while holder_of(path) is None and time.monotonic() < end_s:
            time.sleep(0.05)
        assert (held := holder_of(path)) is not None and held.pid == process.pid, "made anew"
        path.unlink()
        left(path)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1 and "on n9" in err
    assert "theirs" in path.read_text()


def test_a_fork_that_outlives_the_holder_is_no_obstacle(tmp_path):
    path = tmp_path / ".x.running"
    program = HOLD.replace("time.sleep(60)", "import os\n    os.fork()\n    time.sleep(60)")
    with holder(path, "import warnings; warnings.simplefilter('ignore')\n" + program) as process:
        time.sleep(0.2)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        process.kill()
        process.wait()
        began_s = time.monotonic()
        try:
            take(path, "the run x").release()
            assert time.monotonic() - began_s < 2
        finally:
            for child in children:
                os.kill(int(child), signal.SIGKILL)

"""Real ranks that hang without a supervisor: who is named, when, and that all are gone.

All cases run at the same time: what is measured is waiting. A case is started once, and several
tests may look at what it left.
"""

import contextlib
import faulthandler
import os
import re
import signal
import tempfile
import time
import timeit
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.harness.hanging import AXES, FAULTS
from tests.processes import survivors
from torchdistpackage.environment.failure import FailureKind, read_failure_reports, root_cause
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.hang import dump
from torchdistpackage.harness.hang.dump import Nearby
from torchdistpackage.harness.hang.shutdown import Shutdown
from torchdistpackage.harness.hang.stacks import FOREIGN
from torchdistpackage.harness.watchdog import HangWatchdog, Heartbeat, StepClock, agree_on_start
from torchdistpackage.launch.fork_server_client import ForkedChild, ForkServer
from torchdistpackage.launch.slurm.node_blocklist import incident_of

TIMEOUT_S = 2.5
FULL = ("several", "all", "exits", "raw", "lingering", "left", "shape")
"""Cases of the same bodies that the small set does without."""
ALONE = "alone"
LOOPS = ("well", "paced")
PAIRS = (*LOOPS, "raw", "first", "hooked")


@dataclass
class Case:
    """What one case left behind."""

    folder: Path
    children: list[ForkedChild] = field(default_factory=list)

    @property
    def report(self) -> str:
        (path,) = self.folder.glob("hang.*.txt")
        assert path.stat().st_mode & 0o077 == 0, "for the user's eyes"
        return path.read_text()

    @property
    def wrong_s(self) -> float:
        """When the step began that went wrong."""
        return min(float(path.read_text()) for path in self.folder.glob("wrong*"))

    @property
    def errors(self) -> str:
        return "".join(p.read_text(errors="replace") for p in self.folder.glob("err*"))


class Cases:
    """Starts each case that is asked for, all of the selection at once."""

    def __init__(self, server: ForkServer, folder: Path, names: list[str]) -> None:
        self._server = server
        self.cases = {name: self._start(name, folder / name) for name in names}

    def _start(self, name: str, folder: Path) -> Case:
        folder.mkdir()
        case, num = Case(folder), 2 if name in PAIRS else 4 if name in AXES else 3
        for rank in range(num):
            env = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(num), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(num), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
                "TDP_STORE": str(folder / "store"), "TDP_TEST_MARK": str(folder),
            }  # fmt: skip
            with (folder / f"err{rank}").open("wb") as err:
                main = name if name in LOOPS else "rank_main"
                target = f"tests.harness.hanging:{'alone_on_its_host' if name == ALONE else main}"
                args = (name, str(folder), TIMEOUT_S)
                case.children.append(self._server.spawn(target, args, env=env, stderr=err))
        return case

    def reap(self) -> None:
        self._server.reap()

    def ended(self, name: str) -> Case:
        """The case, when all its processes are gone."""
        case, end_s = self.cases[name], time.monotonic() + 60
        while any(child.exit is None for child in case.children):
            self._server.reap()
            assert time.monotonic() < end_s, f"{name}: not gone\n{case.errors}"
            time.sleep(0.05)
        return case


@pytest.fixture(scope="module")
def cases(request, tmp_path_factory) -> Generator[Cases]:
    chosen = {item.callspec.params.get("name") for item in request.session.items
              if item.path == request.path and hasattr(item, "callspec")}  # fmt: skip
    names = [name for name in (*FAULTS, *LOOPS) if name in chosen]
    with ForkServer(["torch", "torch.distributed", "tests.harness.hanging"]) as server:
        yield Cases(server, tmp_path_factory.mktemp("watch"), names)


DATA = "the data group of ranks"
# name -> what the first line says, and what stands in one line each further down
EXPECTED: dict[str, tuple[str, list[str]]] = {
    "loading": (
        r"rank 1 \(data 1 on .*\) is in data loading while 2 other ranks wait for it",
        [rf"data 0 on .* waits in all_reduce number \d+ of {DATA} 0, 1, 2; data 1 on .*, which has "
         r"issued \d+, is in data loading: .*hanging.py\", line \d+, in load_for_ever",
         rf"rank 0: all_reduce number \d+, {DATA} 0, 1, 2, float32\[2, 3\], for",
         "so does rank 2", r"line \d+, in load_for_ever"],
    ),
    "computing": (
        r"rank 2 \(data 1 tensor 0 on .*\) is in its forward pass while 3 other ranks wait for it",
        [rf"data 0 tensor 0 on .* waits in all_reduce number 3 of {DATA} 0, 2; data 1 tensor 0",
         r"in compute_for_ever", r"data [01] tensor 1 on .* waits in all_reduce number"],
    ),
    "attention": (
        r"rank 3 \(data 1 context 1 on .*\) is in its forward pass while 3 other ranks wait for it",
        [r"data 1 context 0 on .* waits in send .* to rank 3; its receiver data 1 context 1",
         r"in attend_for_ever"],
    ),
    "stopped": (
        r"rank 0 \(data 0 on .*\) is stopped \(process state T, process \d+\)",
        [rf"rank 1: all_reduce number \d+, {DATA} 0, 1, 2, float32\[2, 3\]", "so does rank 2"],
    ),
    "killed": (
        r"rank 0 \(data 0 on .*\) is gone: its process \(\d+\) has ended without a word",
        [r"then ranks (1, 2|2, 1) raised",
         r"CommError: all_reduce over the data group of ranks \(0, 1, 2\) failed"],
    ),
    "several": (
        r"rank 1 \(data 0 tensor 1 on .*\) is gone",
        [r"rank 0 \(data 0 tensor 0 on .*\) is stopped"],
    ),
    "all": (
        r"rank 0 \(data 0 on .*\) and ranks 1, 2 are in data loading, in a step that has taken "
        r"\d s: which of them delays the others is not known",
        [r"ranks 1, 2:", "in load_for_ever"],
    ),
    "first": (
        r"rank 1 \(data 1 on .*\) is in data loading while 1 other rank waits for it",
        [rf"and may take {TIMEOUT_S:g} s"],
    ),
    "raw": (
        r"rank 1 \(data 1 on .*\) is in data loading, in a step that has taken \d s",
        ["rank 0:", "in all_reduce"],
    ),
    "exits": (r"rank 1 \(data 1 on .*\) left its loop by sys\.exit\(3\)", ["ranks? (2, )?0"]),
    "raised": (
        r"rank 1 \(data 1 on .*\) raised ValueError: this rank was told to fail",
        ["Traceback", r"line \d+, in fail"],
    ),
    "lingering": (
        r"rank 1 \(data 1 on .*\) raised ValueError: this rank was told to fail",
        [r"line \d+, in fail", rf"rank 0: all_reduce number \d+, {DATA} 0, 1, 2, float32\[2, 3\]"],
    ),
    "held": (
        r"rank 0 \(data 0 on .*\) does not answer: it is alive .* a call into C holds it",
        [r"line \d+ in hold_the_interpreter", "so does rank 2"],
    ),
    "left": (
        r"rank 1 \(data 1 on .*\) has ended its loop after 2 steps, and the others have not",
        [rf"rank 0: all_reduce number \d+, {DATA} 0, 1, 2", r"in rank_main"],
    ),
    "circle": (
        r"rank 0 .* and rank 1 .* wait in a circle: rank 0 waits in receive number 1 from rank 1",
        [r"rank 2: receive number 1 from rank 0, .* of ranks 0, 1, 2, float32\[5\], for",
         "in receive_from_the_next"],
    ),
    "operation": (
        r"rank 0 .* and rank 1 .* do not agree on collective number \d+ of the data group of ranks "
        r"0, 1, 2: all_gather float32\[7\] \(rank 0\) against all_reduce float32\[2, 3\] "
        r"\(ranks 1, 2\)",
        ["in do_something_else"],
    ),
    "hooked": (
        r"rank 1 \(data 1 on .*\) is in data loading, in a step that has taken \d s",
        ["in _engine_run_backward", f"{FOREIGN}:", "in load_for_ever", "in all_reduce",
         "on the devices:",
         "all_reduce number 41 of ranks 0, 1: started on rank 0, scheduled on rank 1"],
    ),
    "shape": (
        r"rank \d .* (is gone: .* crashed|raised|do not agree on collective number \d+)",
        [r"all_reduce"],
    ),
}  # fmt: skip


every_case = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.full] if n in FULL else []) for n in FAULTS if n != ALONE],
)


@pytest.mark.few(1)
@every_case
def test_the_culprit_is_named_in_time_and_all_processes_are_gone(cases: Cases, name: str):
    case = cases.ended(name)
    first, *rest = case.report.splitlines()
    begins, lines = EXPECTED[name]
    assert re.match("hang: " + begins, first), case.report
    for line in lines:
        assert any(re.search(line, text) for text in rest), f"{line}\n{case.report}"
    ends = [child.exit for child in case.children]
    assert all(end is not None and end.exit_code != 0 for end in ends), ends
    took_s = max(end.time_s for end in ends if end is not None) - case.wrong_s
    assert took_s < TIMEOUT_S + 15, f"{took_s:.1f} s"
    assert survivors(f"TDP_TEST_MARK={case.folder}") == []
    assert first in case.errors, "the same text, where the run speaks"


@pytest.mark.parametrize("name", [ALONE])
def test_who_stops_alone_on_its_host_is_named_by_what_its_watcher_noted(cases: Cases, name: str):
    case, end_s = cases.cases[name], time.monotonic() + 60
    while any(child.exit is None for child in case.children[1:]):
        cases.reap()
        assert time.monotonic() < end_s, case.errors
        time.sleep(0.05)
    case.children[0].signal(signal.SIGTERM)  # as srun does when the others are gone
    cases.ended(name)
    head = case.report.splitlines()[0]
    assert re.match(r"hang: rank 0 \(data 0 on host0\) is stopped \(process state T", head), head
    first = root_cause(read_failure_reports(case.folder / "failures"))
    assert (first.rank, first.host, first.kind) == (0, "host0", FailureKind.HUNG)
    assert incident_of(first, "1", time.time()) is None
    assert survivors(f"TDP_TEST_MARK={case.folder}") == []


@pytest.mark.parametrize("name", ["well"])
def test_a_loop_that_ends_well_is_left_alone_and_leaves_nothing(cases: Cases, name: str):
    """A long first step, and what is said to be slow, are no hang."""
    case = cases.ended(name)
    assert [child.exit and child.exit.exit_code for child in case.children] == [0, 0], case.errors
    assert list(case.folder.glob("hang*")) == []


@pytest.mark.full
@pytest.mark.parametrize("name", ["paced"])
def test_a_suspended_job_is_not_hung(cases: Cases, name: str):
    """Steps are short, so each rank has made a mark just before it was suspended."""
    case, end_s = cases.cases[name], time.monotonic() + 60
    while not (case.folder / "begun").exists():
        assert time.monotonic() < end_s, case.errors
        time.sleep(0.02)
    for signum, pause_s in ((signal.SIGSTOP, 8.0), (signal.SIGCONT, 0.0)):
        for child in case.children:
            os.kill(child.pid, signum)
        time.sleep(pause_s)
    (case.folder / "suspended").touch()
    cases.ended(name)
    assert [child.exit and child.exit.exit_code for child in case.children] == [0, 0], case.errors


def in_folders_of_their_own(folder: str) -> str:
    rank = dist.get_rank()
    try:
        agree_on_start(Path(folder, str(rank)), rank=rank, world_size=2)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_see_one_folder_are_refused_at_the_start(ranks, tmp_path):
    """Each would report in the first hang that the other has never come."""
    for text in ranks(2).run(in_folders_of_their_own, str(tmp_path)):
        assert re.search(rf"rank 1 on \S+ at {re.escape(str(tmp_path))}/1; name one folder", text)
        assert f"{tmp_path}/0 makes is not seen by" in text
    assert list(tmp_path.glob("*/hang*")) == []


def test_one_rank_of_a_host_looks_at_the_shared_folder_and_all_hear_of_an_alarm(
    tmp_path, monkeypatch
):
    """Eight ranks; then one more, on another host, raises the alarm."""
    opened, ended = Counter[str](), list[float]()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("torchdistpackage.harness.watchdog.LOOK_S", 0.4)
    monkeypatch.setattr(Shutdown, "report", lambda *_: None)
    monkeypatch.setattr(Shutdown, "end", lambda *_: ended.append(time.monotonic()))
    plain = dump._is_marked
    monkeypatch.setattr(dump, "_is_marked", lambda x: opened.update([x.name]) or plain(x))

    with contextlib.ExitStack() as stack:
        watches = [
            HangWatchdog(tmp_path / "run", rank=rank, world_size=9, start="1", c_stacks=False)
            for rank in range(8)
        ]
        for each in watches:
            stack.enter_context(each)
        time.sleep(1.6)
        assert 2 <= opened["alarm"] <= 2 * 1.6 / 0.4, "each of 8 would have looked 4 times"
        raised_s = time.monotonic()
        dump.Folder(tmp_path / "run", "1").raise_alarm()
        for each in watches:
            each._thread.join(5)
    assert len(ended) == 8 and max(ended) - raised_s < 0.4 + 1.0, "on a machine that is busy"
    (own,) = tmp_path.glob("tdp-*")
    assert own.stat().st_mode & 0o077 == 0 and list(own.iterdir()) == []


def test_who_looked_for_the_others_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, second = (Nearby(tmp_path / "run", 0.2) for _ in range(2))
    assert (first.is_due(), second.is_due()) == (True, False)
    time.sleep(0.25)
    assert (second.is_due(), first.is_due()) == (True, False)
    (own,) = tmp_path.iterdir()
    own.chmod(0o777)
    third = Nearby(tmp_path / "run", 0.2)
    third.raise_alarm()
    assert (third.is_due(), third.is_due(), third.has_alarm) == (True, True, False), "not its own"


def test_a_report_is_never_readable_by_others(tmp_path, monkeypatch):
    modes, plain = list[int](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: modes.append(os.fstat(fd).st_mode) or plain(fd))
    before = os.umask(0)
    try:
        folder = dump.Folder(tmp_path, "1")
        folder.make()
        folder.write_report("stacks")
    finally:
        os.umask(before)
    assert [mode & 0o777 for mode in modes[:1]] == [0o600]
    assert folder.report.stat().st_mode & 0o777 == 0o600


def test_a_mark_costs_less_than_5_us():
    marks = Heartbeat()
    each_s = min(timeit.repeat(marks.step, number=10_000, repeat=5)) / 10_000
    assert each_s < 5e-6, f"{each_s * 1e6:.2f} us"


def test_the_clock_leaves_out_what_the_job_was_suspended(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr("torchdistpackage.harness.watchdog._now_s", lambda: now_s[0])
    marks = Heartbeat()
    clock = StepClock(marks)
    for passed_s in (1.0, 1.0, 3600.0, 1.0):
        now_s[0] += passed_s
        over_s = clock.over_s()
    assert over_s == 3.0, "an hour of scontrol suspend is not a step of an hour"
    marks.step()
    now_s[0] += 0.5
    assert clock.over_s() == 0.5
    marks.step()
    now_s[0] += 3600.0
    assert clock.over_s() == 0.0, "the mark fell between the last look and the suspension"
    now_s[0] += 2.0
    assert clock.over_s() == 2.0


def test_what_follows_every_step_is_held_to_the_limit_of_a_step_once_it_was_short(
    tmp_path, monkeypatch
):
    """A rank stopped in a local copy was found only after the limit of a save, ten minutes."""
    now_s = [100.0]
    monkeypatch.setattr("torchdistpackage.harness.watchdog._now_s", lambda: now_s[0])
    watch = HangWatchdog(tmp_path, rank=0, world_size=1, start="1", timeout_s=8.0)
    watch.step()
    watch.step()

    def limit_s(name: str, takes_s: float) -> float:
        with watch.allow_repeated(name):
            now_s[0] += takes_s
            assert watch._clock.over_s() == takes_s, "the step before does not count"
            limit_s = watch._limit_s
        assert watch._clock.over_s() == 0.0
        return limit_s

    assert [limit_s("short", 1.0) for _ in range(3)] == [600.0, 8.0, 8.0]
    assert [limit_s("long", takes_s) for takes_s in (3.0, 1.0, 1.0)] == [600.0] * 3


@pytest.mark.parametrize(
    ("timeout_s", "first_s", "held_s"), [(120, 600, 60), (120, 20, 10), (2, 9, 3)]
)
def test_the_timer_waits_as_long_as_a_report_lets_it(
    tmp_path, monkeypatch, timeout_s, first_s, held_s
):
    """It reads frames that may run: where a busy machine halts a rank for seconds, it can crash."""
    asked: list[float] = []
    timer = "dump_traceback_later"
    monkeypatch.setattr(faulthandler, timer, lambda timeout, file: asked.append(timeout))
    limits = {"timeout_s": timeout_s, "first_timeout_s": first_s}
    with HangWatchdog(tmp_path, rank=0, world_size=1, start="a", **limits):
        pass
    assert set(asked) == {held_s}

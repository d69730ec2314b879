"""A thread in each rank that notices a hang, says who is to blame, and ends the run.

Out of band. Ranks talk through files in a folder that all of them see, never through
what may be stuck: no collective, no store. For a rank that cannot run Python any more speak the C
side of faulthandler and the other ranks of its host.
"""

import contextlib
import math
import os
import re
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, dropwhile
from pathlib import Path
from typing import Any, Self

from torchdistpackage.comm import primitives
from torchdistpackage.comm.flight_recorder import has_nccl_trace, nccl_trace, recorder
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.environment.failure import from_exception, is_secondary, note_stacks, to_json
from torchdistpackage.environment.network import interface_trouble
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.errors import ConfigError
from torchdistpackage.files import appears
from torchdistpackage.harness.hang import flights
from torchdistpackage.harness.hang.dump import Dump, Folder, Nearby, Process, State
from torchdistpackage.harness.hang.shutdown import Shutdown, end_s
from torchdistpackage.harness.hang.stacks import FOREIGN, HELD_S, CStacks
from torchdistpackage.launch.slurm.run_dir import attempt_id
from torchdistpackage.text import SHOWN_RANKS
from torchdistpackage.topology.mesh import Topology

LOOK_S = 1.0
"""Seconds within which every rank sees an alarm in the folder."""
PEEKS = 4
"""Looks per LOOK_S at what this host's cache has, which cost the shared file system nothing."""
FLIGHTS_S = 2.0
"""Limit in seconds for the dump of NCCL's flight recorder."""
_UNSEEN_S = 15.0
"""Seconds after which a rank that does not see the folder of rank 0 counts as without it."""
_FRAMES = 64
_CALLERS = re.compile(r".*(<frozen runpy>|/torchdistpackage/launch/)")
"""Frames that come before the user's in every stack and explain nothing."""
_TIMES_SHORT = 4.0
"""Part of the limit of a step that what is repeated after each may take, to be held to it."""
_SUSPENDED_S = 5.0
"""A watch that did not run for so long was suspended with its job, which is not a hang."""

_now_s = time.monotonic


def watch(
    folder: str | Path,
    *,
    timeout_s: float = 120.0,
    slow_timeout_s: float | None = None,
    first_timeout_s: float | None = None,
) -> "HangWatchdog":
    """Watch over a loop of your own; all ranks call it, after `setup_distributed()`.

        with watch("runs/a", timeout_s=120) as w:
            for batch in data:
                w.step()
                ...

    folder: seen by all ranks. A step that takes longer than `timeout_s`, the first one longer
    than `first_timeout_s`, is a hang: within 15 s more `hang.<start>.txt` is there and on stderr,
    and all processes are gone. All ranks enter `allow_slow()` together.

    Raises:
        ConfigError: a limit is not above 0, or the ranks do not see one folder.
        LaunchError: the environment does not say which rank this is.
        CommError: there are several ranks, and no default process group.
        OSError: the folder cannot be written.
    """
    rendezvous = detect(os.environ)
    rank, topology = (tpc.rank, tpc.topology) if tpc.is_set else (rendezvous.rank, None)
    world_size = rendezvous.world_size if topology is None else topology.world_size
    return HangWatchdog(
        folder,
        rank=rank,
        world_size=world_size,
        topology=topology,
        timeout_s=timeout_s,
        slow_timeout_s=slow_timeout_s,
        first_timeout_s=first_timeout_s,
        start=agree_on_start(folder, rank=rank, world_size=world_size),
    )


def agree_on_start(folder: str | Path, *, rank: int, world_size: int) -> str:
    """Return a name for the start that begins now, the same on all ranks and never used before.

    Collective. The files of that name are in `folder` afterwards.

    Raises:
        ConfigError: some ranks do not see the folder of rank 0; raised on all.
        OSError: rank 0 cannot write there.
    """
    now_s, us = divmod(time.time_ns() // 1000, 10**6)
    when = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_s))
    start, parent = f"{attempt_id(os.environ)}.{when}.{us:06}", Path(folder).absolute()
    if rank == 0:
        Folder(parent, start).make()
    if world_size == 1:
        return start
    start = str(primitives.broadcast_object(start))
    files = Folder(parent, start)
    # a new name, which no file system remembers as absent; still some show it seconds later
    own_view = (appears(files.path, _UNSEEN_S), f"{socket.gethostname()} at {parent}")
    problem = primitives.reduce_objects(own_view, _blind_ranks)
    if problem:  # each would report, in the first hang, that the others have never come
        if rank == 0:
            shutil.rmtree(files.path, ignore_errors=True)
        raise ConfigError(str(problem))
    return start


def _blind_ranks(views: list[Any]) -> str:
    """Return what to say of ranks that do not see rank 0's folder; views: by rank whether it does,
    and where it looked."""
    blind = [f"rank {rank} on {where}" for rank, (sees, where) in enumerate(views) if not sees]
    if not blind:
        return ""
    many = f", ... ({len(blind)} ranks)" if len(blind) > SHOWN_RANKS else ""
    return (
        f"watch: what rank 0 on {views[0][1]} makes is not seen by "
        f"{', '.join(blind[:SHOWN_RANKS])}{many}; name one folder, on a file system that all hosts "
        f"share"
    )


class Heartbeat:
    """The progress of a loop: `step()` at the beginning of each step, `with allow_slow():` around
    what may take longer, `beat()` in what takes long but goes on. A mark is an assignment; a watch
    reads it when it likes."""

    def __init__(self) -> None:
        self.num_steps = self.num_beats = 0
        self.num_slow = 0
        self.since_s = _now_s()
        self._short_s = math.inf
        """Longest time for which `allow_repeated` counts as short."""
        self._longest_s: dict[str, float] = {}

    def step(self) -> None:
        """Begin a step, which ends the one before."""
        self.num_steps += 1
        self.since_s = _now_s()

    def beat(self) -> None:
        """Restart the time limit, because what runs now makes progress."""
        self.num_beats += 1
        self.since_s = _now_s()

    @contextmanager
    def allow_slow(self) -> Iterator[None]:
        """Allow a longer time for a step inside the block, as for a validation or a save."""
        self.num_slow += 1
        self.since_s = _now_s()
        try:
            yield
        finally:
            self.num_slow -= 1
            self.since_s = _now_s()

    slow = allow_slow

    @contextmanager
    def allow_repeated(self, name: str) -> Iterator[None]:
        """Allow the block the time of one step, if every earlier block of this `name` was short,
        and that of `allow_slow` otherwise.

        For what comes after every step: a rank that stops there is found as soon as in a step.
        """
        if self._longest_s.get(name, math.inf) < self._short_s:
            self.beat()
            yield
            self.beat()
            return
        with self.allow_slow():
            began_s = self.since_s
            yield
            took_s = _now_s() - began_s
        self._longest_s[name] = max(took_s, self._longest_s.get(name, 0.0))


class StepClock:
    """A clock of the step under way; it is read often, and leaves out times of suspension."""

    def __init__(self, marks: Heartbeat) -> None:
        self._marks, self._lost_s = marks, 0.0
        self._mark_s = self._last_s = marks.since_s

    def over_s(self) -> float:
        now_s = _now_s()
        gap_s, self._last_s = now_s - self._last_s, now_s
        if self._marks.since_s != self._mark_s:
            # the mark may have come in the gap, just before the suspension
            self._mark_s = self._marks.since_s
            self._lost_s = min(gap_s, now_s - self._mark_s) if gap_s > _SUSPENDED_S else 0.0
        elif gap_s > _SUSPENDED_S:
            self._lost_s += gap_s
        return now_s - self._mark_s - self._lost_s


class HangWatchdog(Heartbeat):
    """`with` it around the loop; see `watch`.

    topology: gives ranks their coordinates. slow_timeout_s: for what `allow_slow()`
    holds; first_timeout_s: for the first step; both 10 times timeout_s, and 10 minutes at least.
    start: names the files; see `agree_on_start`. failure: a file where a supervisor looks for the
    failure of this rank (default: $TDP_FAILURE); without one the report goes to stderr.
    c_stacks: use faulthandler, also its one timer; False for code that calls dump_traceback_later
    itself.

    Raises:
        ConfigError: a limit is not above 0.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        rank: int,
        world_size: int,
        start: str,
        topology: Topology | None = None,
        timeout_s: float = 120.0,
        slow_timeout_s: float | None = None,
        first_timeout_s: float | None = None,
        failure: str | Path | None = None,
        c_stacks: bool = True,
    ) -> None:
        super().__init__()
        long_s = max(10 * timeout_s, 600.0)
        self.world_size, self.timeout_s = world_size, timeout_s
        self._short_s = timeout_s / _TIMES_SHORT
        self.slow_timeout_s = long_s if slow_timeout_s is None else slow_timeout_s
        self.first_timeout_s = long_s if first_timeout_s is None else first_timeout_s
        self.start_timeout_s = 3 * self.slow_timeout_s
        for name in ("timeout_s", "slow_timeout_s", "first_timeout_s"):
            if (limit_s := getattr(self, name)) <= 0:
                raise ConfigError(f"watch: {name} is {limit_s:g}; give it more than 0 seconds")
        self._folder = Folder(Path(folder).absolute(), start)
        failure = failure or os.environ.get("TDP_FAILURE")
        path = Path(failure) if failure else None
        self._ending = Shutdown(self._folder, rank, world_size, topology, path)
        report_path = str(path) if path else None
        self._dump = Dump(rank, State.HERE, Process.mine(), time.time(), failure=report_path)
        self._clock = StepClock(self)
        self._peek_s = min(LOOK_S, timeout_s / 4, self.first_timeout_s / 4) / PEEKS
        self._nearby = Nearby(self._folder.path, (PEEKS - 1) * self._peek_s)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._loop_thread: int | None = None
        # the timer's thread reads frames without the interpreter's lock, so those that run can
        # crash the rank: it must not go off where a busy machine halts a rank for seconds, but
        # before the peers' report
        held_s = max(HELD_S, min(timeout_s, self.first_timeout_s) / 2)
        self._c_stacks = CStacks(enabled=c_stacks, held_s=held_s)
        # the loop and the watching thread both write this rank's file
        self._writing = threading.Lock()
        self._alarm, self._reported = threading.Event(), threading.Event()

    @property
    def call_timeout_s(self) -> float:
        """Limit for single collectives and messages that leaves the first word to the report."""
        return max(self.slow_timeout_s, self.first_timeout_s) + 60.0

    @property
    def report(self) -> Path:
        """Return the path of the report."""
        return self._folder.report

    # -- around the loop ---------------------------------------------------------------

    def __enter__(self) -> Self:
        self._c_stacks.open(self._folder.open(self._dump))
        if self._dump.failure is not None:
            note_stacks(Path(self._dump.failure), self._folder.stacks_of(self._dump))
        self._loop_thread = threading.get_ident()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if os.getpid() != self._dump.process.pid:
            return  # a fork of the rank, which ends by itself
        self._c_stacks.close()
        if error is None or (isinstance(error, SystemExit) and not error.code):
            with contextlib.suppress(OSError):
                self._write(state=State.LEFT)
                self._nearby.leave()
                self._folder.remove_if_all_left(self.world_size)
            return
        failure = from_exception(self._dump.rank, error)
        with contextlib.suppress(OSError):
            self._write(state=State.RAISED, error=to_json(failure))
        if is_secondary(failure) and self._dump.failure is None:
            # a peer is gone, and there is no supervisor that reports which one and why
            self._alarm.set()
        if self._alarm.is_set():
            # the thread prints the report; this rank must not exit before it did
            self._reported.wait(end_s(self.world_size) + LOOK_S)

    # -- the thread --------------------------------------------------------------------

    def _run(self) -> None:
        peeks = count()
        # not a sleep: an alarm or the end of the run ends it at once
        while not self._alarm.wait(self._peek_s):
            if looks := next(peeks) % PEEKS == 0:
                self._c_stacks.arm()
            # a slow or failing file system must not end the run
            with contextlib.suppress(OSError):
                if self._is_hung():
                    self._alarm.set()
                elif (
                    looks and self._dump.state is not State.HERE and not self._folder.path.exists()
                ):
                    return  # all have ended well
        alarm_s, diagnosis = time.time(), None
        try:
            self._nearby.raise_alarm()
            with contextlib.suppress(OSError):
                self._folder.raise_alarm()
            with contextlib.suppress(OSError):
                more = has_nccl_trace()
                self._write(answering=True, more=more)
                if more:
                    self._write(more=False, flights=_flights())
                diagnosis = self._ending.report(alarm_s)
        finally:  # whatever goes wrong in the report, the run must not go on hanging
            self._ending.end(self._dump, diagnosis, self._reported)

    def _is_hung(self) -> bool:
        over_s, begun = self._clock.over_s(), self.num_steps or self.num_slow or self.num_beats
        if self._dump.state is State.HERE and begun and over_s > self._limit_s:
            return True
        return self._nearby.has_alarm or (self._nearby.is_due() and self._folder.has_alarm)

    @property
    def _limit_s(self) -> float:
        """Return the time limit of what the loop does now."""
        if self.num_slow:
            # before the first step models are read and compiled
            return self.slow_timeout_s if self.num_steps else self.start_timeout_s
        return self.timeout_s if self.num_steps > 1 else self.first_timeout_s

    # -- what this rank says -----------------------------------------------------------

    def _write(self, *, answering: bool = False, **changes: Any) -> None:
        """Write this rank's file again, with what it does now."""
        with self._writing:
            dump = replace(self._dump, **changes)
            if answering:
                dump = replace(dump, reports=True)
                if dump.state is State.HERE:
                    dump = replace(dump, state=State.DUMPED)
            neighbours = self._folder.read_host(dump.process.host)
            letters = {rank: other.process.state() for rank, other in neighbours.items()}
            self._dump = replace(
                dump,
                time_s=time.time(),
                step=self.num_steps,
                over_s=self._clock.over_s(),
                limit_s=self._limit_s,
                snapshot=dict(recorder.snapshot()),
                stacks=tuple(self._stacks()),
                network=interface_trouble(os.environ),
                neighbours={r: x for r, x in letters.items() if x is not None and r != dump.rank},
            )
            self._folder.write(self._dump)

    def _stacks(self) -> Iterator[str]:
        """Yield the stacks of all threads except the watchdog's, that of the loop first."""
        names = {t.ident: _named(t) for t in threading.enumerate()}
        frames = sys._current_frames()
        frames.pop(self._thread.ident or 0, None)
        for ident in sorted(frames, key=lambda i: i != self._loop_thread):
            stack = traceback.extract_stack(frames[ident], limit=-_FRAMES)
            text = "".join(dropwhile(_CALLERS.match, stack.format()))
            yield text if ident == self._loop_thread else f"{names.get(ident, FOREIGN)}:\n{text}"


def _named(thread: threading.Thread) -> str:
    """Return a name for a thread. A thread that Python did not start counts as foreign, even after
    it called into Python.
    """
    return FOREIGN if isinstance(thread, threading._DummyThread) else f"thread {thread.name}"


def _flights() -> list[dict[str, Any]] | None:
    trace = nccl_trace(FLIGHTS_S)
    # what cannot be read must not keep the report from being written
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return None if trace is None else flights.to_json(flights.of_trace(trace))
    return None

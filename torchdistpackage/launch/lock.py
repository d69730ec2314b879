"""A lock file that names its holder, for folders shared by several machines. No torch.

Its holder touches it every HEARTBEAT_S, and the kernel locks it too where it can. A holder counts
as gone only by proof (its process, its Slurm step or its job has ended, or it was this one's
predecessor), or by silence: no heartbeat for STALE_S by the clock of the file system. Its file is
taken away by the next process that wants it, so no kill and no crash leaves an obstacle; a holder
that finds another's word in its file ends at once.

The file appears with all that it says, by a hard link, which is atomic also where flock does
nothing (Lustre, some NFS) or works between processes of one machine only.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from torchdistpackage.bounded import parse_json
from torchdistpackage.environment.slurm_env import in_step
from torchdistpackage.errors import HeldError, LaunchError
from torchdistpackage.files import beside, make_folder, open_regular, remove_empty, write_all
from torchdistpackage.launch.process import started_ticks
from torchdistpackage.launch.slurm.query import Outcome, Runner, limited, query_jobs

log = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
STALE_S = 60.0
"""Seconds without a heartbeat after which a holder counts as gone, if nothing else is known of it.
"""
ASK_S = 5.0
"""Timeout for Slurm's answer; starting must not depend on it."""
LOST = 1
"""Exit code of a holder whose lock was given to another process."""
_PATIENCE_S = 5.0
"""Seconds to wait for other processes that are removing the same stale file."""
_RETRY_S = 0.05
_MAX_BYTES = 1 << 14
_IS_ID = re.compile(r"\d*")
_HANDLES: set[int] = set()


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The content of a lock file: the process that holds the lock.

    doing: its activity, for people. boot, namespace, born: id of the kernel's boot, namespace of
    `pid`, and start time of the process in clock ticks since that boot. job, restart, step:
    Slurm's, or ""; batch: the steps of that job run one after the other. elastic, round: run id and
    restart of torchrun. flocked: the kernel locks the file too. token: a random text that
    identifies this lock.
    """

    doing: str
    host: str
    boot: str
    namespace: int
    pid: int
    born: int
    time_s: float
    job: str
    restart: int
    step: str
    batch: bool
    elastic: str
    round: int
    flocked: bool
    token: str

    def __str__(self) -> str:
        job = f"job {self.job}{f'.{self.step}' if self.step else ''} of Slurm, " if self.job else ""
        since = time.strftime("%d %b %H:%M:%S", time.localtime(self.time_s))
        return f"{self.doing} on {self.host} ({job}process {self.pid}, since {since})"

    @property
    def advice(self) -> str:
        """Return advice on how to end the holder."""
        kill = f"`kill {self.pid}` on {self.host}"
        return f"{f'`scancel {self.job}`' if self.job else kill} ends it"


def this_process(doing: str, env: Mapping[str, str]) -> LockHolder:
    """Return this process as the holder of a lock that the kernel has not yet locked."""
    boot, namespace = "", 0
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    elastic = env.get("TORCHELASTIC_RUN_ID", "")

    def number(name: str) -> int:
        text = env.get(name, "")
        return int(text) if text.isdecimal() else 0

    pid, job = os.getpid(), env.get("SLURM_JOB_ID", "")
    step = env.get("SLURM_STEP_ID", "") if job and in_step(env) else ""
    return LockHolder(
        doing,
        socket.gethostname(),
        boot,
        namespace,
        pid,
        started_ticks(pid) or 0,
        time.time(),
        job,
        number("SLURM_RESTART_COUNT"),
        step,
        bool(env.get("TDP_BATCH")),
        "" if elastic == "none" else elastic,
        number("TORCHELASTIC_RESTART_COUNT"),
        flocked=False,
        token=uuid.uuid4().hex,
    )


def to_json(holder: LockHolder) -> str:
    return json.dumps(asdict(holder)) + "\n"


def from_json(text: str) -> LockHolder | None:
    """Read a holder from JSON; None if the text is invalid or incomplete."""
    try:
        holder = LockHolder(**parse_json(text))
    except (ValueError, TypeError):
        return None
    typed = all(type(getattr(holder, field.name)) is field.type for field in fields(LockHolder))
    return holder if typed and all(map(_IS_ID.fullmatch, (holder.job, holder.step))) else None


def _why_gone(
    holder: LockHolder | None,
    claimant: LockHolder,
    silent_s: float,
    freed: bool,
    runner: Runner | None,
) -> str:
    """Return why the holder no longer writes, or "" if it may.

    claimant: the process that asks. silent_s: seconds since the holder's last heartbeat. freed: the
    kernel no longer locks the file.
    """
    silent = f"it gave no sign of life for {silent_s:.0f} s" if silent_s > STALE_S else ""
    if holder is None:
        return silent
    if _precedes(holder, claimant):
        return "it was an earlier start of the same job"
    if holder.boot and holder.boot == claimant.boot:
        if holder.namespace == claimant.namespace:
            return "" if started_ticks(holder.pid) == holder.born else "its process is gone"
        if holder.flocked:
            return "its process is gone" if freed else ""
    # outside of a step a process may outlive its job, as under salloc
    why = _slurm_says(holder, claimant, runner or limited(ASK_S)) if holder.step else ""
    return "" if why is None else why or silent


def _precedes(holder: LockHolder, claimant: LockHolder) -> bool:
    """Return whether `claimant` is a later start of the same job, so that `holder` has ended."""
    if holder.job and holder.job == claimant.job:
        if claimant.restart != holder.restart:
            return claimant.restart > holder.restart
        both = (
            claimant.step.isdecimal()
            and holder.step.isdecimal()
            and claimant.batch
            and holder.batch
        )
        return both and int(claimant.step) > int(holder.step)
    return (
        bool(holder.elastic)
        and holder.elastic == claimant.elastic
        and claimant.round > holder.round
    )


def _slurm_says(holder: LockHolder, claimant: LockHolder, runner: Runner) -> str | None:
    """Return why the holder's step is over; None if it is not over, "" if unknown."""
    try:
        if holder.job == claimant.job:
            ran = runner(["squeue", "-h", "-s", "-j", holder.job, "-o", "%i"])
            if ran.code:
                return ""
            live = f"{holder.job}.{holder.step}" in ran.out.split()
            return None if live else f"step {holder.job}.{holder.step} is over"
        info = query_jobs([holder.job], runner, since_s=holder.time_s).jobs[holder.job]
    except LaunchError:
        return ""
    alive = None if info.outcome is Outcome.ALIVE else ""
    return f"job {holder.job} is {info.state}" if info.ended else alive


class Lock:
    """A lock that this process holds, made by `take`."""

    def __init__(self, path: Path, holder: LockHolder, handle: int, folders: list[Path]):
        self.path, self._own, self._handle, self._made = path, holder, handle, folders
        self._released = threading.Event()
        # keeps a heartbeat from creating the file again while `release` removes it
        self._beating = threading.Lock()

    def keep(self) -> None:
        """Send heartbeats from a thread from now on; a fork of the holder may do so instead."""
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="tdp-run-lock", daemon=True).start()

    def release(self) -> None:
        """Remove the file if it is still ours, and the folders made for it if they are empty."""
        self._released.set()
        with self._beating:  # or a heartbeat would create the file again
            take_away(self.path, self._own, by_force=True)
        _close(self._handle)
        remove_empty(self._made)

    def _beat(self) -> None:
        # not a sleep: a release ends the thread at once
        while not self._released.wait(HEARTBEAT_S):
            with self._beating:
                if self._released.is_set():
                    return
                try:
                    with os.fdopen(open_regular(self.path, os.O_RDONLY), "rb") as file:
                        holder = from_json(file.read(_MAX_BYTES).decode(errors="replace"))
                    if holder and holder.token != self._own.token:
                        break
                    os.utime(self.path)
                except FileNotFoundError:  # somebody removed it by hand: claim it again
                    with contextlib.suppress(OSError):
                        _close(_create(self.path, self._own))
                except OSError:  # the file system is away, so no other process can write either
                    pass
        else:
            return
        sys.stderr.write(
            f"{self.path} is now held by {holder}: this process sent no heartbeat for too long, or "
            f"the file was removed; it exits here and writes nothing more\n"
        )
        sys.stderr.flush()
        os._exit(LOST)  # at once, because two writers would damage the run folder


@contextlib.contextmanager
def hold(
    path: Path, doing: str, env: Mapping[str, str] | None = None, runner: Runner | None = None
) -> Generator[Lock]:
    """Hold the lock file `path`, with heartbeats; raises as `take`."""
    lock = take(path, doing, env, runner)
    lock.keep()
    try:
        yield lock
    finally:
        lock.release()


def take(
    path: Path, doing: str, env: Mapping[str, str] | None = None, runner: Runner | None = None
) -> Lock:
    """Take the lock without heartbeats, for a process that has yet to fork.

    doing: the activity that others are shown.

    Raises:
        HeldError: another process holds it; names it, since when, and how to end it.
        LaunchError: the file cannot be made.
    """
    claimant = this_process(doing, os.environ if env is None else env)
    created: list[Path] = []
    try:
        created = make_folder(path.parent)
        while True:
            try:
                return Lock(path, claimant, _create(path, claimant), created)
            except FileExistsError:
                _make_way(path, claimant, runner)
            except FileNotFoundError:  # the one before us has just taken the folder away
                created += make_folder(path.parent)
    except BaseException as error:
        remove_empty(created)
        if not isinstance(error, OSError):
            raise
        raise LaunchError(
            f"{doing}: the lock {path} cannot be made: {error.strerror}; it needs room there and "
            f"the right to write, or another run.dir"
        ) from error


def holder_of(
    path: Path, env: Mapping[str, str] | None = None, runner: Runner | None = None
) -> LockHolder | None:
    """Return the holder of the lock, if it may still write."""
    observer = this_process("a look", os.environ if env is None else env)
    with contextlib.suppress(OSError):
        holder, silent_s, freed = _read(path)
        if not _why_gone(holder, observer, silent_s, freed, runner):
            return holder
    return None


def _make_way(path: Path, claimant: LockHolder, runner: Runner | None) -> None:
    """Take away the file of a holder that is gone.

    Raises:
        HeldError: it may still write.
    """
    try:
        holder, silent_s, freed = _read(path)
    except FileNotFoundError:
        time.sleep(_RETRY_S)  # removed just now, or made on another node and not seen here yet
        return
    why = _why_gone(holder, claimant, silent_s, freed, runner)
    if not why:
        ways = [holder.advice] if holder else []
        if holder is None or holder.boot != claimant.boot:
            ways.append(
                f"if it has ended, its lock is free after {STALE_S:.0f} s without a heartbeat"
            )
        raise HeldError(
            f"{claimant.doing} is under way elsewhere: {path} is held by "
            f"{holder or 'another process'}, last heartbeat {max(silent_s, 0):.0f} s ago; "
            f"{'; '.join(ways)}; or use another run.name"
        )
    log.info("%s was left by %s: %s", path, holder, why)
    until_s = time.monotonic() + _PATIENCE_S
    while not take_away(path, holder, by_force=time.monotonic() > until_s):
        time.sleep(_RETRY_S)  # another process holds the file to remove it; it needs a moment


def _create(path: Path, claimant: LockHolder) -> int:
    """Create the file with its full content; return its handle, locked by the kernel if possible.

    Raises:
        FileExistsError: another's is there.
    """
    draft = beside(path)
    handle = _write(draft, claimant)
    try:
        os.link(draft, path)
    except BaseException as error:
        if isinstance(error, FileExistsError) and os.fstat(handle).st_nlink == 2:
            return handle  # NFS lost the answer and asked again
        _close(handle)
        if not isinstance(error, OSError) or isinstance(error, FileExistsError | FileNotFoundError):
            raise
        return _write(path, claimant)  # no hard links here: the file is there before its content
    finally:
        draft.unlink(missing_ok=True)
    return handle


def _write(path: Path, claimant: LockHolder) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    _HANDLES.add(handle)
    try:
        # readers must know whether a free lock means a dead holder: not on file systems without
        # locks
        write_all(handle, to_json(replace(claimant, flocked=_flock(handle) is True)).encode())
        os.fsync(handle)
    except BaseException:
        _close(handle)
        path.unlink(missing_ok=True)
        raise
    return handle


def _close(*handles: int) -> None:
    """Close handles of `_create`, and with them the kernel's locks."""
    for handle in _HANDLES.intersection(handles):
        with contextlib.suppress(OSError):
            os.close(handle)
        _HANDLES.discard(handle)


# A fork that outlives the holder must not keep its lock in the kernel.
os.register_at_fork(after_in_child=lambda: _close(*_HANDLES))


def _flock(handle: int) -> bool | None:
    """Lock a file through the kernel; return whether it worked, None if the file system cannot
    lock.
    """
    try:
        # without waiting: a busy lock is an answer, and the kernel frees it if the process dies
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


class _LockState(NamedTuple):
    """The state that a lock file shows.

    holder: None if the file is incomplete. silent_s: seconds since its last heartbeat.
    freed: the kernel has released the lock.
    """

    holder: LockHolder | None
    silent_s: float
    freed: bool


def _read(path: Path) -> _LockState:
    """Return the state of the lock.

    Ages come from the file system's clock, which all machines share. The file is opened, because
    NFS shows new content only then.
    """
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        holder = from_json(file.read(_MAX_BYTES).decode(errors="replace"))
        # a kernel's lock ends with its process: if this one gets it, the holder here is gone
        beaten_s, freed = os.fstat(file.fileno()).st_mtime, _flock(file.fileno()) is True
    now_s, clock = time.time(), beside(path)
    with contextlib.suppress(OSError):  # may only look
        with clock.open("xb") as file:
            file.write(b"1")
        now_s = clock.stat().st_mtime
        clock.unlink()
    return _LockState(holder, now_s - beaten_s, freed)


def take_away(path: Path, holder: LockHolder | None, *, by_force: bool) -> bool:
    """Remove the lock file of `holder`; return False if another process is removing it.

    by_force: remove it also if the kernel says that it is locked. That may be our own lock, or one
        that an NFS server keeps for a machine that is gone.
    """
    with (
        contextlib.suppress(FileNotFoundError),
        os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file,
    ):
        is_busy = not by_force and _flock(file.fileno()) is False
        written_holder = from_json(file.read(_MAX_BYTES).decode(errors="replace"))
        same = (
            written_holder is None
            if holder is None
            else written_holder and written_holder.token == holder.token
        )
        if is_busy:
            return not same  # another holder's file belongs to a faster process, and stays
        if same and os.fstat(file.fileno()).st_ino == path.stat().st_ino:
            path.unlink()
    return True

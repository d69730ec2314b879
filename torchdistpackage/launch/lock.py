"""A lock file that says who holds it, for folders that several machines share. No torch.

Its holder touches it every HEARTBEAT_S, and the kernel locks it too where it can. One rule: the
file of a holder that is gone (`holder.why_gone`) is taken away by the next process that wants it,
so no kill and no crash leaves an obstacle; a holder that finds another's word in its file ends at
once.

The file appears with all that it says, by a hard link, which is atomic also where flock does
nothing (Lustre, some NFS) or works between processes of one machine only.
"""

import contextlib
import fcntl
import logging
import os
import sys
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torchdistpackage.errors import HeldError, LaunchError
from torchdistpackage.launch.files import beside, make_folder, remove_empty
from torchdistpackage.launch.holder import (
    HEARTBEAT_S,
    STALE_S,
    LockHolder,
    from_json,
    this_process,
    to_json,
    why_gone,
)
from torchdistpackage.launch.slurm.query import Runner

log = logging.getLogger(__name__)

LOST = 1
"""Exit code of a holder whose lock was given to another."""
_PATIENCE_S = 5.0
"""For others that are taking the same file away at this moment."""
_RETRY_S = 0.05
_MAX_BYTES = 1 << 14
_HANDLES: set[int] = set()


class Lock:
    """A lock that this process holds, made by `take`."""

    def __init__(self, path: Path, own: LockHolder, handle: int, made: list[Path]):
        self.path, self._own, self._handle, self._made = path, own, handle, made
        self._released = threading.Event()
        self._beating = threading.Lock()

    def keep(self) -> None:
        """Send heartbeats from a thread from now on; a fork of the holder may do it instead."""
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="tdp-run-lock", daemon=True).start()

    def release(self) -> None:
        """Take the file away if it is still ours, and the folders made for it if they are empty."""
        self._released.set()
        with self._beating:  # or a heartbeat would make the file anew
            take_away(self.path, self._own, by_force=True)
        close(self._handle)
        remove_empty(self._made)

    def beat(self) -> LockHolder | None:
        """One heartbeat; who has the lock now, if it is another."""
        try:
            found, _ = read(self.path)
            if found is not None and found.token != self._own.token:
                return found
            os.utime(self.path)
        except FileNotFoundError:  # removed by hand
            with contextlib.suppress(OSError):
                close(create(self.path, self._own))
        except OSError:  # the file system is away, and nobody else writes to it either
            pass
        return None

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            with self._beating:
                other = None if self._released.is_set() else self.beat()
            if other is not None:
                sys.stderr.write(
                    f"{self.path} is held by {other} now: this process was silent for too long, or "
                    f"the file was removed; it ends here and writes no more\n"
                )
                sys.stderr.flush()
                os._exit(LOST)


@contextmanager
def hold(
    path: Path, doing: str, env: Mapping[str, str] | None = None, runner: Runner | None = None
) -> Generator[Lock]:
    """Hold the lock file `path`, with heartbeats; others are told that `doing` is under way.

    Raises:
        HeldError: somebody else holds it.
        LaunchError: it cannot be made.
    """
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

    Raises:
        HeldError: somebody else holds it; names who, since when, and how to end it.
        LaunchError: the file cannot be made.
    """
    own = this_process(doing, os.environ if env is None else env)
    made: list[Path] = []
    try:
        made = make_folder(path.parent)
        while True:
            try:
                return Lock(path, own, create(path, own), made)
            except FileExistsError:
                _make_way(path, own, runner)
            except FileNotFoundError:  # the one before us has just taken the folder away
                made += make_folder(path.parent)
    except OSError as error:
        remove_empty(made)
        raise LaunchError(
            f"{doing}: the lock {path} cannot be made: {error.strerror}; it needs room there and "
            f"the right to write, or another run.dir"
        ) from error
    except BaseException:
        remove_empty(made)
        raise


def holder_of(
    path: Path, env: Mapping[str, str] | None = None, runner: Runner | None = None
) -> LockHolder | None:
    """Who holds the lock and may still write; None if nobody does."""
    try:
        found, silent_s = read(path)
    except OSError:
        return None
    own = this_process("a look", os.environ if env is None else env)
    if found is None or why_gone(found, own, silent_s, is_free(path), runner):
        return None
    return found


def _make_way(path: Path, own: LockHolder, runner: Runner | None) -> None:
    """Take away the file of a holder that is gone.

    Raises:
        HeldError: it may still write.
    """
    try:
        found, silent_s = read(path)
    except FileNotFoundError:
        return
    if found is not None:
        why = why_gone(found, own, silent_s, is_free(path), runner)
    else:
        why = f"it says nothing for {silent_s:.0f} s" if silent_s > STALE_S else ""
    if not why:
        raise _held(path, own, found, silent_s)
    log.info("%s was left by %s: %s", path, found, why)
    until_s = time.monotonic() + _PATIENCE_S
    while not take_away(path, found, by_force=time.monotonic() > until_s):
        time.sleep(_RETRY_S)


def _held(path: Path, own: LockHolder, found: LockHolder | None, silent_s: float) -> HeldError:
    who = "somebody who has not said who it is" if found is None else str(found)
    ways = [] if found is None else [found.advice]
    if found is None or found.boot != own.boot:
        ways.append(f"if it is gone, it counts as such after {STALE_S:.0f} s without a heartbeat")
    return HeldError(
        f"{own.doing} is under way elsewhere: {path} is held by {who}, last heartbeat "
        f"{max(silent_s, 0):.0f} s ago; {'; '.join(ways)}; or use another run.name"
    )


def _close_in_child() -> None:
    """A fork that outlives the holder must not keep its lock in the kernel."""
    for handle in _HANDLES:
        with contextlib.suppress(OSError):
            os.close(handle)
    _HANDLES.clear()


os.register_at_fork(after_in_child=_close_in_child)


def create(path: Path, own: LockHolder) -> int:
    """Make the file appear with all that it says; its handle, locked by the kernel if it can be.

    Raises:
        FileExistsError: somebody else's is there.
    """
    draft = beside(path)
    handle = _write(draft, own)
    try:
        try:
            os.link(draft, path)
        except FileExistsError:
            if os.fstat(handle).st_nlink != 2:  # else NFS lost the answer and asked again
                raise
        except FileNotFoundError:
            raise
        except OSError:  # no hard links here: the file is there before its content
            close(handle)
            handle = _write(path, own)
    except BaseException:
        close(handle)
        raise
    finally:
        draft.unlink(missing_ok=True)
    return handle


def _write(path: Path, own: LockHolder) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    _HANDLES.add(handle)
    try:
        os.write(handle, to_json(replace(own, flocked=_flock(handle) is True)).encode())
        os.fsync(handle)
    except BaseException:
        close(handle)
        path.unlink(missing_ok=True)
        raise
    return handle


def close(handle: int) -> None:
    """Close the handle of `create`, and with it the kernel's lock."""
    if handle in _HANDLES:
        _HANDLES.discard(handle)
        os.close(handle)


def _flock(handle: int) -> bool | None:
    """Whether the kernel locked it; None where it cannot say."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_free(path: Path) -> bool:
    """Whether no living process has the kernel's lock, as far as the kernel can say."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return _flock(handle) is True
    finally:
        os.close(handle)


def read(path: Path) -> tuple[LockHolder | None, float]:
    """What it says, None of what is no whole record, and seconds since the last heartbeat.

    By the file system's clock, which all machines share; the file is opened, because NFS shows
    what is new only then.
    """
    with path.open("rb") as file:
        found = from_json(file.read(_MAX_BYTES).decode(errors="replace"))
        beaten_s = os.fstat(file.fileno()).st_mtime
    return found, _now_s(path) - beaten_s


def _now_s(path: Path) -> float:
    clock = beside(path)
    try:
        with clock.open("xb") as file:
            file.write(b"1")
        return clock.stat().st_mtime
    except OSError:  # may only look
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            clock.unlink()


def take_away(path: Path, holder: LockHolder | None, *, by_force: bool) -> bool:
    """Remove the file if it is the one of `holder`; False if another is just doing so.

    by_force: also if the kernel says that it is locked, which may be our own lock, or one that an
    NFS server keeps for a machine that is gone.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        is_busy = not by_force and _flock(handle) is False
        found = from_json(os.pread(handle, _MAX_BYTES, 0).decode(errors="replace"))
        same = found is None if holder is None else found and found.token == holder.token
        if is_busy:
            return not same  # else it is the file of whoever was faster, and stays
        if same and os.fstat(handle).st_ino == path.stat().st_ino:
            path.unlink()
    except FileNotFoundError:
        pass
    finally:
        os.close(handle)
    return True

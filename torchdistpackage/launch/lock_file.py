"""The file of a lock: made whole, read, taken away, by several machines at once. No torch.

One rule: a file appears with all that it says, by a hard link, which is atomic also where flock
does nothing (Lustre, some NFS) or works between processes of one machine only.
"""

import contextlib
import fcntl
import os
import time
from dataclasses import replace
from pathlib import Path

from torchdistpackage.launch.files import beside
from torchdistpackage.launch.holder import LockHolder, from_json, to_json

_MAX_BYTES = 1 << 14
_HANDLES: set[int] = set()


def _close_in_child() -> None:
    """A fork that outlives the holder must not keep its lock in the kernel."""
    for handle in _HANDLES:
        with contextlib.suppress(OSError):
            os.close(handle)
    _HANDLES.clear()


os.register_at_fork(after_in_child=_close_in_child)


def make_folder(folder: Path) -> list[Path]:
    """Make `folder` and those above it; the ones that were missing, the lowest first.

    Raises:
        OSError: one cannot be made; then none is left.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        remove_empty(missing)
        raise
    return missing


def remove_empty(folders: list[Path]) -> None:
    """Those that are empty."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


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

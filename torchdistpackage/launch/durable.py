"""Small files that others read while they are written: complete, or as they were before.

One rule: it is on the disk before it has its name, so nobody acts on what a crash takes back.
"""

import contextlib
import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from torchdistpackage.errors import LaunchError


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, whose folder is made where it is missing.

    Raises:
        OSError: it cannot be written; then `path` is as before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def alone(path: Path, doing: str) -> Generator[None]:
    """Hold the lock file `path`; whoever comes meanwhile is told that `doing` is under way.

    The file is gone afterwards, and so is its folder if nothing else came into it.

    Raises:
        LaunchError: somebody else holds it, or it cannot be made.
    """
    lock = _lock(path, doing)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()
        os.close(lock)


def _lock(path: Path, doing: str) -> int:
    """The open file that holds the lock."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # the one before us has just taken the folder away
            continue
        except OSError as error:
            raise LaunchError(f"{doing}: {path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(lock).st_ino:
                return lock
        except FileNotFoundError:  # the one before us has just taken the file away
            pass
        except OSError as error:
            os.close(lock)
            raise LaunchError(f"{doing} is under way elsewhere ({path} is locked); wait") from error
        os.close(lock)

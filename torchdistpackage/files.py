"""Small files that others read while they are written: replaced atomically, or grown by a line.

A file is on the disk before it has its name, so that no reader acts on what a crash takes back, and
a line that is not complete is passed over.
"""

import contextlib
import errno
import json
import os
import socket
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, TextIO, TypeVar

from torchdistpackage.bounded import check_regular, parse_json, read_regular
from torchdistpackage.errors import LaunchError

T = TypeVar("T")

_HOST_LETTERS = 32
_MOST_BYTES = 1 << 26
"""Largest file of lines that is read."""
_TAIL_BYTES = 4096
LATE_S = 60.0
"""Longest time in seconds for which a file system may hide from one node what another has made;
NFS remembers for so long that a name was not there (acdirmax).
"""
_LOOK_S = 0.2


def atomic_write(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write `text` to `path`, whose folder is made where it is missing.

    mode: the rights of the file, from its first byte on, less the umask.

    Raises:
        OSError: it cannot be written; then `path` is as before.
    """
    atomic_write_all({path: text}, mode=mode)


def atomic_write_all(texts: Mapping[Path, str], *, mode: int = 0o666) -> None:
    """Write several files; no one is changed before the disk has taken them all.

    Raises:
        OSError: one cannot be written; then all are as before.
    """
    drafts: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            make_folder(path.parent)
            drafts[path] = beside(path)
            descriptor = os.open(drafts[path], os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with naming(path), os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        for path, draft in drafts.items():
            draft.replace(path)
    except BaseException:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
        raise


def open_regular(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file in a folder that others may write to, and return its descriptor.

    A link is not followed, and a pipe or device is not waited for: somebody else may have put it
    there. flags, mode: of os.open; leave out O_TRUNC where a hard link could be planted.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            check_regular(path)  # which names what it is
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        check_regular(path)
        raise OSError(None, "is not a regular file", str(path))
    return handle


def append_text(path: Path) -> TextIO:
    """Open a log of a shared folder to append to, as `open_regular` does; made where missing."""
    handle = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    return os.fdopen(handle, "a", encoding="utf-8", buffering=1)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`; os.write may take a part of it, without an error.

    Raises:
        OSError: the disk is full, or another file error.
    """
    while data:
        data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def naming(path: str | Path) -> Generator[None]:
    """Put `path` into an OSError of the block that names no file, as that of a write or a flush."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def appears(path: Path, limit_s: float = LATE_S) -> bool:
    """Wait until this node sees a name that another node has just made; return whether it does."""
    until_s = time.monotonic() + limit_s
    while not os.path.lexists(path):
        if time.monotonic() > until_s:
            return False
        time.sleep(_LOOK_S)
        # NFS asks its server again whether a name is there once the folder is opened
        with contextlib.suppress(OSError):
            os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
    return True


def beside(path: Path) -> Path:
    """A hidden name in the same folder that no other process on any machine has."""
    host = socket.gethostname()[:_HOST_LETTERS]
    return path.with_name(f".{path.name.lstrip('.')}.{host}.{os.getpid()}.{uuid.uuid4().hex[:8]}")


def append_json(path: Path, value: Mapping[str, Any]) -> None:
    """Append `value` as a line of JSON, in one write, so that several writers do not mix.

    Its folder is made where it is missing.

    Raises:
        OSError: it cannot be written, or is not a regular file.
    """
    make_folder(path.parent)
    file = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o664)
    try:
        size = os.lseek(file, 0, os.SEEK_END)
        # a writer may have been killed in the middle of a line; it keeps that line to itself
        begin = "\n" if size and os.pread(file, 1, size - 1) != b"\n" else ""
        with naming(path):
            write_all(file, f"{begin}{json.dumps(value)}\n".encode())
            os.fsync(file)
    finally:
        os.close(file)


def read_json_lines(path: Path, parse: Callable[[Any], T]) -> tuple[list[T], list[int]]:
    """Parse each line's JSON with `parse`; return the results and the numbers of unreadable lines.

    A writer that was killed leaves such a line. Empty lines do not count, and a file that is not
    there has none.

    Raises:
        LaunchError: it is a pipe, a device or the like, too large, or may not be read.
    """
    try:
        lines = read_regular(path, _MOST_BYTES).decode(errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return [], []
    except OSError as error:
        hint = "ask its owner" if isinstance(error, PermissionError) else "move it away"
        raise LaunchError(f"{path} {error.strerror}; {hint}") from error
    values: list[T] = []
    bad: list[int] = []
    for number, line in enumerate(lines, 1):
        try:
            values += [parse(parse_json(line))] if line.strip() else []
        except (ValueError, TypeError, KeyError, OverflowError):
            bad.append(number)
    return values, bad


def tail(path: Path, start_bytes: int = 0) -> str:
    """The last lines of what was written to `path` from `start_bytes` on, at most 4 KiB."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(start_bytes, size - _TAIL_BYTES)
            file.seek(start)
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return (text if start == start_bytes else text.partition("\n")[2]).rstrip()


def make_folder(folder: Path, *, mode: int = 0o777) -> list[Path]:
    """Make `folder` and those above it; return the ones that were missing, the lowest first.

    mode: permissions of `folder`, less the umask.

    Raises:
        OSError: one cannot be made; then none is left.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()] or [folder]
    created: list[Path] = []
    try:
        for path in reversed(missing):
            try:
                path.mkdir(mode if path == folder else 0o777)
                created.insert(0, path)
            except FileExistsError:
                # another process has made it meanwhile, perhaps on another node
                if not appears(path) or not path.is_dir():
                    raise
    except OSError:
        remove_empty(created)
        raise
    return created


def remove_empty(folders: list[Path]) -> None:
    """Remove those that are empty."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def own_folder() -> Path | None:
    """Return a folder on this host that nobody else can read or write; None if there is none."""
    folder = Path(tempfile.gettempdir()) / f"tdp-{os.getuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError:
        return None
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return folder if is_ours and not status.st_mode & 0o077 else None

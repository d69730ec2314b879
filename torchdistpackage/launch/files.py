"""Small files that others read while they are written: complete, or as they were before.

One rule: it is on the disk before it has its name, so nobody acts on what a crash takes back.
"""

import os
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path

_HOST_LETTERS = 32


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
            path.parent.mkdir(parents=True, exist_ok=True)
            drafts[path] = beside(path)
            descriptor = os.open(drafts[path], os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        for path, draft in drafts.items():
            draft.replace(path)
    except BaseException:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
        raise


def beside(path: Path) -> Path:
    """A hidden name in the same folder that no other process on any machine has."""
    host = socket.gethostname()[:_HOST_LETTERS]
    return path.with_name(f".{path.name.lstrip('.')}.{host}.{os.getpid()}.{uuid.uuid4().hex[:8]}")

"""Small files that others read while they are written: complete, or as they were before.

One rule: it is on the disk before it has its name, so nobody acts on what a crash takes back.
"""

import os
import socket
import uuid
from pathlib import Path

_HOST_LETTERS = 32


def write_whole(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write `text` to `path`, whose folder is made where it is missing.

    mode: the rights of the file, from its first byte on, less the umask.

    Raises:
        OSError: it cannot be written; then `path` is as before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def beside(path: Path) -> Path:
    """A hidden name in the same folder that no other process on any machine has."""
    host = socket.gethostname()[:_HOST_LETTERS]
    return path.with_name(f".{path.name.lstrip('.')}.{host}.{os.getpid()}.{uuid.uuid4().hex[:8]}")

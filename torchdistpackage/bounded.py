"""Reading what anybody may have written: files and JSON of bounded size, depth and kind.

The bound is checked before anything is opened, read or built, so a device or a pipe costs no more
than its refusal.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any


def read_regular(path: Path, most_bytes: int, *, follow: bool = True) -> bytes:
    """The content of a regular file of at most `most_bytes`.

    follow: a symbolic link stands for what it leads to; else it is refused.

    Raises:
        OSError: it cannot be read, or is larger, or no regular file.
        ValueError: the name itself cannot be one.
    """
    _check(path.stat(follow_symlinks=follow), path, most_bytes)
    # It may have been exchanged since: a pipe then does not make the open wait.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    with os.fdopen(os.open(path, flags), "rb") as file:
        _check(os.fstat(file.fileno()), path, most_bytes)
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(None, f"has more than {most_bytes:,} bytes", str(path))
    return content


def check_regular(path: Path) -> int:
    """The size of a regular file; neither it nor what a link leads to is opened.

    Raises:
        OSError: there is none, or it is something else: a link, a device, a pipe, a folder.
    """
    found = path.stat(follow_symlinks=False)
    _check(found, path, found.st_size)
    return found.st_size


def _check(found: os.stat_result, path: Path, most_bytes: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(None, f"is {_KINDS.get(stat.S_IFMT(found.st_mode), 'no regular file')}", path)
    if found.st_size > most_bytes:
        raise OSError(
            None, f"has {found.st_size:,} bytes, more than the {most_bytes:,} allowed", path
        )


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def parse_json(text: str) -> Any:
    """The value of JSON text.

    Raises:
        ValueError: it is none, or nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error

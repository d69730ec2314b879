"""Reading what anybody may have written: files, YAML and JSON of bounded size, depth and kind.

One rule: the bound is checked before anything is opened, read or built, so a device, a pipe or a
few hundred bytes of aliases cost no more than their refusal.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, cast

import yaml

MAX_NODES = 20_000
"""Values and keys of one YAML file, each use of an alias counted in full."""
MAX_DEPTH = 50
"""Lists and mappings inside each other."""


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


class BoundError(yaml.MarkedYAMLError):
    """A YAML text goes over a bound. why: which; mark: where."""

    def __init__(self, why: str, mark: Any) -> None:
        super().__init__(problem=why, problem_mark=mark)


class BoundedLoader(yaml.SafeLoader):
    """Composes at most MAX_NODES nodes, MAX_DEPTH deep; an alias counts as one here."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._nodes = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        self._depth += 1
        event: Any = cast(Any, self).peek_event()
        if self._nodes > MAX_NODES:
            raise BoundError(f"it has more than {MAX_NODES:,} values and keys", event.start_mark)
        if self._depth > MAX_DEPTH:
            why = f"values are nested too deeply, more than {MAX_DEPTH} levels"
            raise BoundError(why, event.start_mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

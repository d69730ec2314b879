"""A rank's output, on its screen and in a log of its own."""

import contextlib
import re
from pathlib import Path
from typing import Any, TextIO

_TERMINAL = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z^-~\\])"
)
"""Control sequences (colours, cursor), those with a text (titles, links), and single escapes."""
_LINE_LETTERS = 1 << 16


class Tee:
    """A stream that is also kept in a file, without what only a terminal can show.

    For a rank whose output belongs to somebody's screen or launcher. That one of them takes no
    more is no reason to end a run. Of a line that is written over again and again, as progress
    bars are, the file has the last state.
    """

    def __init__(self, stream: TextIO, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream, self._file = stream, path.open("a", encoding="utf-8", buffering=1)
        self._line = ""  # of a line that began with a carriage return: its state so far

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # a full disk
            self._keep(text)
        with contextlib.suppress(OSError):  # a terminal or a pipe that was closed
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def close(self) -> None:
        """Close the file; the stream is its owner's."""
        with contextlib.suppress(OSError):
            self._file.write(_last_state(self._line))
        self._file.close()

    def _keep(self, text: str) -> None:
        """Plain text goes on at once, also without the end of its line."""
        if not self._line and "\r" not in text and "\x1b" not in text:
            self._file.write(text)
            return
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._file.write(_last_state(line) + "\n")
        # nobody reads more of an endless line than its last state
        if len(self._line) > _LINE_LETTERS:
            self._line = self._line.rpartition("\r")[2][-_LINE_LETTERS:]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _last_state(line: str) -> str:
    """What a terminal shows in the end, without colours."""
    states = _TERMINAL.sub("", line).split("\r")
    return next((state for state in reversed(states) if state), "")

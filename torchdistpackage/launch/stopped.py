"""A process that is stopped (SIGSTOP, Ctrl-Z, a debugger), and the note that its watcher leaves.

One rule: the note is there while the rank is stopped. A rank that is alone on its host has nobody
else to say so, and by its silence alone it cannot be told from a host that is gone.
"""

import contextlib
from pathlib import Path

from torchdistpackage.launch.files import atomic_write

_LETTERS = ("T", "t")


def stopped(pid: int) -> str:
    """The letter of its state as in /proc, T or t (by a debugger); "" if it is not stopped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return ""
    letter = stat.rpartition(")")[2].split()[0]
    return letter if letter in _LETTERS else ""


def note(report: Path, letter: str) -> None:
    """Say beside the place of a rank's report that it is stopped, or with "" that it is not.

    Raises:
        OSError: that cannot be written.
    """
    if letter:
        atomic_write(_beside(report), letter)
    else:
        _beside(report).unlink(missing_ok=True)


def noted(report: Path) -> str:
    """The letter that the watcher of the rank with that report has noted; "" if none."""
    with contextlib.suppress(OSError, ValueError):
        letter = _beside(report).read_text(encoding="utf-8")
        return letter if letter in _LETTERS else ""
    return ""


def _beside(report: Path) -> Path:
    return report.with_suffix(".stopped")

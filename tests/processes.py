"""Looking for processes that a test may have left behind."""

import time
from pathlib import Path


def survivors(mark: str, within_s: float = 10) -> list[int]:
    """Processes anywhere that carry this run's mark in their environment; those that are at their
    end have so long to go."""
    end_s = time.monotonic() + within_s
    while (found := _marked(mark)) and time.monotonic() < end_s:
        time.sleep(0.05)
    return found


def _marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found

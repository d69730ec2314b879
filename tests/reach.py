"""Which tests come to which planted places, and how each test ends.

`tests/mutants.py` copies this file into the package of its copies: there it is both the function
that planted code calls, in ranks too, and a plugin of pytest. It needs nothing but Python.
"""

import json
import mmap
import os
import time
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "reach"
"""Where pytest and all ranks write. Without it nothing is written."""
_open, _write, _close = os.open, os.write, os.close  # tests replace those of os
_seen: set[tuple[int, bytes]] = set()
_now: mmap.mmap | bytes | None = None
_running: dict[str, float | str] = {}
_count = 0


def hit(place: int) -> None:
    """Write that the test that runs now came to `place`, once for a test and a process."""
    global _now
    if _now is None:
        try:
            file = _open(FOLDER / "now", os.O_RDONLY)
            _now = mmap.mmap(file, 8, access=mmap.ACCESS_READ)
            _close(file)
        except OSError:
            _now = bytes(8)
    key = (place, _now[:8])
    if key not in _seen:
        _seen.add(key)
        _append("hits", f"{place} {int.from_bytes(key[1], 'little')}\n")


def pytest_runtest_logstart(nodeid: str, location: object) -> None:
    global _count
    _count += 1
    _running.clear()
    _running.update(test=nodeid, number=_count, begun=time.monotonic(), failed="")
    if FOLDER.is_dir():
        file = _open(FOLDER / "now", os.O_WRONLY)
        _write(file, _count.to_bytes(8, "little"))
        _close(file)


def pytest_runtest_logreport(report) -> None:
    if report.failed and not _running["failed"]:
        crash = getattr(report.longrepr, "reprcrash", None)
        _running["failed"] = (crash.message if crash else str(report.longrepr))[:2000] or "failed"


def pytest_runtest_logfinish(nodeid: str, location: object) -> None:
    took = round(time.monotonic() - float(_running["begun"]), 2)
    line = {name: _running[name] for name in ("test", "number", "failed")} | {"seconds": took}
    _append("ends", json.dumps(line) + "\n")


def _append(name: str, text: str) -> None:
    try:
        file = _open(FOLDER / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        _write(file, text.encode())
        _close(file)
    except OSError:
        return

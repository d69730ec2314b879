"""A file with one row per step, each step once, however the run is killed and resumed."""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchdistpackage.errors import DataError
from torchdistpackage.files import append_text, atomic_write, write_all
from torchdistpackage.launch.run_rows import read_rows
from torchdistpackage.run_files import METRICS

_LOOK_S = 1.0
"""Seconds between checks whether the folder still exists. A check is free except on old NFS."""
_HELD = 100_000
"""Largest number of rows that wait in memory for a full disk; beyond it the oldest are lost."""
_SHOWN = 4


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Appends to `metrics.jsonl` in `folder`; only one rank of a run has one.

    resume_step: the last step that the resumed state has done; rows after it are dropped, as their
    steps are done again. A row is its `step` and what was measured: `loss`, and at validations
    `val_loss`, `unigram` and `bigram`, all in nats a token. name: of the file.

    missing: the steps up to `resume_step` that have no row, as text, such as "steps 3 to 5, 9".
    say: takes a line, when rows cannot be written; they are then held until they can be. None: that
    raises.
    """

    def __init__(self, folder: str | Path, resume_step: int = 0, name: str = METRICS):
        self.path = Path(folder) / name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.say: Callable[[str], None] | None = None
        self._looked_s = 0.0
        self._waiting = deque[str](maxlen=_HELD)
        self._is_failing = False
        rows = [row for row in read_metrics(self.path) if row["step"] <= resume_step]
        self.missing = _missing([row["step"] for row in rows], resume_step)
        self._last = rows[-1]["step"] if rows else 0
        self._replace(rows)

    def write(self, step: int, **values: object) -> None:
        """Add the row of a step and hand it to the operating system; non-finite numbers become
        null.

        Raises:
            DataError: a row of this step or a later one is there, or the file is not any more, or
                takes no more.
        """
        if step <= self._last:
            raise DataError(
                f"{self.path} already goes up to step {self._last}, so step {step} cannot be "
                f"added; write once a step, or reopen it with resume_step={step - 1}"
            )
        self._last = step
        self._waiting.append(_line({"step": step, **values}))
        self._put()
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._check()

    def sync(self) -> None:
        """Flush to the disk what was written so far; raises DataError as `write`."""
        self._put()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._failed(error)
        self._check()

    def _put(self) -> None:
        """Append the rows that wait, all or none."""
        if not self._waiting:
            return
        file, rows = self._file.fileno(), "".join(self._waiting).encode()
        size = os.fstat(file).st_size
        try:
            write_all(file, rows)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(file, size)  # no half row, which a later one would go on
            self._failed(error)
            return
        if self._is_failing and self.say is not None:
            self.say(f"{self.path.name}: {len(self._waiting)} rows that had to wait are written")
        self._is_failing = False
        self._waiting.clear()

    def _failed(self, error: OSError) -> None:
        problem = f"{self.path} cannot be written: {error.strerror}"
        if self.say is None:
            self._waiting.clear()
            raise DataError(
                f"{problem}; make room, or let the run go on without it "
                f"(checkpoint.on_error=continue)"
            ) from error
        if not self._is_failing:
            self.say(
                f"no rows: {problem}; they wait in memory, and training goes on "
                f"(checkpoint.on_error: continue)"
            )
        self._is_failing = True

    def _check(self) -> None:
        """Raise DataError if the file was removed: writes to a deleted file succeed silently."""
        self._looked_s = time.monotonic()
        try:
            is_same = os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise DataError(
                f"{self.path} was removed or replaced while the run wrote to it, so its folder has "
                f"no rows, logs or checkpoints of this run; nothing more is written. Start it "
                f"again; if the folder was moved, move it back before"
            )

    def amend(self, step: int, **values: object) -> None:
        """Add values to the row of `step`, if it is the last one; raises DataError as `write`."""
        rows = read_metrics(self.path)
        if rows and rows[-1]["step"] == step:
            old_file = self._file
            try:
                self._replace([*rows[:-1], {**rows[-1], **values}])
            except OSError as error:
                self._failed(error)
            else:
                old_file.close()

    def _replace(self, rows: list[dict[str, Any]]) -> None:
        atomic_write(self.path, "".join(map(_line, rows)))
        self._file = append_text(self.path)

    def close(self) -> None:
        if self.say is not None:
            self._put()
            if self._waiting:
                self.say(f"{self.path.name}: {len(self._waiting)} rows that had to wait are lost")
        self._file.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return rows by ascending step, the last one written for each step, without invalid lines.

    Raises:
        DataError: the name is that of a device, a pipe or the like, which is not opened.
    """
    return read_rows(path)[0]


def _missing(steps: Sequence[int], last: int) -> str:
    """Return the numbers from 1 to `last` missing in the ascending `steps`, as text; "" if none."""
    gaps = [(a + 1, b - 1) for a, b in pairwise([0, *steps, last + 1]) if b - a > 1]
    shown = ", ".join(f"{a} to {b}" if b > a else f"{a}" for a, b in gaps[:_SHOWN])
    more = sum(b - a + 1 for a, b in gaps[_SHOWN:])
    noun = "step" if sum(b - a + 1 for a, b in gaps) == 1 else "steps"
    return f"{noun} {shown}" + (f" and {more} more" if more else "") if gaps else ""


_to_json = json.JSONEncoder(allow_nan=False).encode


def _line(row: Mapping[str, Any]) -> str:
    try:
        return _to_json(row) + "\n"
    except ValueError:  # rare, and the look for it costs more than the line
        return _to_json(_finite(row)) + "\n"


def _finite(value: Any) -> Any:
    """Return the same value with None for numbers that JSON cannot express."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""What a part of the GPU benchmarks finds, as rows, and their table. No torch.

One rule: a row that fails takes nothing else with it, and a time is judged on a device alone.
On the CPU everything is small, which shows only that the script runs.
"""

import math
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

Number = float | int | str | None


class Status(StrEnum):
    OK = "ok"
    FAILED = "failed"
    SHOWN = "shown"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Row:
    """text: what was found, in words. numbers: the same for programs. detail: a traceback."""

    name: str
    status: Status
    text: str
    numbers: Mapping[str, Number] = field(default_factory=dict)
    detail: str = ""


class NotRun(Exception):
    """Why a case cannot be run here."""


@dataclass(frozen=True)
class Choice:
    """Which cases of a part that has many are to be run.

    pattern: of their names, with * and ?; "": as the part has it. end_s: no case begins that may
    not be over then, on the clock of `time.monotonic`. earlier: rows of a run before, of which
    those that hold are kept, and their cases not run again.
    """

    pattern: str = ""
    end_s: float = math.inf
    earlier: Sequence[Row] = ()

    @property
    def left_s(self) -> float:
        return self.end_s - time.monotonic()

    def wants(self, name: str) -> bool:
        return not self.pattern or any(fnmatchcase(name, x) for x in self.pattern.split(","))


class Found:
    """The rows of a part. small: on the CPU, where no time is judged. keep: called after each."""

    def __init__(
        self,
        keep: Callable[[Sequence[Row]], object],
        *,
        small: bool,
        choice: Choice | None = None,
    ) -> None:
        self.small, self._keep, self.choice = small, keep, choice or Choice()
        self.rows = [row for row in self.choice.earlier if row.status in (Status.OK, Status.SHOWN)]
        self._known = {row.name for row in self.rows}

    def is_known(self, name: str) -> bool:
        """Whether a run before has it."""
        return name in self._known

    def _add(self, *row: Any) -> None:
        self.rows.append(Row(*row))
        self._keep(self.rows)

    def show(self, name: str, text: str, **numbers: Number) -> None:
        self._add(name, Status.SHOWN, text, numbers)

    def judge(self, name: str, holds: bool, text: str, **numbers: Number) -> None:
        """What is right or wrong anywhere."""
        self._add(name, Status.OK if holds else Status.FAILED, text, numbers)

    def judge_time(self, name: str, holds: bool, text: str, **numbers: Number) -> None:
        """What only a device can tell."""
        if self.small:
            self.show(name, text, **numbers)
        else:
            self.judge(name, holds, text, **numbers)

    def leave(self, name: str, why: str) -> None:
        self._add(name, Status.NOT_RUN, why)

    @contextmanager
    def case(self, name: str) -> Generator[None]:
        """What raises inside is a row that failed, or that was not run."""
        try:
            yield
        except NotRun as reason:
            self.leave(name, str(reason))
        except Exception as error:
            # the assertion of a test may have no words but its line
            said = str(error).strip().splitlines() or [_line_of(error)]
            text = f"{type(error).__name__}: {said[0]}"
            self._add(name, Status.FAILED, text, {}, traceback.format_exc())


def _line_of(error: Exception) -> str:
    return traceback.extract_tb(error.__traceback__)[-1].line or ""


def expect(holds: bool, text: str) -> None:
    """Raise what a case says where it is wrong; `Found.case` makes a row of it."""
    if not holds:
        raise AssertionError(text)


def status_of(rows: Iterable[Mapping[str, object]]) -> Status:
    """Of a part: failed if one of its rows is, not run if nothing was."""
    found = {row["status"] for row in rows}
    if Status.FAILED in found:
        return Status.FAILED
    return Status.OK if found - {Status.NOT_RUN} else Status.NOT_RUN


def table(title: str, part: Mapping) -> Iterable[str]:
    """Lines of a part for a terminal."""
    why = f": {part['why']}" if part.get("why") else ""
    where = part.get("machine", {}).get("device")
    small = ", cpu, small" if where == "cpu" else ""
    yield f"\n{title}: {part['status']} in {part['seconds']:.0f} s{small}{why}"
    for row in part["rows"]:
        yield f"  {row['status']:8} {row['name']:44} {row['text']}"

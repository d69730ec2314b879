"""What a part of the GPU benchmarks finds, as rows, and their table. No torch.

One rule: a row that fails takes nothing else with it, and a time is judged on a device alone.
On the CPU everything is small, which shows only that the script runs.
"""

import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
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


class Found:
    """The rows of a part. small: on the CPU, where no time is judged. keep: called after each."""

    def __init__(self, keep: Callable[[Sequence[Row]], object], *, small: bool) -> None:
        self.small, self._keep = small, keep
        self.rows: list[Row] = []

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
        """What raises inside is a row that failed."""
        try:
            yield
        except Exception as error:
            said = str(error).strip().splitlines() or [""]
            text = f"{type(error).__name__}: {said[0]}"
            self._add(name, Status.FAILED, text, {}, traceback.format_exc())


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

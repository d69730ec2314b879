"""The events of a run besides its steps, each with its time: `events.jsonl`. No torch.

`tdp submit` and rank 0 append to it; `tdp report` and `tdp watch` read it. It is a record for
people, so a full disk that rejects it ends no run.
"""

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torchdistpackage.files import append_json, read_json_lines
from torchdistpackage.run_files import EVENTS

if TYPE_CHECKING:  # `tdp jobs` reads events, and need not load a parser of YAML
    from torchdistpackage.config.schema import RunConfig

SUBMIT, START, SAVE, END = "submit", "start", "save", "end"
_LAST_S = 2.0**37
"""Latest valid time of an event (year 6325), because calendar dates end soon after."""


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One line of `events.jsonl`. at_s: seconds since 1970. values: fields specific to the kind."""

    kind: str
    step: int
    at_s: float
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])


def note_event(folder: Path, event: str, step: int, **values: object) -> None:
    """Append an event to the record of the run folder, with the time of this host."""
    row = {"event": event, "step": step, "at_s": round(time.time(), 3), **values}
    with contextlib.suppress(OSError):
        append_json(folder / EVENTS, row)


def note_start(
    folder: Path,
    config: "RunConfig",
    step: int,
    *,
    attempt: str,
    world_size: int,
    device: str,
    job_end_s: float | None = None,
    libraries: Mapping[str, object] | None = None,
    proof: str | None = None,
) -> None:
    """Record a start: its first step, its number of ranks, and every key that was set.

    attempt: `attempt_id` of the job, or "local". device: the model of rank 0's device. job_end_s:
    when the job is ended, in seconds since 1970. libraries: versions, and variables that decide the
    order in which devices add. proof: the file of tdp prove that covers the run.
    """
    more: dict[str, object] = {"attempt": attempt, "num_ranks": world_size, "device": device}
    more |= {"host": socket.gethostname(), "num_steps": config.train.steps}
    more |= {} if libraries is None else {"libraries": dict(libraries)}
    more |= {} if proof is None else {"proof": proof}
    note_event(folder, START, step, **more, job_end_s=job_end_s, keys=written_keys(config))


def written_keys(config: "RunConfig") -> dict[str, list[Any]]:
    """Return the value of each written key, and where it was written: file and line, or the command
    line.
    """
    values_of: dict[str, list[Any]] = {}
    for key, value in flat(config.model_dump(mode="json")):
        if (location := config.location(key)) is not None:
            values_of[key] = [value, location.file + (f":{location.line}" if location.line else "")]
    return values_of


def flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values."""
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from flat(cast(dict[str, Any], value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_events(folder: Path) -> tuple[list[RunEvent], int]:
    """Return all events in order, and the number of invalid lines.

    Raises:
        LaunchError: the name is that of a device, a pipe or the like, or the file is too large.
    """
    events, torn = read_json_lines(folder / EVENTS, _event)
    return events, len(torn)


def _event(row: Any) -> RunEvent:
    fields = {k: v for k, v in row.items() if k not in ("event", "step", "at_s")}
    event = RunEvent(str(row["event"]), int(row["step"]), float(row["at_s"]), fields)
    if event.step < 0 or not 0 <= event.at_s < _LAST_S:
        raise ValueError("no step, or no time")
    return event

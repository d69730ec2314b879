"""The protocol of experiment trackers, how a row is converted for them, and their state between
starts.
"""

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from torchdistpackage.bounded import parse_json, read_regular
from torchdistpackage.files import atomic_write
from torchdistpackage.launch.run_rows import Row, number

PROJECT = "torchdistpackage"
"""Project or experiment of a run, unless the service's own variable names another."""
FOLDER = "trackers"
_MOST_BYTES = 1 << 20
_CONNECT_S = 3.0


@dataclass(slots=True)
class TrackedRun:
    """A run as its trackers know it.

    config: every key by its dotted name. step: the last one that this start does not repeat.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    step: int


class Tracker(Protocol):
    """One service. Its methods are called in one thread, and may raise anything."""

    name: str

    def open(self, run: TrackedRun) -> int:
        """Begin the service's run, or continue it; return the last step whose row it has."""
        ...

    def send(self, rows: Sequence[Row]) -> None:
        """Deliver rows in ascending order; when this returns, the service has them."""
        ...

    def add_picture(self, path: Path, step: int) -> None:
        """Deliver a PNG or SVG file, if the service can show it."""
        ...

    def close(self, outcome: str) -> None:
        """End this start. outcome: the final word in events.jsonl; "failed" if there is none."""
        ...

    @property
    def place(self) -> str:
        """Return a text for the run's log that says where to look at the run."""
        ...


@dataclass(slots=True)
class TrackerState:
    """The state of a tracker between starts, in the run folder: `trackers/NAME.json`."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, folder: Path, name: str) -> "TrackerState":
        """Read the stored state; the result is empty where no readable file exists."""
        path = folder / FOLDER / f"{name}.json"
        try:
            values = parse_json(read_regular(path, _MOST_BYTES).decode())
        except (OSError, ValueError):
            values = None
        return cls(path, values if isinstance(values, dict) else {})

    @property
    def step(self) -> int:
        """The last step whose row was delivered; 0 for none."""
        value = self.values.get("step")
        return value if isinstance(value, int) else 0

    def keep(self, **values: Any) -> None:
        """Set values, and write them to disk."""
        self.values |= values
        atomic_write(self.path, json.dumps(self.values))


def scalars(row: Row) -> Iterator[tuple[str, float]]:
    """Return the numbers of a row; a mapping or list gives one for each entry, such as
    `experts/NAME`.
    """
    for key, value in row.items():
        if key == "step":
            continue
        inner: Any = {"": value}
        if isinstance(value, dict):
            inner = value
        elif isinstance(value, list):
            inner = dict(enumerate(value))
        for name, item in inner.items():
            if (scalar := number(item)) is not None:
                yield f"{key}/{name}" if name != "" else key, scalar


def texts(row: Row) -> Iterator[tuple[str, str]]:
    """Return the values of a row that are texts."""
    return ((key, value) for key, value in row.items() if isinstance(value, str))


def is_reachable(url: str) -> bool:
    """Return whether a connection to the host of `url` succeeds within 3 s."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), _CONNECT_S).close()
    except OSError:
        return False
    return True

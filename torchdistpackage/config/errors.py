"""What is wrong with a configuration: problems as values, and the one error that lists them all."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torchdistpackage.errors import ConfigError

MAX_PROBLEMS = 100
"""Advice for each of thousands takes minutes."""
_MAX_LINE = 4000


class SourceLocation(NamedTuple):
    """Where a key was written; an override has no line, its file is `command line: a.b=c`."""

    file: str
    line: int | None = None


@dataclass(frozen=True, slots=True)
class KeyLocations:
    """Where the keys of a run were written; runs of equal values are equal wherever they were.

    by_path: of those that were written; the others are somewhere in `source`.
    """

    source: str = field(default="", compare=False)
    by_path: Mapping[tuple[str | int, ...], SourceLocation] = field(
        default_factory=dict[tuple[str | int, ...], SourceLocation], compare=False
    )

    def of(self, path: tuple[str | int, ...]) -> SourceLocation:
        """Of `path`, or of the nearest thing around it."""
        around = (path[:end] for end in range(len(path), 0, -1))
        return next(
            (self.by_path[p] for p in around if p in self.by_path), SourceLocation(self.source)
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, e.g. run.yaml:7: parallel.tensr: unknown key; ..."""

    file: str
    line: int | None
    path: str
    text: str

    def __str__(self) -> str:
        location = f"{self.file}:{self.line}" if self.line else self.file
        said = f"{self.path}=" in self.file  # the override repeats its own path
        line = ": ".join(part for part in (location, "" if said else self.path, self.text) if part)
        # One line that every terminal can show, whatever the file holds.
        line = line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}..."
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


class ConfigErrors(ConfigError):
    """All that is wrong with one configuration; `problems` holds them in file order."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems: tuple[Problem, ...] = tuple(problems)
        many = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{many} in {source}:", *(f"  {p}" for p in self.problems)]))

    def __reduce__(self) -> tuple[type["ConfigErrors"], tuple[str, tuple[Problem, ...]]]:
        # Exceptions rebuild themselves from their text, which is not what __init__ takes.
        return type(self), (self.source, self.problems)


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The valid name that looks most like `name`, or None if none is close.

    cutoff: difflib's ratio, from which on a name is close.
    """
    return next(iter(difflib.get_close_matches(name.lower(), list(names), 1, cutoff)), None)

"""The problems of a configuration, and the one error that lists them all."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torchdistpackage.errors import ConfigError

MAX_PROBLEMS = 100
"""Largest number of reported problems; looking for advice takes time for each."""
_MAX_LINE = 4000


class SourceLocation(NamedTuple):
    """The place where a key was written; an override has no line, and its file is `command line:
    a.b=c`.
    """

    file: str
    line: int | None = None


@dataclass(frozen=True, slots=True)
class KeyLocations:
    """The places where keys were written; comparisons of runs ignore them.

    by_path: the places of keys that were written; all other keys have the place `source`.
    """

    source: str = field(default="", compare=False)
    by_path: Mapping[tuple[str | int, ...], SourceLocation] = field(
        default_factory=dict[tuple[str | int, ...], SourceLocation], compare=False
    )

    def of(self, path: tuple[str | int, ...]) -> SourceLocation:
        """Return the place of `path`, or of the nearest enclosing section."""
        around = (path[:end] for end in range(len(path), 0, -1))
        return next(
            (self.by_path[p] for p in around if p in self.by_path), SourceLocation(self.source)
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem, e.g. run.yaml:7: parallel.tensr: unknown key; ..."""

    file: str
    line: int | None
    path: str
    text: str

    def __str__(self) -> str:
        location = f"{self.file}:{self.line}" if self.line else self.file
        names_path = f"{self.path}=" in self.file  # an override repeats its own path
        parts = (location, "" if names_path else self.path, self.text)
        text = ": ".join(part for part in parts if part)
        # One line that every terminal can show, whatever characters the file holds.
        text = text if len(text) <= _MAX_LINE else f"{text[:_MAX_LINE]}..."
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class ConfigErrors(ConfigError):
    """All problems of one configuration; `problems` holds them in file order."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems: tuple[Problem, ...] = tuple(problems)
        many = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{many} in {source}:", *(f"  {p}" for p in self.problems)]))

    def __reduce__(self) -> tuple[type["ConfigErrors"], tuple[str, tuple[Problem, ...]]]:
        # Unpickling calls __init__ with the arguments of Exception, the text; ours takes others.
        return type(self), (self.source, self.problems)


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the valid name that is most similar to `name`, or None if none is close.

    cutoff: smallest similarity (ratio of difflib) that counts as close.
    """
    return next(iter(difflib.get_close_matches(name.lower(), list(names), 1, cutoff)), None)

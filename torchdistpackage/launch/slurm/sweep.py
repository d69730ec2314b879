"""Many runs from one configuration: which values go together, and what each run is called.

One rule: a task of the array is a run like any other, with a folder and a configuration of its own;
what they share is only the batch script.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchdistpackage.errors import ConfigError

MAX_RUNS = 1000
"""As many tasks as Slurm takes in one array where nobody changed its limit."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What the runs of one array share. max_parallel: how many may run at a time; None: all."""

    folder: Path
    max_parallel: int | None = None

    @property
    def script(self) -> Path:
        return self.folder / "sweep.sbatch"

    def log(self, index: int) -> Path:
        """A link to the main log of a task's run: Slurm knows only the index."""
        return self.folder / f"{index}.log"


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep. suffix: of its name. overrides: `section.key=value`."""

    suffix: str
    overrides: tuple[str, ...]


def points(sweeps: Sequence[str]) -> tuple[SweepRun, ...]:
    """Every combination of `key=value,value` texts, the last key varying fastest.

    Raises:
        ConfigError: a text is none, a key or value comes twice, or there are too many runs.
    """
    axes = [_axis(text) for text in sweeps]
    keys = [key for key, _ in axes]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ConfigError(f"--sweep {twice[0]} is given twice; put all values behind one of them")
    found: dict[str, SweepRun] = {}
    for values in itertools.product(*(values for _, values in axes)):
        pairs = list(zip(keys, values, strict=True))
        suffix = "-".join(f"{key.rpartition('.')[2]}={_fit(value)}" for key, value in pairs)
        if suffix in found:
            raise ConfigError(
                f"--sweep makes two runs with the name ending in {suffix}; remove one"
            )
        found[suffix] = SweepRun(suffix, tuple(f"{key}={value}" for key, value in pairs))
        if len(found) > MAX_RUNS:
            raise ConfigError(f"--sweep makes more than {MAX_RUNS} runs; sweep fewer values")
    return tuple(found.values())


def _axis(text: str) -> tuple[str, list[str]]:
    key, equals, values = (part.strip() for part in text.partition("="))
    found = _split(values)
    if not key or not equals or not all(found):
        raise ConfigError(f"--sweep {text}: write it as section.key=value,value")
    if key in ("run.name", "run.dir") or key.startswith("launch."):
        raise ConfigError(
            f"--sweep {key}: the runs of an array share their job; submit them one by one"
        )
    return key, found


def _split(text: str) -> list[str]:
    """At the commas that are in no bracket and no quotes: a value may be a list."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _fit(value: str) -> str:
    """A value as a part of a folder's name."""
    return re.sub(r"[^\w.+=@-]+", "_", value).strip("_")

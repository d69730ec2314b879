"""Which checkpoints of a run stay, and why each does. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchdistpackage.checkpoint.manifest import Fact, read_manifest


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept of complete checkpoints; the rest is removed after a save or a resume.

    last: how many of the newest. every: steps of which all multiples stay; 0: none by that. best:
    the fact whose smallest value stays, such as `val_loss`; None: none by that.
    """

    last: int = 2
    every: int = 0
    best: str | None = None


def reasons(keep: Retention, newest_first: Sequence[Path]) -> dict[Path, list[str]]:
    """What each complete checkpoint is kept by, none if it goes.

    newest_first: complete ones; the first is kept in any case.
    """
    found: dict[Path, list[str]] = {path: [] for path in newest_first}
    for path in newest_first[: max(keep.last, 1)]:
        found[path].append(f"keep_last={keep.last}")
    if not keep.every and keep.best is None:
        return found
    manifests = {path: read_manifest(path) for path in newest_first}
    for path, manifest in manifests.items():
        if keep.every and manifest.step % keep.every == 0:
            found[path].append(f"keep_every={keep.every}")
    if keep.best is not None:
        values = {path: value_of(x.facts, keep.best) for path, x in manifests.items()}
        values = {path: value for path, value in values.items() if not math.isnan(value)}
        if values:
            found[min(values, key=values.__getitem__)].append(f"keep_best={keep.best}")
    return found


def value_of(facts: Mapping[str, Fact], name: str) -> float:
    """A number among the facts of a checkpoint; NaN if there is none."""
    value = facts.get(name)
    return float(value) if isinstance(value, int | float) else math.nan

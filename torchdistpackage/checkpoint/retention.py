"""Rules that decide which checkpoints of a run stay, with the reason for each. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchdistpackage.checkpoint.manifest import Fact, read_manifest

BEST_STEP = "best_step"
"""Fact of a checkpoint: while it is the newest, the checkpoint of this step stays too."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules for keeping complete checkpoints; a save or a resume removes the others.

    last: number of newest checkpoints to keep.
    every: keep the steps that are multiples of it; 0: no such rule.
    best: keep the checkpoint with the smallest value of this fact, such as `val_loss`; None: no
        such rule.
    """

    last: int = 2
    every: int = 0
    best: str | None = None


def reasons(
    keep: Retention, newest_first: Sequence[Path], best_step: Fact = None
) -> dict[Path, list[str]]:
    """Return the rules that keep each complete checkpoint; an empty list if none does.

    newest_first: complete checkpoints; the first is always kept. best_step: fact BEST_STEP of the
    first.
    """
    rules: dict[Path, list[str]] = {path: [] for path in newest_first}
    for path in newest_first[: max(keep.last, 1)]:
        rules[path].append(f"keep_last={keep.last}")
    if not keep.every and keep.best is None and best_step is None:
        return rules
    manifests = {path: read_manifest(path) for path in newest_first}
    for path, manifest in manifests.items():
        if keep.every and manifest.step % keep.every == 0:
            rules[path].append(f"keep_every={keep.every}")
        if manifest.step == best_step:
            rules[path].append(BEST_STEP)
    if keep.best is not None:
        values = {path: value_of(x.facts, keep.best) for path, x in manifests.items()}
        values = {path: value for path, value in values.items() if not math.isnan(value)}
        if values:
            rules[min(values, key=values.__getitem__)].append(f"keep_best={keep.best}")
    return rules


def value_of(facts: Mapping[str, Fact], name: str) -> float:
    """Return a number among the facts of a checkpoint; NaN if it is missing or not a number."""
    value = facts.get(name)
    return float(value) if isinstance(value, int | float) else math.nan

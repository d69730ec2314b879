"""Find the module that receives a right gradient and passes back a wrong one.

A wrong gradient of a parameter is often the consequence of a later module, such as one whose input
gradient is not summed over tensor ranks. The gradients of inputs and outputs show which one it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from torchdistpackage.equivalence.match import TOLERANCE, difference
from torchdistpackage.equivalence.record import ParityRecord

Wrong = tuple[float, int]
"""The largest relative difference of a gradient, and the rank that has it."""


class WrongBackward(NamedTuple):
    """A module with a wrong backward. difference: relative to the largest number."""

    module: str
    difference: float
    rank: int


def backward_culprit(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Mapping[str, int]
) -> WrongBackward | None:
    """Return the module whose backward is wrong; None if there is none.

    Partial gradients are right inside a module that sums them, so a module counts only if modules
    beside it get a wrong gradient too.
    """
    wrong, got_wrong = dict[str, Wrong](), set[str]()
    factors = [_factors_of(record, reference, axes) for record in ranks]
    for name in reference.modules:
        for rank, record in enumerate(ranks):
            if name in record.modules:
                verdict = _turned(record, reference, name, factors[rank])
                if verdict == "given":
                    got_wrong.add(name)
                elif isinstance(verdict, float):
                    wrong[name] = max(wrong.get(name, (0.0, rank)), (verdict, rank))
    culprits = {
        m for m in wrong if any(not _is_inside(p, m) and not _is_inside(m, p) for p in got_wrong)
    }
    module = ""
    while inner := [x for x in _below(module, reference) if x in culprits]:
        module = inner[-1]  # the backward comes to the last one first
        if _is_partial(reference, ranks, module):
            break
    return WrongBackward(module, *wrong[module]) if module else None


def _turned(
    record: ParityRecord, reference: ParityRecord, name: str, factors: Sequence[float]
) -> float | str | None:
    """Return how wrong the gradient is that a rank's module passes back although it received a
    right one.

    The answer is "given" if it got a wrong one, and None if neither holds or nothing is known.
    """
    calls, full = record.modules[name], reference.modules[name]
    if not calls.output_grads or len(calls.output_grads) != len(full.output_grads):
        return None
    if not any(bool(x.any()) for x in full.output_grads):
        return None
    fits = [f for f in factors if _apart(calls.output_grads, full.output_grads, f) == 0.0]
    if not fits:
        return "given"
    if not calls.input_grads or len(calls.input_grads) != len(full.input_grads):
        return None
    return min(_apart(calls.input_grads, full.input_grads, f) for f in fits) or None


def _factors_of(
    record: ParityRecord, reference: ParityRecord, axes: Mapping[str, int]
) -> list[float]:
    """Return the factors by which the gradients of a rank may differ: those that fit what the
    module next to its loss gets, as a backward has one loss; all of them, if none does.
    """
    every = list(_factors(axes))
    for name in reversed(reference.modules):
        full = reference.modules[name].output_grads
        theirs = record.modules[name].output_grads if name in record.modules else []
        if len(theirs) == len(full) and any(bool(x.any()) for x in theirs):
            return [f for f in every if _apart(theirs, full, f) == 0.0] or every
    return every


def _factors(axes: Mapping[str, int]) -> Iterator[float]:
    """Yield the factors by which a rank's loss may differ from that of one process, as a mean over
    a part.
    """
    yield 1.0
    for size in {*axes.values(), prod(axes.values())} - {1}:
        yield from (float(size), 1.0 / size)


def _apart(shards: Sequence[Tensor], full: Sequence[Tensor], factor: float) -> float:
    """Return the largest difference of these gradients divided by `factor`; 0 within the
    tolerance.
    """
    differences = [difference(a / factor, b) for a, b in zip(shards, full, strict=True)]
    worst = max((x for x in differences if x is not None), default=0.0)
    return worst if worst > TOLERANCE else 0.0


def _is_partial(reference: ParityRecord, ranks: Sequence[ParityRecord], name: str) -> bool:
    """Return True if the ranks' gradients of a module's inputs add up to the full one."""
    full = reference.modules[name].input_grads
    by_rank = [r.modules[name].input_grads for r in ranks if name in r.modules]
    if len(by_rank) < 2 or any(
        [x.shape for x in grads] != [x.shape for x in full] for grads in by_rank
    ):
        return False
    sums = [sum(parts, start=0 * parts[0]) for parts in zip(*by_rank, strict=True)]
    return _apart(sums, full, 1.0) == 0.0


def _is_inside(name: str, other: str) -> bool:
    """Return True if the module `name` is `other` or inside it."""
    return name == other or other == "" or name.startswith(f"{other}.")


def _below(parent: str, reference: ParityRecord) -> Iterator[str]:
    """Yield the known modules inside another one, with no known one between, in their order."""
    inside = [x for x in reference.modules if x not in ("", parent) and _is_inside(x, parent)]
    for name in inside:
        if not any(name != x and _is_inside(name, x) for x in inside):
            yield name

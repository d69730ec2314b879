"""Where a wrong gradient begins: the module that gets a right one and passes a wrong one back.

A wrong gradient of a parameter is often the consequence of a module after it, such as one whose
input is not summed over tensor ranks on the way back. Gradients of what modules got and gave say
which one that is.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from torch import Tensor

from torchdistpackage.equivalence.match import TOLERANCE, difference
from torchdistpackage.equivalence.record import ParityRecord

Wrong = tuple[float, int]
"""How far, over the largest number, and the rank."""


def backward_culprit(
    whole: ParityRecord, ranks: Sequence[ParityRecord], axes: Mapping[str, int]
) -> tuple[str, float, int] | None:
    """The module whose backward is wrong, how far, and on which rank; None if none is.

    Parts of a sum are right inside a module that adds them up, so a module is one only where others
    get a wrong gradient too.
    """
    wrong, given = dict[str, Wrong](), set[str]()
    for name in whole.modules:
        for rank, record in enumerate(ranks):
            if name in record.modules:
                found = _turned(record, whole, name, axes)
                if found == "given":
                    given.add(name)
                elif isinstance(found, float):
                    wrong[name] = max(wrong.get(name, (0.0, rank)), (found, rank))
    real = {m for m in wrong if any(not _is_inside(p, m) and not _is_inside(m, p) for p in given)}
    at = ""
    while inner := [x for x in _below(at, whole) if x in real]:
        at = inner[-1]  # the backward comes to the last one first
        if _is_partial(whole, ranks, at):
            break
    return (at, *wrong[at]) if at else None


def _turned(
    record: ParityRecord, whole: ParityRecord, name: str, axes: Mapping[str, int]
) -> float | str | None:
    """How wrong a gradient a rank's module passes back for a right one; "given" if it got a wrong
    one; None: neither, or nothing is known."""
    mine, full = record.modules[name], whole.modules[name]
    if not mine.output_grads or len(mine.output_grads) != len(full.output_grads):
        return None
    if not any(bool(x.any()) for x in full.output_grads):
        return None
    fits = [f for f in _factors(axes) if _apart(mine.output_grads, full.output_grads, f) == 0.0]
    if not fits:
        return "given"
    if not mine.input_grads or len(mine.input_grads) != len(full.input_grads):
        return None
    return min(_apart(mine.input_grads, full.input_grads, f) for f in fits) or None


def _factors(axes: Mapping[str, int]) -> Iterator[float]:
    """Of a rank's loss over that of one process, as a mean over a part of the samples has it."""
    yield 1.0
    for size in {*axes.values(), prod(axes.values())} - {1}:
        yield from (float(size), 1.0 / size)


def _apart(mine: Sequence[Tensor], full: Sequence[Tensor], factor: float) -> float:
    found = [difference(a / factor, b) for a, b in zip(mine, full, strict=True)]
    worst = max((x for x in found if x is not None), default=0.0)
    return worst if worst > TOLERANCE else 0.0


def _is_partial(whole: ParityRecord, ranks: Sequence[ParityRecord], name: str) -> bool:
    """Whether the ranks' gradients of what a module got add up to the whole one."""
    full = whole.modules[name].input_grads
    held = [r.modules[name].input_grads for r in ranks if name in r.modules]
    if len(held) < 2 or any([x.shape for x in grads] != [x.shape for x in full] for grads in held):
        return False
    sums = [sum(parts, start=0 * parts[0]) for parts in zip(*held, strict=True)]
    return _apart(sums, full, 1.0) == 0.0


def _is_inside(name: str, other: str) -> bool:
    return name == other or other == "" or name.startswith(f"{other}.")


def _below(parent: str, whole: ParityRecord) -> Iterator[str]:
    """Known modules inside another one, with no known one between, in their order."""
    inside = [x for x in whole.modules if x not in ("", parent) and _is_inside(x, parent)]
    for name in inside:
        if not any(name != x and _is_inside(name, x) for x in inside):
            yield name

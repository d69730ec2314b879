"""A range of a flattened shard as boxes of the global tensor: what a slice of ZeRO holds. No torch.

One rule: [start, stop) of a row-major tensor is a few boxes, at most two for each dim, every one of
them contiguous; where each lies in the global tensor follows from the layout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchdistpackage.layout.derive import blocks, local_shape
from torchdistpackage.layout.layout import Layout
from torchdistpackage.topology.mesh import Mesh

Shape = tuple[int, ...]
Box = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """The elements from `start` on of a flattened tensor are its box [offset, offset + lengths)."""

    start: int
    offset: Shape
    lengths: Shape

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.lengths)


@dataclass(frozen=True, slots=True)
class Part:
    """`where` in the global tensor are the elements `inside` a run, seen in the run's own shape.

    The dims of the run are those of memory, which `where` has in the tensor's own order.
    """

    where: Box
    run: Run
    inside: Box


def runs(shape: Shape, start: int, stop: int) -> tuple[Run, ...]:
    """Boxes that tile elements [start, stop) of a tensor of `shape`, in their order.

    Of (4, 6), [4, 16) is [0, 4:6], [1:2, 0:6] and [2, 0:4].
    """
    if stop <= start:
        return ()
    if not shape:
        return (Run(start, (), ()),)
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return _in_row(shape, first, head, tail)
    found = _in_row(shape, first, head, row) if head else ()
    first += head > 0
    if first < last:
        others = (0,) * (len(shape) - 1)
        found += (Run(first * row, (first, *others), (last - first, *shape[1:])),)
    return found + _in_row(shape, last, 0, tail)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> tuple[Run, ...]:
    base = row * math.prod(shape[1:])
    return tuple(
        Run(base + run.start, (row, *run.offset), (1, *run.lengths))
        for run in runs(shape[1:], start, stop)
    )


def parts(
    layout: Layout,
    mesh: Mesh,
    rank: int,
    start: int,
    stop: int,
    order: Sequence[int] | None = None,
) -> tuple[Part, ...]:
    """Where elements [start, stop) of the flattened shard of `rank` lie in the global tensor.

    order: its dims from the slowest varying in memory to the fastest; default their own. Several
    parts a run where a dim is fused, because its ranges lie apart.
    """
    shape = local_shape(layout, mesh, rank)
    order = range(len(shape)) if order is None else order
    found: list[Part] = []
    boxes = blocks(layout, mesh, rank)
    for run in runs(tuple(shape[dim] for dim in order), start, stop):
        held = tuple(slice(o, o + n) for o, n in zip(run.offset, run.lengths, strict=True))
        for where, local in boxes:
            common = overlap(held, tuple(local[dim] for dim in order))
            if common is not None:
                at = list(where)
                for dim, c in zip(order, common, strict=True):
                    at[dim] = shifted(c, where[dim].start - local[dim].start)
                inside = tuple(shifted(c, -o) for c, o in zip(common, run.offset, strict=True))
                found.append(Part(tuple(at), run, inside))
    return tuple(found)


def overlap(a: Box, b: Box) -> Box | None:
    """The box that two boxes of one tensor have in common; None without any element."""
    common = tuple(
        slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)
    )
    return None if any(s.stop <= s.start for s in common) else common


def shifted(range_: slice, by: int) -> slice:
    return slice(range_.start + by, range_.stop + by)

"""Reordering of a tensor along its sequence, by position or by rank, without communication."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchdistpackage.parallel.context.order import Ranges, SequenceOrder
from torchdistpackage.parallel.context.visibility import places


def by_rank(x: Tensor, dim: int, order: SequenceOrder) -> Tensor:
    """Return the full sequence `x` with the slices of the ranks one after another."""
    present = in_ranks(order.parts)
    return reordered(x, dim, ascending(present), present)


def by_position(x: Tensor, dim: int, order: SequenceOrder) -> Tensor:
    """Return `x` in the order of positions, the inverse of `by_rank`."""
    present = in_ranks(order.parts)
    return reordered(x, dim, present, ascending(present))


def in_ranks(parts: Iterable[Ranges]) -> list[range]:
    """Return the ranges of all parts, rank after rank."""
    return [each for part in parts for each in part]


def ascending(ranges: Iterable[range]) -> list[range]:
    """Return the ranges in the order of positions."""
    return sorted(ranges, key=lambda each: each.start)


def reordered(x: Tensor, dim: int, present: Sequence[range], target: Sequence[range]) -> Tensor:
    """Return `x` reordered along `dim` from the ranges `present` to the ranges `target`."""
    if list(present) == list(target):
        return x
    slices = dict(zip(present, places(tuple(present)), strict=True))
    return torch.cat([x.narrow(dim, slices[each].start, len(each)) for each in target], dim)

"""The order of a tensor along its sequence: by position, or rank after rank; nothing is sent."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchdistpackage.parallel.context.order import Ranges, SequenceOrder
from torchdistpackage.parallel.context.visibility import places


def by_rank(x: Tensor, dim: int, order: SequenceOrder) -> Tensor:
    """The whole `x` with the parts of all ranks after one another."""
    present = in_ranks(order.parts)
    return reordered(x, dim, ascending(present), present)


def by_position(x: Tensor, dim: int, order: SequenceOrder) -> Tensor:
    """The inverse of `by_rank`."""
    present = in_ranks(order.parts)
    return reordered(x, dim, present, ascending(present))


def in_ranks(parts: Iterable[Ranges]) -> list[range]:
    return [each for part in parts for each in part]


def ascending(ranges: Iterable[range]) -> list[range]:
    return sorted(ranges, key=lambda each: each.start)


def reordered(x: Tensor, dim: int, present: Sequence[range], wanted: Sequence[range]) -> Tensor:
    """`x`, which has the positions `present` along `dim`, in the order of `wanted`."""
    if list(present) == list(wanted):
        return x
    where = dict(zip(present, places(tuple(present)), strict=True))
    return torch.cat([x.narrow(dim, where[each].start, len(each)) for each in wanted], dim)

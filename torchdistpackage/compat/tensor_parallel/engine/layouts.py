"""The layouts of the parameters of a shard: for norms of gradients and for checkpoints.

A cut into equal runs of a dim, or of equal fused parts, is a layout by its rule. Any other cut that
deals the places of one dim says for each shard which it holds; a bias that the first shard holds is
padding on the others. Checkpoints of these load under any number of shards. Parts that a user's
function makes, and scaled numbers, are joined one behind the other, under a name that has the
number of shards; their checkpoints load under that number only.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from torchdistpackage.compat.tensor_parallel.engine.actions import (
    FirstOnly,
    Split,
    SplitInChunks,
    SplitInGroupedChunks,
    StateAction,
    TakeChunks,
    Whole,
)
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.layout import Layout, Ranges

AXIS = "tensor"
DEALING = (Split, SplitInChunks, SplitInGroupedChunks, TakeChunks)
"""Actions that distribute the positions of their dim, whatever their values."""


def layout_of_cut(name: str, tensor: Tensor, action: StateAction, num: int) -> Layout:
    """Return the layout of what `action` makes of the parameter `name` for `num` shards.

    Raises:
        LayoutError: it is a number without dims, and not the same on all shards.
    """
    shape = tuple(tensor.shape)
    if isinstance(action, Whole):
        return Layout(name, shape)
    if not shape:
        raise LayoutError(f"{name} is a number, which {action!r} cannot cut; leave it whole")
    if isinstance(action, FirstOnly):
        first, padding = ((0, shape[0]),), ((shape[0], 2 * shape[0]),)
        return Layout(name, shape, at(0, shape), ranges=(first, *[padding] * (num - 1)))
    if type(action) not in DEALING:
        return one_behind_the_other(name, tensor, action, num)
    dim = getattr(action, "dim", 0) % len(shape)
    places = torch.arange(shape[dim]).view([-1 if d == dim else 1 for d in range(len(shape))])
    dealt = [action(places, rank=rank).flatten() for rank in range(num)]
    if len({len(indices) for indices in dealt}) == 1:
        groups = action.num_groups if isinstance(action, SplitInGroupedChunks) else 1
        parts = [()] * len(shape)
        if groups > 1:
            parts[dim] = (shape[dim] // groups,) * groups
        in_runs = torch.cat([indices.view(groups, -1) for indices in dealt], 1).flatten()
        if torch.equal(in_runs, places.flatten()):
            return Layout(name, shape, at(dim, shape), parts=tuple(parts))
    return Layout(name, shape, at(dim, shape), ranges=ranges_of(dealt))


def one_behind_the_other(name: str, tensor: Tensor, action: StateAction, num: int) -> Layout:
    outline = torch.empty_like(tensor, device="meta")
    shapes = [tuple(action(outline, rank=rank).shape) for rank in range(num)]
    dims = range(tensor.dim())
    dim = next((dim for dim in dims if len({shape[dim] for shape in shapes}) > 1), 0)
    ends = tuple(accumulate((shape[dim] for shape in shapes), initial=0))
    joined = (*shapes[0][:dim], ends[-1], *shapes[0][dim + 1 :])
    ranges = tuple((each,) for each in pairwise(ends))
    return Layout(f"{name} of {num} shards", joined, at(dim, joined), ranges=ranges)


def at(dim: int, shape: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    return tuple((AXIS,) if d == dim else () for d in range(len(shape)))


def ranges_of(dealt: Sequence[Tensor]) -> tuple[Ranges, ...]:
    """Return the runs of positions that each shard holds; runs that overlap begin and end
    equally.
    """
    runs = [
        [
            (int(run[0]), int(run[-1]) + 1)
            for run in of_rank.tensor_split((of_rank.diff() != 1).nonzero().flatten() + 1)
            if len(run)
        ]
        for of_rank in dealt
    ]
    ends = sorted({end for of_rank in runs for run in of_rank for end in run})
    return tuple(
        tuple(
            piece
            for start, stop in of_rank
            for piece in pairwise(end for end in ends if start <= end <= stop)
        )
        for of_rank in runs
    )

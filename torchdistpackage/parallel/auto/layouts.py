"""How the parameters of a shard are cut, as layouts: for norms of gradients and for checkpoints.

A cut into equal runs of a dim, or of equal fused parts, is the layout of the whole parameter, whose
checkpoints load under any number of shards. Any other cut is noted as what it is to the shards: one
part behind the other, under a name that says of how many. Its checkpoints load under that number.
"""

import torch
from torch import Tensor

from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import mark_counted
from torchdistpackage.parallel.auto.actions import (
    Split,
    SplitInChunks,
    SplitInGroupedChunks,
    StateAction,
    TakeChunks,
)

AXIS = "tensor"


def layout_of_cut(name: str, tensor: Tensor, action: StateAction, num: int) -> Layout:
    """The layout of what `action` makes of the parameter `name` for `num` shards."""
    outline = torch.empty_like(tensor, device="meta")
    shapes = [tuple(action(outline, rank=rank).shape) for rank in range(num)]
    shape, dim = tuple(tensor.shape), dim_of(action, tensor)
    if len(set(shapes)) == 1 and is_in_runs(action) and shapes[0][dim] * num == shape[dim]:
        groups = action.num_groups if isinstance(action, SplitInGroupedChunks) else 1
        parts = [()] * len(shape)
        if groups > 1:
            parts[dim] = (shape[dim] // groups,) * groups
        return Layout(name, shape, split_at(dim, len(shape)), parts=tuple(parts))
    widest = max(each[dim] for each in shapes)
    joined = (*shape[:dim], widest * num, *shape[dim + 1 :])
    return Layout(f"{name} of {num} shards", joined, split_at(dim, len(shape)))


def split_at(dim: int, num_dims: int) -> tuple[tuple[str, ...], ...]:
    return tuple((AXIS,) if at == dim else () for at in range(num_dims))


def dim_of(action: StateAction, tensor: Tensor) -> int:
    dim: int = getattr(action, "dim", 0)
    return dim % tensor.dim()


def is_in_runs(action: StateAction) -> bool:
    """Whether the shards have the elements in their order, each once."""
    if isinstance(action, TakeChunks):
        held = [chunk for mine in action.chunks for chunk in mine]
        return held == list(range(action.num_chunks))
    return type(action) in (Split, SplitInChunks, SplitInGroupedChunks)


def note_counted(parameter: Tensor, action: StateAction, rank: int) -> None:
    """Let norms count each chunk that several shards hold, or one holds twice, once."""
    if not isinstance(action, TakeChunks) or not action.is_shared:
        return
    known = {chunk for mine in action.chunks[:rank] for chunk in mine}
    rows: list[int] = []
    for at, chunk in enumerate(action.chunks[rank]):
        if chunk not in known:
            known.add(chunk)
            rows += range(at * action.chunk_size, (at + 1) * action.chunk_size)
    mark_counted(parameter, dim_of(action, parameter), torch.tensor(rows, dtype=torch.int64))

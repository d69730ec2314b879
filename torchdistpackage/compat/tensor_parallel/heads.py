"""Functions for plans of one's own: what of heads, and of caches of them, a rank has."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.parallel.auto.actions import SplitInChunks
from torchdistpackage.parallel.auto.caches import PerDeviceTensors
from torchdistpackage.parallel.auto.nested import nested_map


def gather_kv(*present_key_value_state: Any, world_size: int) -> Sequence[Any]:
    """For a `CollectiveOperation`: the shards' tuples of tensors, as one of `PerDeviceTensors`."""
    if present_key_value_state[0] is None:
        return present_key_value_state
    columns = zip(*present_key_value_state, strict=True)
    return [tuple(PerDeviceTensors(*column) for column in columns)] * world_size


def select_kv_for_rank(present_key_value_state: Any, rank: int) -> Any:
    """The structure with the tensor of `rank` in place of each `PerDeviceTensors`."""
    chosen = partial(_of_rank, rank=rank)
    return nested_map(chosen, present_key_value_state)


def _of_rank(value: Any, rank: int) -> Any:
    return value[rank] if isinstance(value, PerDeviceTensors) else value


def split_heads(
    tensor: Tensor | None,
    *,
    dim: int,
    head_dim: int,
    rank: int,
    world_size: int,
    optional: bool = False,
) -> Tensor | None:
    """The heads of `rank` along `dim`; none is an empty tensor of the same dtype and device.

    Raises:
        LayoutError: the dim is no multiple of head_dim.
    """
    cut: Any = SplitInChunks(world_size, dim, head_dim, optional)
    return cut(tensor, rank)


def split_num_heads(num_heads: int, *, rank: int, world_size: int) -> int:
    """How many of `num_heads` heads `rank` has; 1 where there are too few, as modules need one."""
    return even_sizes(num_heads, world_size)[rank] or 1


def split_inner_dim(inner_dim: int, *, rank: int, num_heads: int, world_size: int) -> int:
    """Elements of the heads of `rank`, of `inner_dim` in all."""
    return split_num_heads(num_heads, rank=rank, world_size=world_size) * (inner_dim // num_heads)


def split_alibi(alibi: Tensor, *, rank: int, num_heads: int, world_size: int) -> Tensor:
    """Of position biases (batch x num_heads, ...) those of the heads of `rank`."""
    by_head = alibi.unflatten(0, (-1, num_heads))
    return torch.tensor_split(by_head, world_size, 1)[rank].flatten(0, 1)

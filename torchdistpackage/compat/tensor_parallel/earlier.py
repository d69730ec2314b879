"""Earlier spellings of tensor_parallel's names, and functions for your own plans.

One class serves the threads of all devices. Of heads, and of caches of them, the functions say what
a rank has. A class that needs transformers is made when it is asked for.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.compat.tensor_parallel.engine.actions import FunctionAction, SplitInChunks
from torchdistpackage.compat.tensor_parallel.engine.ops import CollectiveBase
from torchdistpackage.compat.tensor_parallel.nested import nested_map
from torchdistpackage.compat.tensor_parallel.plans import TensorParallelConfig
from torchdistpackage.compat.tensor_parallel.pretrained import tensor_parallel_pretrained
from torchdistpackage.compat.tensor_parallel.rendezvous import ThreadGather, ThreadSum
from torchdistpackage.compat.tensor_parallel.thread_caches import PerDeviceTensors
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.parallel.auto.reporting import LOG

Config = TensorParallelConfig
LegacyStateAction = FunctionAction
CollectiveOpetationBase = CollectiveBase
AllReduce = ThreadSum
AllGather = ThreadGather


def NCCLAllReduce(world_size: int) -> ThreadSum:
    """Return the sum over threads."""
    return ThreadSum(world_size)


def NCCLAllGather(world_size: int, dim: int) -> ThreadGather:
    """Return the threads' tensors joined along `dim`."""
    return ThreadGather(world_size, dim=dim)


def __getattr__(name: str) -> object:
    if name != "TensorParallelPreTrainedModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return tensor_parallel_pretrained()


def Sharded(module: Any, sharded_param_names: Collection[str] | None = None) -> Any:
    """Return `module` after `module.apply_sharding(sharded_param_names)`."""
    LOG.warning("Sharded(model) is an earlier spelling; use model.apply_sharding()")
    module.apply_sharding(sharded_param_names)
    return module


def gather_kv(*present_key_value_state: Any, world_size: int) -> Sequence[Any]:
    """Gather for a `CollectiveOperation`: return the shards' tuples of tensors, as one of
    `PerDeviceTensors`.
    """
    if present_key_value_state[0] is None:
        return present_key_value_state
    columns = zip(*present_key_value_state, strict=True)
    return [tuple(PerDeviceTensors(*column) for column in columns)] * world_size


def select_kv_for_rank(present_key_value_state: Any, rank: int) -> Any:
    """Return the structure with the tensor of `rank` in place of each `PerDeviceTensors`."""
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
    """Return the heads of `rank` along `dim`; none is an empty tensor of the same dtype and device.

    Raises:
        LayoutError: the dim is not a multiple of head_dim.
    """
    cut: Any = SplitInChunks(world_size, dim, head_dim, optional)
    return cut(tensor, rank)


def split_num_heads(num_heads: int, *, rank: int, world_size: int) -> int:
    """Return how many of `num_heads` heads `rank` has; 1 where there are too few, as modules need
    one.
    """
    return even_sizes(num_heads, world_size)[rank] or 1


def split_inner_dim(inner_dim: int, *, rank: int, num_heads: int, world_size: int) -> int:
    """Return the number of elements in the heads of `rank`, where all heads have `inner_dim`."""
    return split_num_heads(num_heads, rank=rank, world_size=world_size) * (inner_dim // num_heads)


def split_alibi(alibi: Tensor, *, rank: int, num_heads: int, world_size: int) -> Tensor:
    """Return the position biases (batch x num_heads, ...) of the heads of `rank`."""
    by_head = alibi.unflatten(0, (-1, num_heads))
    return torch.tensor_split(by_head, world_size, 1)[rank].flatten(0, 1)

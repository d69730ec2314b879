"""Collectives as a user would write them with torch.distributed alone.

Our calls are measured against these. Results that are new tensors are allocated in the call, as in
ours.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.primitives import Group

# torch 2.13 renamed the flat collectives; the older names warn there
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, group: Group) -> Tensor:
    dist.all_reduce(x, group=group)
    return x


def all_gather(x: Tensor, group: Group) -> Tensor:
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    _gather_into(out, x, group=group)
    return out


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    _scatter_into(out, x, group=group)
    return out


def all_to_all(x: Tensor, group: Group) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def broadcast(x: Tensor, group: Group) -> Tensor:
    dist.broadcast(x, dist.get_global_rank(group, 0), group=group)
    return x

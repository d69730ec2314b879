"""The calls that a user would write with torch.distributed alone: what ours are measured against.

One rule: nothing is added and nothing left out. Results that are new tensors are allocated in the
call, as ours are; there is no record, no check and no shortcut for groups of one.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.primitives import Group, gather_into, scatter_into


def all_reduce(x: Tensor, group: Group) -> Tensor:
    dist.all_reduce(x, group=group)
    return x


def all_gather(x: Tensor, group: Group) -> Tensor:
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    gather_into(out, x, group=group)
    return out


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    scatter_into(out, x, group=group)
    return out


def all_to_all(x: Tensor, group: Group) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def broadcast(x: Tensor, group: Group) -> Tensor:
    """From the group's first rank."""
    dist.broadcast(x, dist.get_global_rank(group, 0), group=group)
    return x


def send(x: Tensor, group: Group, target: int) -> None:
    dist.send(x, target, group=group)


def receive(x: Tensor, group: Group, source: int) -> Tensor:
    dist.recv(x, source, group=group)
    return x


def send_and_receive(x: Tensor, room: Tensor, group: Group, peer: int) -> Tensor:
    """Both ways at once with one peer."""
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, room, peer, group), dist.P2POp(dist.isend, x, peer, group)]
    )
    for work in works:
        work.wait()
    return room


COLLECTIVES: dict[str, Callable[[Tensor, Group], Tensor]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
}
"""By the names of harness/operations.py."""

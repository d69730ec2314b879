"""torchshard's groups, which are the tensor groups of `tpc`, and sums over them.

This module keeps no state. `init_process_group` sets `tpc` (data x tensor); a group may be smaller
than the world, and ranks and sizes are those of the group. A sum overwrites its input unless that
needs a gradient: autograd may have saved it, so the sum is then a new tensor.
"""

import torch
from torch import Tensor

from torchdistpackage.comm import collectives, primitives
from torchdistpackage.comm.creation import is_joined, world
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.errors import LaunchError, TopologyError


def init_process_group(group_size: int = -1) -> None:
    """Cut the world into groups of `group_size` neighbours; -1 or a larger size means all ranks.

    Raises:
        LaunchError: torch.distributed is not initialised, or there are groups already.
        TopologyError: `group_size` does not divide the world.
    """
    world_size = world("torch.distributed.init_process_group()").size()
    if is_initialized():
        raise LaunchError(
            f"model parallel groups of {get_group_size()} ranks are there already; call "
            f"destroy_process_group() before"
        )
    if type(group_size) is not int or (group_size < 1 and group_size != -1):
        raise TopologyError(
            f"group_size is {group_size!r}; use a divisor of the {world_size} ranks, or -1 for all"
        )
    size = world_size if group_size == -1 else min(group_size, world_size)
    tpc.setup_process_groups([("data", None), ("tensor", size)])


def is_initialized() -> bool:
    """Return whether model parallel groups exist, from here or `tpc.setup_process_groups`."""
    return is_joined() and tpc.is_set


def destroy_process_group() -> None:
    """End the model parallel groups; the default group stays. Safe to repeat."""
    tpc.destroy()


def get_group() -> Group:
    """Return this rank's model parallel group.

    Raises:
        LaunchError: there is none yet.
    """
    if not is_initialized():
        raise LaunchError(
            "the model parallel groups are not initialised; call "
            "torchshard.distributed.init_process_group(group_size) first"
        )
    return resolve_group(None, "tensor")


def get_rank() -> int:
    """Return this rank's position in its group; never -1, as every rank is in a group."""
    return get_group().rank()


def get_world_size() -> int:
    """Return the number of ranks in this rank's group."""
    return get_group().size()


def get_group_size() -> int:
    """Return the number of ranks in this rank's group."""
    return get_group().size()


def all_reduce_(x: Tensor, group: Group) -> Tensor:
    """Sum `x` over the group: in place, unless it needs a gradient, which then passes through."""
    if torch.is_grad_enabled() and x.requires_grad:
        return collectives.reduce(x, group)
    return summed_in_place(x, group)


def summed_in_place(x: Tensor, group: Group) -> Tensor:
    """Overwrite `x` by its sum over the group, unseen by autograd, and return it."""
    primitives.all_reduce(x.detach(), group)
    return x

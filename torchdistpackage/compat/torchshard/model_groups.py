"""torchshard's groups: the tensor groups of `tpc`, so a group may be smaller than the world; sums.

Nothing is kept here. `init_process_group` sets `tpc` (data x tensor); ranks and sizes are those of
the group. A sum goes into the input where autograd allows it: what autograd holds is never written
to, so of an input that needs a gradient the sum is a new tensor.
"""

import torch
from torch import Tensor

from torchdistpackage.comm import collectives, primitives
from torchdistpackage.comm.creation import is_joined, world
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.errors import LaunchError, TopologyError


def init_process_group(group_size: int = -1) -> None:
    """Cut the world into groups of `group_size` neighbours; -1 and what is larger mean all ranks.

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
    """Whether there are model parallel groups, made here or by `tpc.setup_process_groups`."""
    return is_joined() and tpc.is_set


def destroy_process_group() -> None:
    """End the model parallel groups; the default group stays. Safe to repeat."""
    tpc.destroy()


def get_group() -> Group:
    """My model parallel group.

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
    """My position in my group. Never -1: every rank is in a group."""
    return get_group().rank()


def get_world_size() -> int:
    """Number of ranks in my group."""
    return get_group().size()


def get_group_size() -> int:
    """Number of ranks in my group."""
    return get_group().size()


def all_reduce_(x: Tensor, group: Group) -> Tensor:
    """The sum over the group: in `x` itself unless it needs a gradient, which then passes."""
    if torch.is_grad_enabled() and x.requires_grad:
        return collectives.reduce(x, group)
    return summed_in_place(x, group)


def summed_in_place(x: Tensor, group: Group) -> Tensor:
    """`x`, overwritten by its sum over the group and unseen by autograd."""
    primitives.all_reduce(x.detach(), group)
    return x

"""torchshard.distributed: model parallel groups, and collectives over mine that autograd can see.

One rule: nothing is kept here. `init_process_group` sets `tpc` (data x tensor), so a group may be
smaller than the world, and ranks and sizes are those of the group. Tensors are returned, not
handles.
"""

import functools
from collections.abc import Callable

from torch import Tensor

from torchdistpackage.comm import collectives
from torchdistpackage.comm.creation import is_joined, world
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.compat import paths
from torchdistpackage.compat.reduction import all_reduce_, summed_in_place
from torchdistpackage.errors import LaunchError, TopologyError

__all__ = [
    "_gather",
    "_reduce",
    "_split",
    "copy",
    "destroy_process_group",
    "gather",
    "get_group",
    "get_group_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "reduce",
    "scatter",
]

__path__: list[str] = []
"""torchshard has modules below this one, which are announced beside it."""


def __getattr__(name: str) -> object:
    return paths.lookup(__name__, name)


# -- the groups ----------------------------------------------------------------------------


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
    if group_size < 1 and group_size != -1:
        raise TopologyError(
            f"group_size is {group_size}; use a divisor of the {world_size} ranks, or -1 for all"
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


# -- seen by autograd ----------------------------------------------------------------------


def _or_input(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The pages call the first parameter `tensor`, the code `input`: both may be given by name."""

    @functools.wraps(operation)
    def call(*args: object, **kwargs: object) -> Tensor:
        if "input" in kwargs:
            kwargs["tensor"] = kwargs.pop("input")
        return operation(*args, **kwargs)

    return call


@_or_input
def scatter(tensor: Tensor, dim: int | None = -1) -> Tensor:
    """My part along `dim` of what all ranks hold alike; gradients are gathered. None: all of it."""
    group = get_group()
    return tensor if dim is None else collectives.scatter(tensor, dim, group)


@_or_input
def gather(tensor: Tensor, dim: int | None = -1) -> Tensor:
    """The parts of my group joined along `dim`; my part's gradient comes back. None: as it is."""
    group = get_group()
    return tensor if dim is None else collectives.gather(tensor, dim, group)


@_or_input
def reduce(tensor: Tensor) -> Tensor:
    """The sum over my group, in `tensor` itself unless it needs a gradient, which then passes."""
    return all_reduce_(tensor, get_group())


@_or_input
def copy(tensor: Tensor) -> Tensor:
    """The tensor itself; its gradient is summed over my group."""
    return collectives.copy(tensor, get_group())


# -- not seen by autograd ------------------------------------------------------------------


def _reduce(tensor: Tensor) -> Tensor:
    """The sum over my group, in place and returned."""
    return summed_in_place(tensor, get_group())


def _split(tensor: Tensor, dim: int | None = -1) -> Tensor:
    return scatter(tensor.detach(), dim)


def _gather(tensor: Tensor, dim: int | None = -1) -> Tensor:
    return gather(tensor.detach(), dim)

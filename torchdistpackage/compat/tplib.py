"""tplib's names, by `from torchdistpackage.compat.tplib import ...`.

One rule: this module keeps no state. `init_model_parallel` sets `tpc` (data x tensor), and every
other name reads it, so the rest of this package works with it. `src` is a global rank, `dst` a
position in the tensor parallel group.

The ranks of a `Worker` meet at a file and end together, so no ports collide and nothing is left
behind. They import a function by its name if they can. Any other function, typed in a notebook or
defined inside another, travels by value, over the private channels of `run_local` only.
"""

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

from torchdistpackage.comm import collectives, objects, primitives
from torchdistpackage.comm.collectives import as_group
from torchdistpackage.comm.creation import is_joined, world
from torchdistpackage.comm.groups import Groups, leave_cpu, on_cpu
from torchdistpackage.comm.objects import TensorMetadata
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.runtime import join, leave, setup_distributed
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.compat import paths
from torchdistpackage.compat.init_method import parse_init_method
from torchdistpackage.compat.torchshard.model_groups import all_reduce_
from torchdistpackage.errors import LaunchError, TopologyError
from torchdistpackage.launch.entrypoint import PackedCall, StopLoading, main_is_loading
from torchdistpackage.launch.workers import run_local, show_line

__all__ = [
    "TensorMetadata",
    "Worker",
    "broadcast",
    "broadcast_common",
    "broadcast_obj_list",
    "broadcast_tensor_dict",
    "create_group_and_assign",
    "destroy_dist_env",
    "destroy_model_parallel",
    "ensure_init",
    "get_cpu_world_group",
    "get_local_rank",
    "get_tp_group",
    "get_tp_rank",
    "get_tp_src_rank",
    "get_tp_world_size",
    "init_dist_env",
    "init_model_parallel",
    "model_parallel_is_initialized",
    "tp_all_gather",
    "tp_all_reduce",
    "tp_gather",
]

_WORKER = ("Worker", "init_dist_env")
_OWN = ("Worker", "destroy_dist_env")

__path__: list[str] = []
"""Makes this module a package: tplib has two modules, whose names are also its own."""

paths.announce(__name__, {})
paths.announce(f"{__name__}.worker", {"compat.tplib": _WORKER})
paths.announce(
    f"{__name__}.tensor_parallel",
    {"compat.tplib": tuple(name for name in __all__ if name not in _OWN)},
)


def __getattr__(name: str) -> object:
    return paths.lookup(__name__, name)


_INIT = "init_dist_env()"

# -- life ----------------------------------------------------------------------------------


def init_dist_env(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str = "nccl",
) -> None:
    """Join the other ranks, unless already joined; a single process is a world of 1.

    All ranks call it.

    distributed_init_method: env:// (any launcher), tcp://HOST:PORT or file://PATH.
    local_rank: default the launcher's, else the position among the ranks of this host. The GPU of
        that number becomes the current one.
    backend: "nccl", the default, means nccl if each rank has a GPU, else gloo.

    Raises:
        LaunchError: numbers are missing or contradict the existing ranks, or ranks never came.
    """
    if not is_joined():
        tpc.destroy()  # groups of a world that has ended
        rendezvous = parse_init_method(
            distributed_init_method, world_size, rank, local_rank, os.environ
        )
        join(rendezvous, backend=backend)
        local_rank = rendezvous.local_rank
    group = world()
    numbers = {"world_size": (world_size, group.size()), "rank": (rank, group.rank())}
    for name, (requested, actual) in numbers.items():
        if requested not in (-1, actual):
            raise LaunchError(
                f"init_dist_env({name}={requested}), but torch.distributed is already initialised "
                f"with {name} {actual}; leave the number out, or call destroy_dist_env() before"
            )
    if local_rank == -1 and "LOCAL_RANK" not in os.environ:
        hosts = primitives.gather_objects(socket.gethostname(), group)
        local_rank = hosts[: group.rank()].count(hosts[group.rank()])
    if local_rank != -1:
        os.environ["LOCAL_RANK"] = str(local_rank)
    on_cpu(group)


def init_model_parallel(tp_size: int = 1, backend: str | None = None) -> None:
    """Cut the world into tensor parallel groups of `tp_size` neighbours; the rest is data parallel.

    backend: must be that of the world, which the groups use.

    Raises:
        LaunchError: `init_dist_env` was not called, this was called before, or the backend differs.
        TopologyError: `tp_size` does not divide the world.
    """
    group = world(_INIT)
    if model_parallel_is_initialized():
        raise LaunchError(
            f"tensor parallel groups of {get_tp_world_size()} ranks are there already; call "
            f"destroy_model_parallel() before, or ensure_init({tp_size})"
        )
    actual = "nccl" if primitives.is_nccl(group) else "gloo"
    if backend not in (None, "nccl", actual):
        raise LaunchError(
            f"init_model_parallel(backend={backend!r}), but the world uses {actual}; leave it out. "
            f"Tensors in host memory go over gloo also where the world uses nccl"
        )
    if tp_size < 1:
        raise TopologyError(f"tp_size is {tp_size}; use a divisor of the {group.size()} ranks")
    tpc.setup_process_groups([("data", None), ("tensor", tp_size)])
    on_cpu(group)


def ensure_init(tp_size: int, backend: str | None = None) -> None:
    """Call `init_model_parallel`, unless groups of this size exist.

    Raises:
        TopologyError: groups of another size exist. Also as `init_model_parallel`.
    """
    if not model_parallel_is_initialized():
        init_model_parallel(tp_size, backend)
    elif get_tp_world_size() != tp_size:
        raise TopologyError(
            f"ensure_init({tp_size}), but the tensor parallel groups have {get_tp_world_size()} "
            f"ranks; call destroy_model_parallel() before"
        )


def model_parallel_is_initialized() -> bool:
    """Return whether tensor parallel groups exist, from here or `tpc.setup_process_groups`."""
    return is_joined() and tpc.is_set


def destroy_model_parallel() -> None:
    """End the tensor parallel groups and the CPU group; the default group stays. Safe to repeat."""
    tpc.destroy()
    if is_joined():
        leave_cpu(world())


def destroy_dist_env() -> None:
    """End what `init_dist_env` and `init_model_parallel` began. Safe to repeat."""
    destroy_model_parallel()
    leave()


# -- who am I ------------------------------------------------------------------------------


def get_local_rank() -> int:
    """Return this process's position among the ranks of this host.

    Raises:
        LaunchError: it was never set.
    """
    if "LOCAL_RANK" not in os.environ:
        raise LaunchError(f"the local rank is not known yet; call {_INIT} first")
    return int(os.environ["LOCAL_RANK"])


def get_cpu_world_group() -> Group:
    """Return the group of all ranks for tensors in host memory."""
    return on_cpu(world(_INIT))


def get_tp_group() -> Group:
    """Return this rank's tensor parallel group.

    Raises:
        LaunchError: there is none yet.
    """
    if not model_parallel_is_initialized():
        raise LaunchError(
            "the tensor parallel groups are not initialised; "
            "call init_model_parallel(tp_size) first"
        )
    return resolve_group(None, "tensor")


def get_tp_world_size() -> int:
    return get_tp_group().size()


def get_tp_rank() -> int:
    return get_tp_group().rank()


def get_tp_src_rank() -> int:
    """Return the global rank of the first rank in this rank's tensor parallel group."""
    return primitives.ranks_of(get_tp_group())[0]


# -- collectives ---------------------------------------------------------------------------


def tp_all_reduce(input_: Tensor) -> Tensor:
    """Sum over the tensor parallel group, in place unless autograd needs `input_`; returns it."""
    return all_reduce_(input_, get_tp_group())


def tp_all_gather(input_: Tensor, dim: int = -1) -> Tensor:
    """Gather along `dim` over the tensor parallel group; the backward slices the gradient."""
    return collectives.gather(input_, dim, get_tp_group())


def tp_gather(input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
    """Gather along `dim` on rank `dst` of the tensor parallel group; other ranks get None."""
    return objects.gather_to(input_, dim, get_tp_group(), dst)


def broadcast_common(src: int = 0, group: Group | None = None) -> tuple[int, Group]:
    """Return the size of the group and the group, by default the default group.

    Raises:
        LaunchError: there is no default group.
        CommError: global rank `src` is not in the group.
    """
    group = world(_INIT) if group is None else as_group(group)
    primitives.source_in(group, src)
    return group.size(), group


def broadcast(input_: Tensor, src: int = 0, group: Group | None = None) -> Tensor:
    """Overwrite `input_` with that of global rank `src`, and return it."""
    _, group = broadcast_common(src, group)
    return objects.broadcast_tensors([input_], group, src)[0]


def broadcast_obj_list(obj_list: list[Any], src: int = 0, group: Group | None = None) -> list[Any]:
    """Replace the items of the list by those of global rank `src`, and return it."""
    _, group = broadcast_common(src, group)
    return objects.broadcast_object_list(obj_list, group, src)


def broadcast_tensor_dict(
    tensor_dict: dict[Any, Any] | None = None, src: int = 0, group: Group | None = None
) -> dict[Any, Any]:
    """Return the dict of global rank `src`: tensors of any dtype on CPU or CUDA, nested."""
    _, group = broadcast_common(src, group)
    return objects.broadcast_tensor_dict(tensor_dict, group, src)


def create_group_and_assign(ranks: Sequence[int], backend: str, global_var: str) -> Group | None:
    """Return the group of these ranks to its members, None to other ranks.

    It is named `global_var` but assigned to no variable, so keep the result. backend: "gloo" for
    tensors in host memory, else that of the world.
    """
    rank = world(_INIT).rank()
    if rank not in ranks:
        return None
    groups = tpc.groups if tpc.is_set else Groups(rank)
    on_host = backend == "gloo"
    group = groups.of(ranks, name=global_var, connects=not on_host)
    return on_cpu(group) if on_host else group


# loaded once, before the ranks are forked
_PRELOAD = ("torch", "torch.distributed", __name__)


class Worker:
    """Runs functions on `world_size` new ranks.

    init_method: ignored, as the ranks meet at a file.
    backend: "nccl", the default, means nccl if each rank has a GPU, else gloo.

    Raises:
        LaunchError: `world_size` is below 1.
    """

    def __init__(
        self,
        world_size: int,
        init_method: str = "tcp://localhost:23456",
        backend: str = "nccl",
    ):
        if world_size < 1:
            raise LaunchError(f"world_size is {world_size}; use 1 or more")
        self.world_size = world_size
        self.init_method = init_method
        self.backend = backend

    def run(self, func: Callable[..., object], *args: object, **kwargs: object) -> list[object]:
        """Call `func(rank, *args, **kwargs)` on each rank; returns the results by rank.

        Each rank joins the default group before the call and leaves it afterwards. Output of ranks
        appears here. In a script without `if __name__ == "__main__":` each rank runs the lines
        above the first call. Functions that another process cannot import by name are sent by
        value, with the globals that they use, also within arguments.

        Raises:
            LaunchError: `func` or an argument cannot be pickled, or no process can be started.
            RankError: a rank raised or died; the text ends with its traceback. All are gone then.
        """
        if main_is_loading():
            # a rank imports a script without a guard: stop here, or it would start more ranks
            raise StopLoading
        call = PackedCall.of(func, *args, **kwargs)
        results = run_local(
            _as_rank,
            (call, self.backend),
            num_procs=self.world_size,
            preload=_PRELOAD,
            on_line=show_line,
        )
        return [call.unpack_result(cast(bytes, result)) for result in results]


def _as_rank(call: PackedCall, backend: str) -> bytes:
    """Run the call in a rank: join, call, leave."""
    function = call.load()
    rank, *_ = setup_distributed(backend)
    result = call.pack_result(function(rank))
    tpc.destroy()
    leave()
    return result

"""The device and back end of this rank, agreed on by all ranks before any communicator is made.

Each rank chooses for itself and publishes its choice in the store; the last one judges all of them
(`launch/device.py`), and what it finds is raised on every rank.
"""

import os
import socket
import time

import torch
import torch.distributed as dist

from torchdistpackage.comm.rendezvous_store import await_all
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.device import (
    DeviceChoice,
    RankDevice,
    choose_device,
    disagreement,
    exclusive_device,
    names_no_device,
)
from torchdistpackage.launch.rendezvous import Rendezvous

_UNKNOWN = "?"


def publish_gpu(store: dist.Store, rendezvous: Rendezvous) -> None:
    """Say which GPU this rank sees, if it is a single one, before the ranks meet."""
    store.set(_gpu_key(rendezvous, rendezvous.local_rank), _only_gpu(rendezvous))


def agree_on_device(
    store: dist.Store, rendezvous: Rendezvous, asked: str | None, timeout_s: float
) -> tuple[torch.device, str, tuple[str, ...]]:
    """My device, the backend for it, and what is worth saying about them; all ranks have met.

    asked: the backend; None or nccl: nccl on a GPU, else gloo.

    Raises:
        LaunchError: on every rank, if one has no GPU where others have, or they were meant to.
    """
    visible, num_visible = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    choice, problem = DeviceChoice(None, ""), ""
    try:
        choice = choose_device(
            rendezvous.local_rank,
            visible,
            num_visible,
            local_world_size=rendezvous.local_world_size,
            exclusive=exclusive_device(os.environ) or _each_has_its_own(store, rendezvous),
        )
    except LaunchError as error:
        problem = str(error)
    device = torch.device("cpu") if choice.index is None else torch.device("cuda", choice.index)
    by_device = "nccl" if device.type == "cuda" else "gloo"
    # programs that name nccl, as each earlier library did by default, run on a CPU too
    backend = by_device if asked in (None, "nccl") else asked
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    by_slurm = rendezvous.source in ("slurm", "torchrun") and given.isdecimal()
    mine = RankDevice(
        rank=rendezvous.rank,
        host=socket.gethostname(),
        node=rendezvous.node,
        num_local=rendezvous.local_world_size,
        device=device.type,
        backend=backend,
        asked=asked or "",
        num_visible=num_visible,
        hides_gpus=names_no_device(visible),
        num_given=int(given) if by_slurm else 0,
        problem=problem,
    )
    _agree(dist.PrefixStore("devices", store), rendezvous, mine, timeout_s)
    if device.type == "cuda":
        # before any collective: NCCL binds a communicator to the current device
        torch.cuda.set_device(device)
    return device, backend, tuple(note for note in (rendezvous.note, choice.note) if note)


def _agree(store: dist.Store, rendezvous: Rendezvous, mine: RankDevice, timeout_s: float) -> None:
    store.set(str(rendezvous.rank), mine.to_json())

    def judge() -> str:
        texts = store.multi_get([str(rank) for rank in range(rendezvous.world_size)])
        return disagreement([RankDevice.from_json(text) for text in texts])

    await_all(
        store,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout_s=timeout_s,
        since=time.monotonic(),
        keeper=rendezvous.keeps_store,
        hosts=rendezvous.hosts,
        source=rendezvous.source,
        judge=judge,
    )


def _only_gpu(rendezvous: Rendezvous) -> str:
    """Which one it is, if this process is one of several on its node and sees a single GPU."""
    alone = rendezvous.local_world_size == 1
    if alone or exclusive_device(os.environ) or torch.cuda.device_count() != 1:
        return _UNKNOWN
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # slices may share the UUID of their GPU
    is_slice = visible.startswith("MIG-")
    return visible if is_slice else str(torch.cuda.get_device_properties(0).uuid)


def _gpu_key(rendezvous: Rendezvous, local_rank: int) -> str:
    return f"gpu/{rendezvous.node}/{local_rank}"


def _each_has_its_own(store: dist.Store, rendezvous: Rendezvous) -> bool:
    """Whether the single GPU that each rank of this node sees is another for each."""
    keys = [_gpu_key(rendezvous, r) for r in range(rendezvous.local_world_size)]
    if not store.check(keys):
        return False
    seen = [store.get(key).decode() for key in keys]
    return _UNKNOWN not in seen and len(set(seen)) == len(seen)

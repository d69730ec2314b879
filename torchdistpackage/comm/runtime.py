"""From a Rendezvous to an initialised default group on the right device, or a clear refusal.

Ranks meet through one store: a file when this package started them on one machine, the agent's
under torchrun, else TCP on a candidate port. On several nodes they talk over the network on which
rank 0's host is known. Start and steps have separate time limits; ranks that never came are named.
"""

import itertools
import logging
import os
import socket
import time
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from torchdistpackage.comm.record import calls
from torchdistpackage.comm.store import await_all, connect, find, serve
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.device import choose_device, exclusive_device
from torchdistpackage.launch.interfaces import master_address, reached_from, read_addresses
from torchdistpackage.launch.network import settle, users_interfaces
from torchdistpackage.launch.rendezvous import Rendezvous, detect

_starts = itertools.count()
_UNKNOWN = "?"


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Joined:
    """What `join` arrived at.

    backend: gloo or nccl. notes: lines worth printing once.
    """

    rendezvous: Rendezvous
    device: torch.device
    backend: str
    port: int | None
    notes: tuple[str, ...]


def setup_distributed(
    backend: str | None = None, port: int | None = None, *, init_timeout_s: float = 60.0
) -> tuple[int, int, int | None, str]:
    """Join the other ranks of this job, however they were started.

    backend: None chooses by device: nccl where each rank has a GPU, else gloo.
    port: overrides the candidate ports; None derives them from the job.
    Returns (rank, world_size, port, address); port is None where no TCP store was needed.
    RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR are set where they were not, unless this process
    is alone: it would then look like one of several.

    Raises:
        LaunchError: the environment is contradictory, ranks are missing, or the backend
            cannot run here.
    """
    rendezvous = detect(os.environ)
    joined = join(rendezvous, backend=backend, port=port, init_timeout_s=init_timeout_s)
    defaults = {
        "RANK": rendezvous.rank,
        "WORLD_SIZE": rendezvous.world_size,
        "LOCAL_RANK": rendezvous.local_rank,
        "MASTER_ADDR": rendezvous.address,
    }
    if rendezvous.note and rendezvous.rank == 0:
        log.warning("%s", rendezvous.note)  # who takes no notice of logs finds it on stderr
    if rendezvous.source != "alone":
        for name, value in defaults.items():
            os.environ.setdefault(name, str(value))
    return rendezvous.rank, rendezvous.world_size, joined.port, rendezvous.address


def setup_distributed_slurm(
    backend: str | None = None, port: int | None = None
) -> tuple[int, int, int | None, str]:
    """The earlier name of `setup_distributed`, which knows Slurm among others."""
    return setup_distributed(backend, port)


def join(
    rendezvous: Rendezvous,
    *,
    backend: str | None = None,
    port: int | None = None,
    init_timeout_s: float = 60.0,
) -> Joined:
    """Initialise the default group for this place in the world; see `setup_distributed`."""
    if dist.is_initialized():
        raise LaunchError(
            f"torch.distributed is already initialised with {dist.get_world_size()} ranks; "
            f"call setup_distributed() once"
        )
    rendezvous = _as_of(rendezvous, next(_starts))
    if rendezvous.store is not None and "OMP_NUM_THREADS" in os.environ:
        # Forked from a process that had loaded torch with one thread. Elsewhere torch has read the
        # variable itself, and what the user set since then must stand.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    exclusive = exclusive_device(os.environ)
    gpu = _UNKNOWN if exclusive or rendezvous.local_world_size == 1 else _only_gpu()
    # one GPU in sight of each of several: theirs or mine is known when all have met
    bound = None if gpu != _UNKNOWN else _bind_device(rendezvous, backend, exclusive=exclusive)
    store, at, network = _meet(rendezvous, port, gpu, init_timeout_s)
    device, chosen, notes = bound or _bind_device(
        rendezvous, backend, exclusive=_each_has_its_own(store, rendezvous)
    )
    dist.init_process_group(
        chosen,
        store=dist.PrefixStore("default", store),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timedelta(seconds=init_timeout_s),
        device_id=device if chosen == "nccl" else None,
    )
    return Joined(rendezvous, device, chosen, at, notes + ((network,) if network else ()))


def leave() -> None:
    """End the default group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    calls.forget_all()


def find_free_port() -> str:
    """A TCP port that was free a moment ago, as text."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(probe.getsockname()[1])


def _meet(
    rendezvous: Rendezvous, port: int | None, gpu: str, timeout_s: float
) -> tuple[dist.Store, int | None, str]:
    """All ranks at one store and the network chosen: the store, its port, a line on the network."""
    begin = time.monotonic()
    several_nodes = rendezvous.store is None and rendezvous.local_world_size < rendezvous.world_size
    # None: on its own host rank 0's name may mean loopback, so the others say how they know it
    master = _master(rendezvous) if several_nodes else None
    store, at = _open_store(rendezvous, port, timeout_s)
    if several_nodes and rendezvous.node > 0:
        master = master or _master(rendezvous)
        if master:
            store.set("master", master)
    network = _choose_network(master) if master else ""
    store.set(_gpu_key(rendezvous, rendezvous.local_rank), gpu)
    await_all(
        store,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout_s=timeout_s,
        since=begin,
        keeper=rendezvous.rank == 0 and not rendezvous.served and rendezvous.store is None,
        hosts=rendezvous.hosts,
        source=rendezvous.source,
    )
    if several_nodes and not master and store.check(["master"]):
        network = _choose_network(store.get("master").decode())
    return store, at, network


def _bind_device(
    rendezvous: Rendezvous, backend: str | None, *, exclusive: bool
) -> tuple[torch.device, str, tuple[str, ...]]:
    """My device, the backend for it, and what is worth saying about them."""
    choice = choose_device(
        rendezvous.local_rank,
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        torch.cuda.device_count(),
        local_world_size=rendezvous.local_world_size,
        exclusive=exclusive,
    )
    device = torch.device("cpu") if choice.index is None else torch.device("cuda", choice.index)
    notes = tuple(note for note in (rendezvous.note, choice.note) if note)
    chosen = backend or ("nccl" if device.type == "cuda" else "gloo")
    if chosen == "nccl" and device.type != "cuda":
        raise LaunchError(
            f"backend nccl needs a GPU for each rank, but rank {rendezvous.rank} runs on the CPU "
            f"({'; '.join(notes) or 'no GPU is visible'}); leave backend unset, or use gloo"
        )
    if device.type == "cuda":
        # before any collective: NCCL binds a communicator to the current device
        torch.cuda.set_device(device)
    return device, chosen, notes


def _only_gpu() -> str:
    """Which one it is, if this process sees a single GPU."""
    if torch.cuda.device_count() != 1:
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


def _as_of(rendezvous: Rendezvous, again: int) -> Rendezvous:
    """With names of its own if this process joins `again`.

    Some of those who left are back before others are gone, and must not meet in what was.
    """
    if not again:
        return rendezvous
    store = f"{rendezvous.store}.{again}" if rendezvous.store else None
    return replace(rendezvous, token=f"{rendezvous.token}.{again}", store=store)


def _open_store(
    rendezvous: Rendezvous, port: int | None, timeout_s: float
) -> tuple[dist.Store, int | None]:
    if rendezvous.store is not None:
        return dist.FileStore(rendezvous.store, rendezvous.world_size), None
    if rendezvous.world_size == 1:
        return dist.HashStore(), None
    ports = (port,) if port is not None else rendezvous.ports
    if rendezvous.served:
        return _agents_store(rendezvous, timeout_s), rendezvous.ports[0]
    world_size, token = rendezvous.world_size, rendezvous.token
    if rendezvous.rank == 0:
        store, at = serve(ports, world_size=world_size, token=token, timeout_s=timeout_s)
    else:
        store, at = find(
            rendezvous.address,
            ports,
            rank=rendezvous.rank,
            world_size=world_size,
            token=token,
            timeout_s=timeout_s,
        )
    return dist.PrefixStore("tdp", store), at


def _agents_store(rendezvous: Rendezvous, timeout_s: float) -> dist.Store:
    """The store of torchrun's agent, which listens on the port already: rank 0 too is a client."""
    host, port = rendezvous.address, rendezvous.ports[0]
    try:
        store = connect(host, port, world_size=rendezvous.world_size, timeout_s=timeout_s)
    except (OSError, RuntimeError) as error:
        raise LaunchError(
            f"rank {rendezvous.rank}: torchrun's store at {host}, port {port}, did not answer "
            f"within {timeout_s:g} s ({_first_line(error)}); see whether torchrun still runs "
            f"there, and whether {host} can be reached from {socket.gethostname()}"
        ) from error
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the agent's store outlives us
    return dist.PrefixStore(f"tdp/{rendezvous.token}/{restart}", store)


def _master(rendezvous: Rendezvous) -> str | None:
    """The address of rank 0's host, once the user's words about the network are seen to be true."""
    if addresses := read_addresses():
        users_interfaces(os.environ, addresses)
    return master_address(
        os.environ, rendezvous.address, rank=rendezvous.rank, here=rendezvous.node == 0
    )


def _choose_network(master: str) -> str:
    """Tell gloo and NCCL their interface, unless the user did; one line that says which."""
    addresses = read_addresses()
    if not addresses:
        return ""
    network = settle(os.environ, addresses, master, reached_from=reached_from(master))
    os.environ.update(network.variables)
    return network.note


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

"""Initialise the default group on the right device, from a Rendezvous.

Ranks meet through one store: a file when this package started them on one machine, the agent's
under torchrun, else TCP on a candidate port. On several nodes they talk over the network on which
rank 0's host is known. Start and steps have separate time limits; ranks that never came are named.

All ranks agree on a kind of device and a back end before any communicator is made: each chooses for
itself and publishes its choice in the store; the last one judges all of them
(environment/device.py), and what it finds is raised on every rank.
"""

import itertools
import logging
import os
import platform
import re
import resource
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from torchdistpackage.comm.creation import (
    CONNECT_S,
    DEFAULTS,
    await_members,
    default_timeout_s,
    joins_within,
    mark_made,
    set_timeout,
    world,
)
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.group_options import GroupOptions, nccl_options
from torchdistpackage.comm.nccl_library import loaded_nccl
from torchdistpackage.comm.rendezvous_store import await_all, connect, find, serve
from torchdistpackage.comm.stored_objects import part
from torchdistpackage.environment.affinity import cores_of_rank
from torchdistpackage.environment.device import (
    DETERMINISTIC,
    DeviceChoice,
    RankDevice,
    algorithm_variables,
    choose_device,
    device_variables,
    disagreement,
    exclusive_device,
    names_no_device,
)
from torchdistpackage.environment.gpu_sharing import (
    gpu_of,
    limits_memory,
    memory_fraction,
    mps_runs,
    mps_variables,
    ranks_per_gpu,
    sharing_note,
    sharing_variables,
    too_old,
)
from torchdistpackage.environment.network import (
    configure_network,
    master_address,
    read_addresses,
    source_address_for,
    users_interfaces,
)
from torchdistpackage.environment.rendezvous import Rendezvous, detect, store_descriptors
from torchdistpackage.errors import LaunchError

_starts = itertools.count()
_our_variables: dict[str, str] = {}
"""Variables that `setup_distributed` set, which therefore do not count as the user's choice when it
is called again."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JoinResult:
    """The result of `join`.

    backend: gloo or nccl. notes: lines worth printing once. sharing: the note that ranks share
    GPUs, or "".
    """

    rendezvous: Rendezvous
    device: torch.device
    backend: str
    port: int | None
    notes: tuple[str, ...]
    sharing: str = ""


def setup_distributed(
    backend: str | None = None,
    port: int | None = None,
    *,
    init_timeout_s: float = 60.0,
    timeout_s: float | None = None,
    same_versions: bool = True,
    share_gpus: bool = False,
) -> tuple[int, int, int | None, str]:
    """Join the other ranks of this job, however they were started.

    backend: None chooses by device: nccl where each rank has a GPU, else gloo. "nccl" means the
        same, and rank 0 warns where it became gloo.
    port: overrides the candidate ports; None derives them from the job.
    init_timeout_s: for the ranks to meet, and for the default group to be made.
    timeout_s: for each later operation of the default group; None: what torch gives a new group.
    same_versions: refuse ranks whose versions of this package, torch, NCCL or Python differ.
    share_gpus: where a node has fewer GPUs than ranks, several ranks use one GPU over NCCL, which
        must be 2.30 or later. For development and tests: times mean nothing.
    Returns (rank, world_size, port, address); port is None where no TCP store was needed.
    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and, where a TCP store serves, MASTER_PORT are set
    where they were not, unless this process is alone: it would then look like one of several.

    Raises:
        LaunchError: the environment is contradictory, ranks are missing, or they cannot all run
            on the same kind of device with one backend; then on every rank.
    """
    rendezvous = detect({k: v for k, v in os.environ.items() if _our_variables.get(k) != v})
    joined = join(
        rendezvous,
        backend=backend,
        port=port,
        init_timeout_s=init_timeout_s,
        timeout_s=timeout_s,
        same_versions=same_versions,
        share_gpus=share_gpus,
    )
    defaults = {
        "RANK": rendezvous.rank,
        "WORLD_SIZE": rendezvous.world_size,
        "LOCAL_RANK": rendezvous.local_rank,
        "MASTER_ADDR": rendezvous.address,
        **({} if joined.port is None else {"MASTER_PORT": joined.port}),
    }
    for note in (rendezvous.note, joined.sharing):
        if note and rendezvous.rank == 0:
            log.warning("%s", note)  # who takes no notice of logs finds it on stderr
    if backend == "nccl" and joined.backend != "nccl" and rendezvous.rank == 0:
        log.warning("backend nccl was requested, but there is no GPU for each rank: using gloo")
    if rendezvous.source != "alone":
        for name, value in defaults.items():
            if os.environ.get(name) in (None, _our_variables.get(name)):
                os.environ[name] = _our_variables[name] = str(value)
    return rendezvous.rank, rendezvous.world_size, joined.port, rendezvous.address


def setup_distributed_slurm(
    backend: str | None = None, port: int | None = None
) -> tuple[int, int, int | None, str]:
    """Join the other ranks: the earlier name of `setup_distributed`, which handles Slurm among
    others.
    """
    return setup_distributed(backend, port)


def join(
    rendezvous: Rendezvous,
    *,
    backend: str | None = None,
    port: int | None = None,
    init_timeout_s: float = 60.0,
    timeout_s: float | None = None,
    same_versions: bool = True,
    share_gpus: bool = False,
    dump_folder: Path | None = None,
    options: GroupOptions = DEFAULTS,
) -> JoinResult:
    """Initialise the default group for this rank; see `setup_distributed`.

    dump_folder: folder for torch's record of NCCL's calls after a timeout. options: of the default
    group, if it uses NCCL.
    """
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
    if num_gpus := torch.cuda.device_count():
        is_hip = torch.version.hip is not None
        os.environ.update(device_variables(os.environ, dump_folder, is_hip=is_hip))
        if share_gpus and not exclusive_device(os.environ):
            sharing = ranks_per_gpu(rendezvous.local_world_size, num_gpus)
            has_mps = mps_runs(os.environ)
            os.environ.update(mps_variables(os.environ, sharing, has_mps=has_mps))
    few = _prepare_for_many(rendezvous)
    store, at, network = _meet(rendezvous, port, init_timeout_s)
    versions = _versions() if same_versions else ""
    device, chosen, notes, sharing = _agree_on_device(
        store, rendezvous, backend, init_timeout_s, versions, share_gpus=share_gpus
    )
    connect_s = max(init_timeout_s, CONNECT_S)
    with joins_within(store, rendezvous.rank, rendezvous.world_size, init_timeout_s):
        dist.init_process_group(
            chosen,
            store=dist.PrefixStore("default", store),
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            # all have come: now they only connect
            timeout=timedelta(seconds=connect_s),
            device_id=device if chosen == "nccl" else None,
            pg_options=nccl_options(options, connect_s) if chosen == "nccl" else None,
        )
        mark_made(world(), store, "default")
    set_timeout(world(), timeout_s or default_timeout_s(chosen))
    notes += tuple(note for note in (network, few, sharing) if note)
    return JoinResult(rendezvous, device, chosen, at, notes, sharing)


_DESCRIPTORS = 1 << 16


def _prepare_for_many(rendezvous: Rendezvous) -> str:
    """Prepare gloo and rank 0's store for thousands of ranks; return a warning if they are too many
    for this machine.

    Each of its groups holds a descriptor for each member, and ends the process where there are no
    more. By default a rank also publishes an address for each member, which all read: 552 GB for
    4,096 ranks (gloo#419); with this variable it is one address for all.
    """
    os.environ.setdefault("GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER", "1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # what is allowed now has to do
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    needed = store_descriptors(rendezvous.world_size) if rendezvous.keeps_store else 0
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ""
    return (
        f"warning: rank 0 keeps the store of {rendezvous.world_size} ranks, for which it needs "
        f"about {needed:,} open files, and {socket.gethostname()} allows {soft:,} (ulimit -Hn); "
        f"raise the limit there"
    )


def leave() -> None:
    """End the default group, if there is one, and all other groups with it."""
    if dist.is_initialized():
        part()
        await_members(world())
        dist.destroy_process_group()
    recorder.forget_all()


def find_free_port() -> str:
    """Return a TCP port, as text, that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(probe.getsockname()[1])


def _meet(
    rendezvous: Rendezvous, port: int | None, timeout_s: float
) -> tuple[dist.Store, int | None, str]:
    """Bring all ranks together at one store; return it, its port, and a line about the network."""
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
    # which GPU this rank sees, if it is a single one
    store.set(_gpu_key(rendezvous, rendezvous.local_rank), _only_gpu(rendezvous))
    await_all(store, rendezvous, timeout_s=timeout_s, since=begin)
    if several_nodes and not master and store.check(["master"]):
        network = _choose_network(store.get("master").decode())
    return store, at, network


def _as_of(rendezvous: Rendezvous, again: int) -> Rendezvous:
    """Return the rendezvous under separate names if this process joins `again`.

    Some ranks that left may be back before others are gone, and must not meet in the old store.
    """
    if not again:
        return rendezvous
    store = f"{rendezvous.store}.{again}" if rendezvous.store else None
    return replace(rendezvous, token=f"{rendezvous.token}.{again}", store=store)


def _open_store(
    rendezvous: Rendezvous, port: int | None, timeout_s: float
) -> tuple[dist.Store, int | None]:
    """Return the store for this rendezvous, and its port if it is a TCP store."""
    if rendezvous.store is not None:
        return dist.FileStore(rendezvous.store, rendezvous.world_size), None
    if rendezvous.world_size == 1:
        return dist.HashStore(), None
    if rendezvous.served:
        return _agents_store(rendezvous, timeout_s), rendezvous.ports[0]
    ports = (port,) if port is not None else rendezvous.ports
    meet = serve if rendezvous.rank == 0 else find
    store, at = meet(rendezvous, ports, timeout_s=timeout_s)
    return dist.PrefixStore("tdp", store), at


def _agents_store(rendezvous: Rendezvous, timeout_s: float) -> dist.Store:
    """Return the store of torchrun's agent.

    The agent already listens on the port, so rank 0 is a client too.
    """
    host, port = rendezvous.address, rendezvous.ports[0]
    try:
        store = connect(host, port, world_size=rendezvous.world_size, timeout_s=timeout_s)
    except (OSError, RuntimeError) as error:
        raise LaunchError(
            f"rank {rendezvous.rank}: torchrun's store at {host}, port {port}, did not answer "
            f"within {timeout_s:g} s ({str(error).splitlines()[0]}); see whether torchrun still "
            f"runs there, and whether {host} can be reached from {socket.gethostname()}"
        ) from error
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the agent's store outlives us
    return dist.PrefixStore(f"tdp/{rendezvous.token}/{restart}", store)


def _master(rendezvous: Rendezvous) -> str | None:
    """Return the address of rank 0's host, after checking the user's network settings."""
    if addresses := read_addresses():
        users_interfaces(os.environ, addresses)
    return master_address(
        os.environ, rendezvous.address, rank=rendezvous.rank, here=rendezvous.node == 0
    )


def _choose_network(master: str) -> str:
    """Set the interface of gloo and NCCL unless the user did; return one line that names it."""
    addresses = read_addresses()
    if not addresses:
        return ""
    network = configure_network(os.environ, addresses, master, own=source_address_for(master))
    os.environ.update(network.variables)
    return network.note


# -- the device --------------------------------------------------------------------------

_UNKNOWN = "?"


def _agree_on_device(
    store: dist.Store,
    rendezvous: Rendezvous,
    requested: str | None,
    timeout_s: float,
    versions: str = "",
    *,
    share_gpus: bool = False,
) -> tuple[torch.device, str, tuple[str, ...], str]:
    """Return this rank's device, its backend, notes, and the note about shared GPUs; all ranks must
    have met.

    requested: the backend; None or nccl: nccl on a GPU, else gloo. versions: `RankDevice.versions`.

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
            share_gpus=share_gpus,
        )
    except LaunchError as error:
        problem = str(error)
    backends = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    if requested and not {part.rpartition(":")[2] for part in requested.lower().split(",")} <= {
        *backends
    }:
        problem = f"there is no backend {requested!r}; use {', '.join(backends)}, or None"
    device = torch.device("cpu") if choice.index is None else torch.device("cuda", choice.index)
    by_device = "nccl" if device.type == "cuda" else "gloo"
    # programs that name nccl, as each earlier library did by default, run on a CPU too
    backend = by_device if requested in (None, "nccl") else requested
    if choice.sharing > 1 and backend == "nccl":
        problem = problem or too_old(loaded_nccl(), choice.sharing)
    slurm_gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
    by_slurm = rendezvous.source in ("slurm", "torchrun") and slurm_gpus.isdecimal()
    own_device = RankDevice(
        rank=rendezvous.rank,
        host=socket.gethostname(),
        node=rendezvous.node,
        num_local=rendezvous.local_world_size,
        device=device.type,
        backend=backend,
        asked=requested or "",
        num_visible=num_visible,
        hides_gpus=names_no_device(visible),
        num_given=int(slurm_gpus) if by_slurm else 0,
        problem=problem,
        versions=versions,
        sharing=choice.sharing,
    )
    device_store = dist.PrefixStore("devices", store)
    device_store.set(str(rendezvous.rank), own_device.to_json())

    def judge() -> str:
        texts = device_store.multi_get([str(rank) for rank in range(rendezvous.world_size)])
        return disagreement([RankDevice.from_json(text) for text in texts])

    await_all(device_store, rendezvous, timeout_s=timeout_s, since=time.monotonic(), judge=judge)
    bound = sharing = ""
    if device.type == "cuda":
        # before any collective: NCCL binds a communicator to the current device
        torch.cuda.set_device(device)
        bound = _bind(rendezvous) if rendezvous.source == "local" else ""
        sharing = _share(device, choice.sharing, backend)
    return device, backend, tuple(x for x in (rendezvous.note, choice.note, bound) if x), sharing


def _share(device: torch.device, num_ranks: int, backend: str) -> str:
    """Prepare NCCL and the allocator of a process whose GPU has several ranks; return a line about
    it.

    Call it before the first communicator, because NCCL reads the variable only once.
    """
    if num_ranks <= 1:
        return ""
    os.environ.update(sharing_variables(os.environ, num_ranks))
    if not limits_memory(os.environ):
        torch.cuda.set_per_process_memory_fraction(memory_fraction(num_ranks), device)
    library = f"NCCL {_dotted(loaded_nccl())}" if backend == "nccl" else backend
    return sharing_note(num_ranks, library, has_mps=mps_runs(os.environ))


def _dotted(version: tuple[int, ...] | None) -> str:
    """Return a version as text; "" for None."""
    return ".".join(map(str, version or ()))


def _bind(rendezvous: Rendezvous) -> str:
    """Bind this process to the cores near its GPU, unless somebody has bound it; return a line
    about it.

    Pinned memory is then near the GPU too, because threads and pages of a process follow its cores.
    """
    every, number = frozenset(range(os.cpu_count() or 1)), rendezvous.local_world_size
    if os.sched_getaffinity(0) != every:
        return ""
    num_gpus = torch.cuda.device_count()  # fewer than ranks where these share them
    addresses = [_pci_address(gpu_of(rank, number, num_gpus)) for rank in range(number)]
    cores = cores_of_rank(addresses, rendezvous.local_rank, every)
    if not cores:
        return ""
    with suppress(OSError):
        os.sched_setaffinity(0, cores)
        return f"each rank keeps to the cores near its GPU (rank {rendezvous.rank}: {len(cores)})"
    return ""


def _pci_address(index: int) -> str:
    """Return the address under which /sys lists a GPU, or "" if torch does not tell."""
    properties = torch.cuda.get_device_properties(index)
    parts = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    return "" if None in parts else "{:04x}:{:02x}:{:02x}.0".format(*parts)


def make_deterministic() -> None:
    """Make NCCL, cuBLAS and torch add in a fixed order, if they can; call it before `join`.

    Variables set by the user stay. torch warns about an operation that has no deterministic
    variant.
    """
    for name, value in DETERMINISTIC.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True, warn_only=True)


def libraries() -> dict[str, str]:
    """Return versions and variables that decide which bits a run on devices gives."""
    versions = {"torch": torch.__version__}
    if torch.cuda.is_available() and dist.is_nccl_available():
        versions["NCCL"] = _dotted(loaded_nccl())
        versions["driver"] = _driver()
    return versions | algorithm_variables(os.environ)


def _driver() -> str:
    """Return the version of the GPUs' driver, or "unknown"."""
    with suppress(OSError):
        first = Path("/proc/driver/nvidia/version").read_text("utf-8").splitlines()[0]
        if match := re.search(r"\b\d+\.\d+(\.\d+)?\b", first):
            return match[0]
    return "unknown"


def _versions() -> str:
    """Return the versions that must be the same on all ranks, in words."""
    # the package itself lies to the right of its parts, which do not import it
    package = getattr(sys.modules[__name__.partition(".")[0]], "__version__", "unknown")
    names = [f"torchdistpackage {package}", f"torch {torch.__version__}"]
    if torch.cuda.is_available() and dist.is_nccl_available():
        names.append(f"NCCL {_dotted(loaded_nccl())}")
    return ", ".join([*names, f"Python {platform.python_version()}"])


def _only_gpu(rendezvous: Rendezvous) -> str:
    """Return the GPU's name if this process is one of several on its node and sees a single GPU."""
    alone = rendezvous.local_world_size == 1
    if alone or exclusive_device(os.environ) or torch.cuda.device_count() != 1:
        return _UNKNOWN
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # slices may share the UUID of their GPU
    is_slice = visible.startswith("MIG-")
    return visible if is_slice else str(torch.cuda.get_device_properties(0).uuid)


def _gpu_key(rendezvous: Rendezvous, local_rank: int) -> str:
    """Return the store's key for the GPU of a local rank."""
    return f"gpu/{rendezvous.node}/{local_rank}"


def _each_has_its_own(store: dist.Store, rendezvous: Rendezvous) -> bool:
    """Return True if each rank of this node sees a single GPU, and all of these differ."""
    keys = [_gpu_key(rendezvous, r) for r in range(rendezvous.local_world_size)]
    if not store.check(keys):
        return False
    seen = [store.get(key).decode() for key in keys]
    return _UNKNOWN not in seen and len(set(seen)) == len(seen)

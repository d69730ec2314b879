"""From a Rendezvous to an initialised default group on the right device, or a clear refusal.

Ranks meet through one store: a file when this package started them on one machine, the agent's
under torchrun, else TCP on the first candidate port that is free, told apart from other jobs by
a token. Start and steps have separate time limits; ranks that never came are named.
"""

import os
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.device import choose_device, exclusive_device
from torchdistpackage.launch.rendezvous import Rendezvous, detect

TOKEN_WAIT_S = 2.0
"""How long a candidate port may take to show its token before the next one is tried."""


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
    if rendezvous.store is not None and "OMP_NUM_THREADS" in os.environ:
        # Forked from a process that had loaded torch with one thread. Elsewhere torch has read the
        # variable itself, and what the user set since then must stand.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    device, notes = pick_device(rendezvous)
    chosen = backend or ("nccl" if device.type == "cuda" else "gloo")
    if chosen == "nccl" and device.type != "cuda":
        raise LaunchError(
            f"backend nccl needs a GPU for each rank, but rank {rendezvous.rank} runs on the CPU "
            f"({'; '.join(notes) or 'no GPU is visible'}); leave backend unset, or use gloo"
        )
    if device.type == "cuda":
        # before any collective: NCCL binds a communicator to the current device
        torch.cuda.set_device(device)
    store, at = _open_store(rendezvous, port, init_timeout_s)
    await_all(store, rendezvous, init_timeout_s)
    dist.init_process_group(
        chosen,
        store=dist.PrefixStore("default", store),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timedelta(seconds=init_timeout_s),
        device_id=device if chosen == "nccl" else None,
    )
    return Joined(rendezvous, device, chosen, at, notes)


def pick_device(rendezvous: Rendezvous) -> tuple[torch.device, tuple[str, ...]]:
    """My device and what is worth saying about it."""
    choice = choose_device(
        rendezvous.local_rank,
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        torch.cuda.device_count(),
        local_world_size=rendezvous.local_world_size,
        exclusive=exclusive_device(os.environ),
    )
    device = torch.device("cpu") if choice.index is None else torch.device("cuda", choice.index)
    return device, tuple(note for note in (rendezvous.note, choice.note) if note)


def leave() -> None:
    """End the default group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def find_free_port() -> str:
    """A TCP port that was free a moment ago, as text."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(probe.getsockname()[1])


def await_all(store: dist.Store, rendezvous: Rendezvous, timeout_s: float) -> None:
    """Return when every rank has signed in at the store.

    Raises:
        LaunchError: some did not within `timeout_s`; names them.
    """
    try:
        store.set(f"here/{rendezvous.rank}", socket.gethostname())
        if store.add("arrived", 1) == rendezvous.world_size:
            store.set("complete", "yes")
        store.wait(["complete"], timedelta(seconds=timeout_s))
    except RuntimeError as error:  # a file store has no narrower one for a wait in vain
        raise LaunchError(
            f"{_who_is_missing(store, rendezvous)} within {timeout_s:g} s (I am rank "
            f"{rendezvous.rank} on {socket.gethostname()}, launched by {rendezvous.source}); "
            f"look at their logs, or allow more with launch.init_timeout_s"
        ) from error


def _who_is_missing(store: dist.Store, rendezvous: Rendezvous) -> str:
    world_size = rendezvous.world_size
    try:
        missing = [r for r in range(world_size) if not store.check([f"here/{r}"])]
    except RuntimeError:
        # whoever serves the store gave up a moment before us, and says who did not come
        return f"rank 0, which keeps the list of the {world_size} ranks, left: not all had come"
    shown = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
    return f"{len(missing)} of {world_size} ranks did not come (ranks {shown})"


def _open_store(
    rendezvous: Rendezvous, port: int | None, timeout_s: float
) -> tuple[dist.Store, int | None]:
    if rendezvous.store is not None:
        return dist.FileStore(rendezvous.store, rendezvous.world_size), None
    if rendezvous.world_size == 1:
        return dist.HashStore(), None
    if rendezvous.served:
        # torchrun's agent listens on the port already, so rank 0 too is a client
        at = rendezvous.ports[0]
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the agent's store outlives us
        store = _client(rendezvous, at, timeout_s)
        return dist.PrefixStore(f"tdp/{rendezvous.token}/{restart}", store), at
    ports = (port,) if port is not None else rendezvous.ports
    opened = _serve if rendezvous.rank == 0 else _find
    store, at = opened(rendezvous, ports, timeout_s)
    return dist.PrefixStore("tdp", store), at


def _client(rendezvous: Rendezvous, port: int, timeout_s: float) -> dist.TCPStore:
    """The store at this port of rank 0's host.

    In a thread: a server of another kind may accept and then stay silent, for which torch has no
    time limit; the thread is then left to its wait.

    Raises:
        OSError, RuntimeError: nobody listens, or not a store.
    """
    found: list[dist.TCPStore | RuntimeError] = []

    def connect() -> None:
        try:
            found.append(
                dist.TCPStore(
                    rendezvous.address,
                    port,
                    rendezvous.world_size,
                    False,
                    timedelta(seconds=timeout_s),
                    wait_for_workers=False,  # or a visit would count as an arrival over there
                )
            )
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=connect, name="store", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not found:
        raise TimeoutError(f"port {port} accepted but said nothing for {timeout_s:g} s")
    if isinstance(found[0], RuntimeError):
        raise found[0]
    return found[0]


def _serve(
    rendezvous: Rendezvous, ports: tuple[int, ...], timeout_s: float
) -> tuple[dist.Store, int]:
    """Rank 0 listens on the first candidate port that is free."""
    for port in ports:
        try:
            # it listens on all interfaces; this address is only how rank 0 reaches itself
            store = dist.TCPStore(
                "127.0.0.1",
                port,
                rendezvous.world_size,
                True,
                timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
        except RuntimeError:
            continue
        store.set("token", rendezvous.token)
        return store, port
    raise LaunchError(
        f"rank 0 cannot listen on {socket.gethostname()}: port{'s' * (len(ports) > 1)} "
        f"{', '.join(map(str, ports))} {'are' if len(ports) > 1 else 'is'} taken; "
        f"set MASTER_PORT to a free port, or unset it to let the job choose"
    )


def _find(
    rendezvous: Rendezvous, ports: tuple[int, ...], timeout_s: float
) -> tuple[dist.Store, int]:
    """The others try the candidates in turn until one shows this job's token."""
    deadline = time.monotonic() + timeout_s
    seen = "nobody listened"
    while time.monotonic() < deadline:
        for port in ports:
            try:
                socket.create_connection((rendezvous.address, port), TOKEN_WAIT_S).close()
                store = _client(rendezvous, port, TOKEN_WAIT_S)
                token = store.get("token").decode()
            except (OSError, RuntimeError) as error:
                seen = f"port {port}: {error}"
                continue
            if token == rendezvous.token:
                store.set_timeout(timedelta(seconds=timeout_s))
                return store, port
            seen = f"port {port} belongs to another job"
        time.sleep(0.05)
    raise LaunchError(
        f"rank {rendezvous.rank} found no rank 0 of its job at {rendezvous.address}, ports "
        f"{', '.join(map(str, ports))}, within {timeout_s:g} s (last: {seen}); see whether rank 0 "
        f"runs, and whether {rendezvous.address} can be reached from {socket.gethostname()}"
    )

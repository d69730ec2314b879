"""Transports: properties of the back end of a group, and the device of its tensors.

This file holds the differences between gloo and NCCL. Other files ask the group's `Transport` how
its calls behave. Another back end registers its own with `register_transport`.
"""

import atexit
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.errors import CommError


@dataclass(frozen=True, slots=True)
class Transport:
    """Properties of a back end's calls that the package needs.

    queued: a call returns before it is done, and runs later, in order, on a stream of the group.
        `wait()` then makes the current stream wait, not the host. P2P tags are ignored.
    direct: collectives are made of point-to-point messages, each with a time limit.
    averages: ReduceOp.AVG exists for floats.
    device_type: device that tensors must be on.
    host_backend: back end of the companion group for host memory, if calls are queued.
    by_store: objects go through the store where the ranks met (stored_objects.py), not over a group
        of `host_backend`, which would connect each rank with every other.
    """

    name: str
    queued: bool = False
    direct: bool = False
    averages: bool = False
    device_type: str = "cpu"
    host_backend: str = "gloo"
    by_store: bool = False


GLOO = Transport("gloo", direct=True)
NCCL = Transport("nccl", queued=True, averages=True, device_type="cuda", by_store=True)
_transports = {"gloo": GLOO, "nccl": NCCL}


def register_transport(transport: Transport) -> None:
    """Register the properties of a back end; a second registration of the same name replaces the
    first.
    """
    _transports[transport.name] = transport


def transport_of(group: dist.ProcessGroup) -> Transport:
    """Return the transport of the group; if it has a back end for each device type, that of the one
    in use.
    """
    name = backend_of(group)
    return _transports.get(name) or Transport(name)


def backend_of(group: dist.ProcessGroup) -> str:
    """Return the group's back end, such as gloo or nccl; if it has one for each device type, the
    one in use.
    """
    name = dist.get_backend(group)
    if name != "undefined" and ":" not in name:
        return name
    return "nccl" if torch.cuda.is_available() else "gloo"


def is_nccl(group: dist.ProcessGroup) -> bool:
    return backend_of(group) == "nccl"


def is_queued(group: dist.ProcessGroup) -> bool:
    """Return whether calls run on a stream of the group, as on NCCL."""
    return transport_of(group).queued


def require_host_memory(call_name: str, group: dist.ProcessGroup, x: Tensor) -> None:
    """Refuse a tensor on a device for calls that consist of gloo's messages.

    gloo treats any address as host memory, so the process would crash. gloo's own all_reduce and
    broadcast copy such tensors through the host.

    Raises:
        CommError: `x` is not in host memory.
    """
    if not x.is_cpu:
        raise CommError(
            f"{call_name} over ranks {tuple(dist.get_process_group_ranks(group))}: the tensor is "
            f"on {x.device}, but {backend_of(group)} sends host memory only; use nccl (one GPU per "
            f"rank), or move it to the CPU. Only all_reduce and broadcast take it there"
        )


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device of tensors for this group: this rank's GPU under NCCL, else the CPU."""
    if transport_of(group).device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(transport_of(group).device_type)


# -- gloo's threads ------------------------------------------------------------------------

_READERS = "gloo_tcp_loop"
"""Name of gloo's threads that read its sockets, one per group; torch 2.11 leaves them unnamed."""
_WORKERS = "pt_gloo_runloop"
"""Name of the threads that run gloo's collectives, two for each group."""
_TASKS = Path("/proc/self/task")


def deprioritize(yielding: bool = True) -> int:
    """Lower the priority of gloo's reader threads below computing threads; return how many there
    are.

    gloo's thread wakes with every byte that arrives. If all cores compute, it preempts a thread
    that is often about to post a message and holds the lock of that connection. Then it leaves the
    event to its next look at the socket (`Pair::handleEvents` in gloo's transport/tcp/pair.cc),
    which comes at once, and so it polls until the scheduler switches. That makes a pipeline step of
    small messages on two cores 1.6 to 2.3 times as long (benchmarks/results/pipeline.md). A batch
    thread (SCHED_BATCH) waits for an idle core or the end of a time slice; with an idle core
    nothing changes. It needs no privileges.

    It finds none without Linux's /proc, or if the threads have no name.

    yielding: False restores the normal policy.
    """
    policy = getattr(os, "SCHED_BATCH" if yielding else "SCHED_OTHER", None)
    if policy is None or not _TASKS.is_dir():
        return 0
    number = 0
    for task in _TASKS.iterdir():
        try:
            if (task / "comm").read_text().strip() == _READERS:
                os.sched_setscheduler(int(task.name), policy, os.sched_param(0))
                number += 1
        except OSError:
            continue  # the thread has ended, or a sandbox forbids it: then nothing changes
    return number


def let_workers_rest(limit_s: float = 5.0, look_s: float = 0.005) -> None:
    """Wait until no worker of gloo is busy; it runs when the interpreter is about to end.

    A worker releases a call's tensors after the call is done and awaited, and takes the
    interpreter's lock for that. If the interpreter is shutting down by then, Python ends the
    thread, and with it the process: "terminate called without an active exception"
    (pytorch/pytorch#179291). Ending the groups would not help, because whoever holds a group keeps
    its threads.

    limit_s: limit in all; calls that peers have not joined use all of it.
    look_s: time between two looks, in which this thread releases the lock.
    """
    ends_at = time.monotonic() + limit_s
    previous, current = {"": ""}, _workers()
    while current != previous and time.monotonic() < ends_at:
        # releases the lock meanwhile, so that a worker which waits for it can go to sleep
        time.sleep(look_s)
        previous, current = current, _workers()


def _workers() -> dict[str, str]:
    """Return for each of gloo's workers its number of context switches; a new value if it is busy.

    A worker without work sleeps in a futex without a time limit (its fourth argument). One that
    waits for peers or for the interpreter's lock sleeps with a limit.
    """
    states = {}
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        try:
            if (task / "comm").read_text().strip() == _WORKERS:
                call = (task / "syscall").read_text().split()
                lines = (task / "status").read_text().splitlines()
                switches = [line for line in lines if "ctxt_switches" in line]
                is_idle = len(call) > 4 and call[4] == "0x0"
                states[task.name] = " ".join(switches) if is_idle else f"{time.monotonic()}"
        except OSError:
            continue  # the thread has ended, or a sandbox forbids it: then nothing changes
    return states


atexit.register(let_workers_rest)

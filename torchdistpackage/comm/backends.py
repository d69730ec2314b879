"""Transports: how a group's back end carries its calls, and where its tensors live.

Gloo and NCCL differ here. How calls of a group behave is asked of its `Transport`; a back
end of another name says its own by `register_transport`.
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
    """How a back end carries calls, as far as the package must know.

    queued: a call returns before it is done and runs later, in order, on a stream of the group;
        `wait()` holds up the current stream and not the host, and p2p tags are ignored.
    direct: parts of a collective go by point-to-point messages, each with a time limit.
    averages: ReduceOp.AVG is there for floats.
    device_type: where tensors must be.
    host_backend: that of a group of the same ranks for what is in host memory, where calls of this
        one are queued.
    """

    name: str
    queued: bool = False
    direct: bool = False
    averages: bool = False
    device_type: str = "cpu"
    host_backend: str = "gloo"


GLOO = Transport("gloo", direct=True)
NCCL = Transport("nccl", queued=True, averages=True, device_type="cuda")
_transports = {"gloo": GLOO, "nccl": NCCL}


def register_transport(transport: Transport) -> None:
    """Say how the back end of this name carries calls; the second one of a name replaces it."""
    _transports[transport.name] = transport


def transport_of(group: dist.ProcessGroup) -> Transport:
    """The transport of the group; if it has a back end for each kind of device, that in use."""
    name = backend_of(group)
    return _transports.get(name) or Transport(name)


def backend_of(group: dist.ProcessGroup) -> str:
    """gloo, nccl, ...; of a group with one for each kind of device, that of the device in use."""
    name = dist.get_backend(group)
    if name != "undefined" and ":" not in name:
        return name
    return "nccl" if torch.cuda.is_available() else "gloo"


def is_nccl(group: dist.ProcessGroup) -> bool:
    return backend_of(group) == "nccl"


def is_queued(group: dist.ProcessGroup) -> bool:
    """Whether calls run on a stream of the group, as on NCCL."""
    return transport_of(group).queued


def require_host_memory(what: str, group: dist.ProcessGroup, x: Tensor) -> None:
    """Refuse what lies on a device where parts travel as gloo's own messages.

    Those take any address for one in host memory, and the process would crash. gloo's all_reduce
    and broadcast copy such tensors through the host themselves.

    Raises:
        CommError: `x` is not in host memory.
    """
    if not x.is_cpu:
        raise CommError(
            f"{what} over ranks {tuple(dist.get_process_group_ranks(group))}: the tensor is on "
            f"{x.device}, but {backend_of(group)} sends host memory only; join with nccl (a GPU "
            f"for each rank), or move it to the CPU. Only all_reduce and broadcast take it there"
        )


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where tensors for this group live: my GPU under NCCL, else the CPU."""
    if transport_of(group).device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(transport_of(group).device_type)


# -- gloo's threads ------------------------------------------------------------------------

_READERS = "gloo_tcp_loop"
"""The name of gloo's threads that read its sockets, one for each group; they have none in torch
2.11."""
_WORKERS = "pt_gloo_runloop"
"""The name of the threads that run gloo's collectives, two for each group."""
_TASKS = Path("/proc/self/task")


def deprioritize(yielding: bool = True) -> int:
    """Let gloo's reading threads yield to computing ones, or (False) interrupt as others do.

    gloo's thread wakes with every byte that comes. Where all cores compute, it takes the core of a
    thread that is often just about to post a message, finds the lock of that connection taken,
    leaves the event to its next look at the socket (`Pair::handleEvents` in gloo's
    transport/tcp/pair.cc), which comes at once, and so polls until the scheduler has mercy. On two
    cores a pipeline step of small messages takes 1.6 to 2.3 times as long by that
    (benchmarks/results/pipeline.md). A batch thread (SCHED_BATCH) waits for an idle core or the
    end of a time slice; where a core is idle nothing changes. No rights are needed.

    Returns how many there are: none without Linux's list of them, or where they have no name.
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
            continue  # it has ended, or a sandbox forbids it: then all stays as it was
    return number


def let_workers_rest(limit_s: float = 5.0, look_s: float = 0.005) -> None:
    """Wait until no worker of gloo is busy; called when the interpreter is about to end.

    A worker lets go of the tensors of a call after the call is done and awaited, and takes the lock
    of the interpreter for it. If that is being torn down by then, Python ends the thread, and with
    it the process: "terminate called without an active exception" (pytorch/pytorch#179291).
    Ending the groups would not do: who holds one keeps it, threads and all.

    limit_s: for all of it; calls that peers have not joined take it. look_s: between two looks, in
    which this thread gives the lock away.
    """
    ends_at = time.monotonic() + limit_s
    before, now = {"": ""}, _workers()
    while now != before and time.monotonic() < ends_at:
        time.sleep(look_s)
        before, now = now, _workers()


def _workers() -> dict[str, str]:
    """How often each of gloo's workers has slept, by thread; one that is busy never repeats.

    One without work sleeps until it is woken (a futex without a time limit, its fourth argument);
    one that waits for peers, or for the lock of the interpreter, sleeps for so long at most.
    """
    found = {}
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        try:
            if (task / "comm").read_text().strip() == _WORKERS:
                call = (task / "syscall").read_text().split()
                lines = (task / "status").read_text().splitlines()
                switches = [line for line in lines if "ctxt_switches" in line]
                rests = len(call) > 4 and call[4] == "0x0"
                found[task.name] = " ".join(switches) if rests else f"{time.monotonic()}"
        except OSError:
            continue  # it has ended, or a sandbox forbids it: then all stays as it was
    return found


atexit.register(let_workers_rest)

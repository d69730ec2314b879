"""How threads that are ranks make their groups: by name, all members waiting for each other.

One rule: a group is made as NCCL makes it. In a world that is bound to a device torch has all ranks
of the world take part, each with the list of its own group (`ThreadGroup.split`), and nothing
but the lint compares those lists.
"""

import threading
from functools import partial

import torch.distributed as dist

from torchdistpackage.comm.backends import Transport, register_transport
from torchdistpackage.errors import CommError
from torchdistpackage.harness.lint.handles import LintContext
from torchdistpackage.harness.lint.matcher import CREATION, LintGroup, PendingOp
from torchdistpackage.harness.lint.stacks import stack_here
from torchdistpackage.harness.lint.transport import ThreadGroup

BACKEND = "threads"
"""What ranks of a lint talk over; it stands for NCCL where calls are queued."""
HOST_BACKEND = "threads_host"
"""The same for what is in host memory, where NCCL's groups have one of gloo beside them."""


class _Here(threading.local):
    """The wire of the lint that this thread is a rank of."""

    wire: LintContext | None = None


_here = _Here()


def attach(wire: LintContext) -> None:
    """This thread is a rank of the lint: groups that it makes are of threads."""
    _here.wire = wire
    for name in (BACKEND, HOST_BACKEND):
        if name.upper() not in dist.Backend._plugins:
            create = partial(_create, name)
            dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])
    queued = wire.queued
    register_transport(Transport(BACKEND, queued=queued, averages=queued, beside=HOST_BACKEND))


def _create(backend: str, options, _) -> ThreadGroup:
    wire = _here.wire
    if wire is None:
        raise CommError(f"backend {backend!r} joins the threads of a lint; use gloo or nccl")
    ranks = tuple(options.global_ranks_in_group or range(options.group_size))
    key, rank = (options.group_id, ranks), ranks[options.group_rank]
    with wire.threads.lock:
        if key not in wire.made:
            in_host = backend == HOST_BACKEND
            label = wire.label(ranks) + " (host)" * in_host
            group = LintGroup(ranks, label, lazy=wire.queued and not in_host, in_host=in_host)
            wire.made[key] = LintGroup(ranks, label), group
            wire.threads.groups += wire.made[key]
    making, group = wire.made[key]
    world = dist.group.WORLD if dist.is_initialized() else None
    split_from = world if world is not None and world.bound_device_id is not None else None
    if split_from is None or not group.lazy:
        wire.stop(PendingOp(rank, making, (CREATION,), where=stack_here()[0]))
    return ThreadGroup(
        wire,
        group,
        options.group_rank,
        options.group_id,
        backend,
        split_from,  # type: ignore[arg-type]
    )

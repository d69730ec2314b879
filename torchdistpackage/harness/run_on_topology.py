"""A function on the ranks of a topology: those of a launcher, or new ones on this machine.

The function finds the default group joined and `tpc` set up. What can be refused is refused before
a process is started. This file needs no torch: only the ranks do, so the function may be given by
its name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from torchdistpackage.errors import TopologyError
from torchdistpackage.launch.entrypoint import EntryPoint
from torchdistpackage.launch.rendezvous import Rendezvous, detect
from torchdistpackage.launch.workers import run_local
from torchdistpackage.topology.mesh import whole_size
from torchdistpackage.topology.views import topology

Axes = Sequence[tuple[str, int | None]]
"""(axis, size), outermost first; the size of one may be None: what the others leave."""

INIT_TIMEOUT_S = 60.0
"""For the ranks to meet, which may start one after the other."""
RANK = "torchdistpackage.harness.pool_worker:run_worker"
PRELOAD = ("torch", "torch.distributed", "numpy", "torchdistpackage.harness.pool_worker")


def run_on_topology(
    fn: str | Callable[..., object],
    args: Sequence[object] = (),
    *,
    axes: Axes,
    procs: int | None = None,
    expert: int = 1,
    init_timeout_s: float = INIT_TIMEOUT_S,
    note: str = "",
) -> list[Any] | None:
    """Call `fn(*args)` on every rank, in groups along `axes`.

    Under torchrun or srun this process is one of the ranks; else it starts `procs` of them.

    fn: "module:function", or a function at the top level of a module.
    procs: ranks; None: as the launcher says, or as the axes multiply to.
    expert: ranks along the data axis that share the experts.
    note: a file for the text of a CommError of a rank, which the parent may end before it is heard.

    Returns the results by rank, in one process: the one that started the ranks, or under a
    launcher rank 0. None in all others.

    Raises:
        TopologyError: the axes do not tile the ranks; nothing has been started.
        RankError: a rank that was started here failed.
        LaunchError: ranks are missing, or no process can be started.
    """
    here = detect(os.environ)
    world_size = num_ranks(axes, procs, here)
    topology(axes, world_size, expert=expert)
    call = (EntryPoint.of(fn), tuple(args), tuple(axes), expert, init_timeout_s, note)
    if here.source != "alone":
        return EntryPoint.of(RANK).resolve()(*call, together=True)  # type: ignore[return-value]
    return run_local(RANK, call, num_procs=world_size, preload=PRELOAD)


def num_ranks(axes: Axes, procs: int | None, here: Rendezvous) -> int:
    """How many ranks there are, or are to be started.

    Raises:
        TopologyError: `procs` is not what the launcher says, or nothing says how many.
    """
    if here.source != "alone":
        if procs not in (None, here.world_size):
            raise TopologyError(
                f"{procs} processes are asked for, but {here.source} has started "
                f"{here.world_size} ranks; leave the number out under a launcher"
            )
        return here.world_size
    if procs is not None:
        return whole_size("of processes", procs)
    if left_open := [name for name, size in axes if size is None]:
        raise TopologyError(
            f"the size of {' and '.join(left_open)} is left open, and so is the number of ranks; "
            f"give --procs, or every size in --axes"
        )
    return math.prod(whole_size(name, size) for name, size in axes)

"""The rank's side of `harness/run_on_topology.py`: join, set up `tpc`, call, leave.

One rule: whoever fails leaves nothing in order behind. Groups whose members are stuck could only
be ended by waiting for them, so after an exception the end of the process ends them.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation import end_processes
from torchdistpackage.comm.runtime import join, leave
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.harness.run_on_topology import Axes
from torchdistpackage.launch.entrypoint import EntryPoint
from torchdistpackage.launch.rendezvous import detect


def run_worker(
    reference: EntryPoint,
    args: tuple[object, ...],
    axes: Axes,
    expert: int,
    init_timeout_s: float,
    *,
    together: bool = False,
) -> Any:
    """The function's result on this rank; with `together` those of all ranks, on rank 0 alone."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the ranks of a node would otherwise each take all its cores
    end_processes()
    join(detect(os.environ), init_timeout_s=init_timeout_s)
    tpc.setup_process_groups(axes, expert=expert)
    result: object = reference.resolve()(*args)
    if together:
        results = primitives.gather_objects(result)
        result = results if tpc.rank == 0 else None
    tpc.destroy()
    leave()
    return result

"""What ranks that share a GPU do, besides the bodies of the tests: each function runs in a rank."""

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist

from tests.train import parity
from torchdistpackage.comm import primitives
from torchdistpackage.comm.flight_recorder import (
    DTYPE,
    GROUP,
    OPERATION,
    PEER,
    SHAPE,
    SIZE,
    dtype_name,
    recorder,
)
from torchdistpackage.comm.nccl_library import loaded_nccl
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.harness.comm_test import run_comm_test

AXES = ("data", "pipe", "tensor")
ROUNDS, NUMEL = 50, 1 << 16
STEPS = 2
"""The first announces shapes and learns what a backward does; the second is like all later ones."""

RecordedCall = tuple[tuple[int, ...], str, str, int, int | None]
"""(ranks of the group, operation, dtype, number of elements, peer of a message)."""


def version() -> str:
    """The backend of the default group, and the library that is loaded."""
    name = dist.get_backend()
    return f"{name} {'.'.join(map(str, loaded_nccl() or ()))}".strip()


def communication(timeout_s: float) -> int:
    """Every collective and messages between all pairs of ranks; how many operations there were."""
    return sum(row.num_operations for row in run_comm_test(pairs=True, timeout_s=timeout_s).rows)


def overlapping(sizes: Sequence[int]) -> tuple[float, int]:
    """Sums over groups of each axis that are under way together; the largest difference from what
    each must be, and bytes of the device that the groups took."""
    device = primitives.device_of(dist.group.WORLD)
    before = _free_bytes()
    tpc.setup_process_groups(list(zip(AXES, sizes, strict=True)))
    groups = [tpc.get_group(axis) for axis in AXES]
    primitives.barrier()
    taken = before - _free_bytes()
    off, rank = 0.0, dist.get_rank()
    for number in range(ROUNDS):
        shape = {"size": (NUMEL,), "dtype": torch.float64, "device": device}
        sums = [torch.full(fill_value=float(rank + number), **shape) for _ in groups]
        pending = [
            primitives.start_all_reduce(x, group) for x, group in zip(sums, groups, strict=True)
        ]
        for each in pending:
            each.wait()
        for x, group in zip(sums, groups, strict=True):
            expected = sum(r + number for r in dist.get_process_group_ranks(group))
            off = max(off, float((x - expected).abs().max()))
    return off, taken


def _free_bytes() -> int:
    """Of the device, once all ranks are there; 0 without one."""
    primitives.barrier()
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_initialized() else 0


def steps(changes: list[str]) -> None:
    """Two steps of a run."""
    run = parity.trainer(changes)
    for step in range(1, STEPS + 1):
        run.train_step(step).wait()


def recorded(changes: list[str]) -> list[RecordedCall]:
    """The calls of two steps in the order in which this rank's host made them."""
    recorder._ring.clear()
    steps(changes)
    calls = [*recorder._ring]
    if len(calls) == SIZE:
        raise ValueError(f"two steps make {SIZE} calls or more, of which the first are forgotten")
    return [
        (
            *(tuple(call[GROUP].ranks), call[OPERATION]),
            *("" if call[DTYPE] is None else dtype_name(call[DTYPE]), prod(call[SHAPE] or ())),
            call[PEER],
        )
        for call in calls
    ]

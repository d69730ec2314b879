"""The earlier package's `dist`: two bandwidth tests, and suffixes of checkpoint files.

Programs call the tests on every rank of a group. They run the bench's own measurement with one
size, and compute bandwidth with the same factors as before (comm/collective_table.py).
`python -m torchdistpackage.dist.py_comm_test` runs the first of them.

The suffix gives ranks with different parameters different files, and replicas the same one; the
checkpoints of this package need none.
"""

import statistics
import sys

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.collective_table import COLLECTIVES
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.errors import CommError
from torchdistpackage.harness.calls import GroupMember, make_input, sync, tdp_call
from torchdistpackage.harness.measure import in_turns

MODES = ("all_reduce", "all_gather", "reduce_scatter")
NUM_ITERATIONS = 20
NUM_WARMUP = 3
GPU_ELEMENTS = 1801705472
"""Elements that the program gathers on GPUs: 7.2 GB, as in the earlier package."""
CPU_ELEMENTS = 1 << 24
"""Elements that the program gathers on CPUs: 67 MB."""


def test_collection(
    ele_num_total: int, mode: str = "all_reduce", group: Group | None = None
) -> tuple[float, float]:
    """Measure one collective: (bus bandwidth in GB/s, seconds a call); default group: all ranks.

    ele_num_total: float32 elements of the larger buffer of a rank, a multiple of the group's size
        except for all_reduce. mode: one of MODES. All ranks return the values of the slowest.

    Raises:
        CommError: there is no such mode, the elements do not divide, or the backend failed.
    """
    if mode not in MODES:
        raise CommError(f"there is no mode {mode!r} of test_collection; use {', '.join(MODES)}")
    return _bandwidth(mode, ele_num_total, group)


def test_all2all_balanced(ele_num: int, group: Group | None = None) -> tuple[float, float]:
    """Measure an all-to-all with equal messages; returns as `test_collection`.

    ele_num: float32 elements of a rank's send buffer, a multiple of the group's size.
    """
    return _bandwidth("all_to_all", ele_num, group)


# pytest would take these names of the earlier package for tests
test_collection.__test__ = False  # type: ignore[attr-defined]
test_all2all_balanced.__test__ = False  # type: ignore[attr-defined]


def _bandwidth(operation: str, num_elements: int, group: Group | None) -> tuple[float, float]:
    group = resolve_group(group, "global")
    ranks = primitives.ranks_of(group)
    size = group.size()
    device = primitives.device_of(group)
    if num_elements < 1 or (COLLECTIVES[operation].in_parts and num_elements % size):
        raise CommError(
            f"{operation} of {num_elements} elements over {size} ranks: use 1 or more"
            + (f", in {size} equal parts" if COLLECTIVES[operation].in_parts else "")
        )
    member = GroupMember(group, ranks, ranks[group.rank()])
    x = make_input(operation, ranks, member.index, num_elements, (torch.float32, device))
    (samples,) = in_turns(
        [tdp_call(operation, x, member)],
        sync(operation, member),
        device,
        iterations=NUM_ITERATIONS,
        warmup=NUM_WARMUP,
    )
    # float64: float32 rounds seconds to fewer digits than the clock has
    slowest = torch.tensor(samples.seconds, dtype=torch.float64, device=device)
    time_s = statistics.median(primitives.all_reduce(slowest, group, primitives.MAX).tolist())
    num_bytes = num_elements * x.element_size()
    return COLLECTIVES[operation].bus_bytes_per_s(num_bytes, size, time_s) / 1e9, time_s


def get_mp_ckpt_suffix() -> str:
    """Return `_tp_1_pp_0.pth` for tensor index 1 and pipeline index 0, without axes of one rank."""
    axes = (("tp", "tensor"), ("pp", "pipe"))
    parts = [
        f"_{short}_{tpc.get_group_rank(axis)}" for short, axis in axes if tpc.is_mode_inited(axis)
    ]
    return "".join(parts) + ".pth"


def main() -> None:
    """Run the earlier program: an all-gather over all ranks, which rank 0 reports in a line."""
    rank, size, *_ = setup_distributed()
    num = (GPU_ELEMENTS if torch.cuda.is_available() else CPU_ELEMENTS) // size * size
    bandwidth, time_s = test_collection(num, "all_gather")
    if rank == 0:
        sys.stdout.write(
            f"all_gather of {num} float32 elements over {size} ranks: "
            f"bandwidth {bandwidth:.3f} GB/s, median of {NUM_ITERATIONS} calls {time_s:.6f} s\n"
        )
    leave()


if __name__ == "__main__":
    main()

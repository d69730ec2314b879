"""All-reduce over two nodes of two ranks, 1 Gbit/s between nodes: by node beside gloo's flat ring.

The limit is the link: 16 MiB each way, as an all-reduce over two ranks sends.
"""

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks.common import in_turns, slowest
from benchmarks.data_parallel.collectives import summary
from benchmarks.data_parallel.link import RATES, Link, enter
from torchdistpackage.comm import by_torch
from torchdistpackage.comm.creation import world
from torchdistpackage.comm.primitives import SUM
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.comm.transport import hierarchical
from torchdistpackage.launch.workers import run_local

PRELOAD = ("torch", "torch.distributed", "benchmarks.data_parallel.hierarchy")
RANKS_PER_NODE = 2
SIZES_MIB = (16, 4)
BAR, AIM = 0.87, 0.78


def measure(link: Link, rounds: int) -> dict:
    """rows: ms of each side, by size. bars: by node / flat, at 16 MiB."""
    link.shape(RATES["1g"])
    num_procs, args = len(link.hosts) * RANKS_PER_NODE, (link.hosts, rounds)
    times = slowest(run_local(rank_main, args, num_procs=num_procs, preload=PRELOAD, env=link.env))
    bar = ("by node, 16 MiB", "flat, 16 MiB", BAR, AIM)
    return summary(times, {"all-reduce by node / flat ring, 16 MiB, 2 x 2 ranks": bar})


def rank_main(hosts: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side, by round."""
    node = int(os.environ["RANK"]) // RANKS_PER_NODE
    enter(hosts[node])
    setup_distributed()
    group = world()
    by_node = hierarchical.hierarchical_all_reduce(
        group, [rank // RANKS_PER_NODE for rank in range(group.size())]
    )
    assert by_node is not None
    check(group, by_node)
    sides: dict[str, Callable[[], object]] = {}
    for mib in SIZES_MIB:
        x = torch.zeros(mib * 2**18)
        sides[f"flat, {mib} MiB"] = lambda x=x: by_torch.all_reduce(x, group)
        sides[f"by node, {mib} MiB"] = lambda x=x: by_node(x, group, SUM).wait()
    times = in_turns(sides, rounds, dist.barrier)
    leave()
    return times


def check(group: dist.ProcessGroup, by_node: hierarchical.Start) -> None:
    """Both give the same sum of whole numbers.

    Raises:
        AssertionError: they do not.
    """
    x = (torch.arange(2**20) + group.rank()) % 1000.0
    flat = by_torch.all_reduce(x.clone(), group)
    if not torch.equal(by_node(x, group, SUM).wait(), flat):
        raise AssertionError("by node the sum is another than flat")

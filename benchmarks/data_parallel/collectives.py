"""Reduce-scatter and all-gather of slices beside gloo's own, 16 MiB over a link of 1 Gbit/s.

Half of an all-reduce, which uses the whole link, is the limit of both in fp32.
"""

import os
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from benchmarks.common import in_turns, rows, slowest
from benchmarks.data_parallel.link import RATES, Link, enter
from torchdistpackage.comm import by_torch
from torchdistpackage.comm.creation import world
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.comm.transport.sharded_flat import start_all_gather_v, start_reduce_scatter_v
from torchdistpackage.comm.work import Work
from torchdistpackage.launch.workers import run_local

PRELOAD = ("torch", "torch.distributed", "benchmarks.data_parallel.collectives")
NUM_BYTES = 16 * 2**20
NUM_IN_FLIGHT = 8
OFTEN = 5
"""Times as many rounds as of a case: gloo's all-gather takes now 72 ms, now 105."""
BARS = {"reduce-scatter": (0.55, 0.50), "all-gather": (0.75, 0.70)}
"""Bar and aim of ours / gloo's."""


def measure(link: Link, rounds: int) -> dict:
    """rows: ms of each side. bars: ours / gloo's."""
    link.shape(RATES["1g"])
    args = (link.hosts, rounds * OFTEN)
    times = slowest(run_local(rank_main, args, num_procs=2, preload=PRELOAD, env=link.env))
    bars = {f"{name} of slices / gloo's": (name, f"{name}, gloo's", *BARS[name]) for name in BARS}
    return summary(times, bars)


def summary(
    times: Mapping[str, Sequence[float]], bars: Mapping[str, tuple[str, str, float, float]]
) -> dict:
    """rows and bars of a part of the results. bars: text -> (side, peer, bar, aim)."""
    table = rows(times)
    return {
        "rows": {
            name: {
                "ms": f"{row['median']:.1f}",
                "min": f"{row['min']:.1f}",
                "rounds": row["rounds"],
            }
            for name, row in table.items()
        },
        "bars": {
            text: {"ratio": table[side]["median"] / table[peer]["median"], "bar": bar, "aim": aim}
            for text, (side, peer, bar, aim) in bars.items()
        },
    }


def rank_main(hosts: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side, by round."""
    enter(hosts[int(os.environ["RANK"])])
    setup_distributed()
    check(world())
    times = in_turns(make_sides(world()), rounds, dist.barrier)
    leave()
    return times


def even(num: int, size: int) -> list[int]:
    return [num * i // size for i in range(size + 1)]


def check(group: dist.ProcessGroup) -> None:
    """Ours and gloo's give the same numbers.

    Raises:
        AssertionError: they do not.
    """
    x = torch.rand(1000 * group.size(), generator=torch.Generator().manual_seed(group.rank()))
    bounds = even(len(x), group.size())
    part = by_torch.reduce_scatter(x, group)
    whole = by_torch.all_gather(part, group)
    start_reduce_scatter_v(x, bounds, group).wait()
    if not torch.equal(start_all_gather_v(x, bounds, group).wait(), whole):
        raise AssertionError("slices give other numbers than gloo's own collectives")


def make_sides(group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    x = torch.zeros(NUM_BYTES // 4)
    part, short = x.chunk(group.size())[group.rank()].clone(), x.chunk(NUM_IN_FLIGHT)
    bounds, short_bounds = even(len(x), group.size()), even(len(short[0]), group.size())

    def in_flight(start: Callable[..., Work]) -> None:
        for pending in [start(each, short_bounds, group) for each in short]:
            pending.wait()

    sides: dict[str, Callable[[], object]] = {
        "all-reduce, gloo's": lambda: by_torch.all_reduce(x, group),
        "reduce-scatter, gloo's": lambda: by_torch.reduce_scatter(x, group),
        "all-gather, gloo's": lambda: by_torch.all_gather(part, group),
    }
    starts = {"reduce-scatter": start_reduce_scatter_v, "all-gather": start_all_gather_v}
    for name, start in starts.items():
        sides |= {
            name: lambda start=start: start(x, bounds, group).wait(),
            f"{name}, {NUM_IN_FLIGHT} in flight": lambda start=start: in_flight(start),
            f"{name}, bf16 on the wire": lambda start=start: start(
                x, bounds, group, wire_dtype=torch.bfloat16
            ).wait(),
        }
    return sides

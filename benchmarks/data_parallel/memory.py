"""What each side holds, in MB of one rank: bytes of all tensors, after each operation.

The model is mlp, on one row, so that activations, which are the same for all, do not hide the rest.
"""

import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.data_parallel.cases import PRELOAD
from benchmarks.data_parallel.link import Link, enter
from benchmarks.data_parallel.models import CASES
from benchmarks.data_parallel.rounds import NUM_BATCHES, Runner
from benchmarks.data_parallel.sides import ALONE, SIDES
from tests.ddp.allocated import Meter
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.launch.workers import run_local

MB = 1e6
CASE = CASES["mlp"]


def measure(link: Link, rounds: int) -> dict:
    """rows: by side, between steps, at the worst moment of a step, and the optimizer's state.
    bars: no copy of a gradient beyond the largest one; states of a share of 1/n and 2 %."""
    link.shape(None)
    sides = [name for name in SIDES if "wire" not in name]
    rows = run_local(rank_main, (link.hosts, sides), num_procs=2, preload=PRELOAD, env=link.env)[0]
    plain = rows[ALONE]
    largest = max(p.nbytes for p in CASE.make().parameters()) / MB
    bars = {
        "NaiveDDP fp32: worst moment beyond plain training / largest gradient": {
            "ratio": (rows["NaiveDDP"]["worst"] - plain["worst"]) / largest,
            "bar": 1.02,
        }
    } | {
        f"{name}: optimizer state / share of 1/2": {
            "ratio": row["optimizer state"] / (plain["optimizer state"] / 2),
            "bar": 1.02,
        }
        for name, row in rows.items()
        if name.startswith("ZeRO-")
    }
    shown = {n: {key: f"{mb:.1f}" for key, mb in row.items()} for n, row in rows.items()}
    return {"rows": shown, "bars": bars}


def rank_main(hosts: Sequence[str], sides: Sequence[str]) -> dict[str, dict[str, float]]:
    enter(hosts[int(os.environ["RANK"])])
    rank = setup_distributed()[0]
    tpc.setup_process_groups([("data", dist.get_world_size())])
    generator = torch.Generator().manual_seed(rank)
    batches = [[x[:1] for x in CASE.draw(generator)] for _ in range(NUM_BATCHES)]
    found = {name: _held(name, batches) for name in sides}
    tpc.destroy()
    leave()
    return found


def _held(name: str, batches: Sequence[Sequence[Tensor]]) -> dict[str, float]:
    meter = Meter()
    trained = meter.run(lambda: SIDES[name].build(CASE.make(), CASE))
    runner = Runner(CASE, batches, trained)
    worst = 0
    for _ in range(4):
        meter.run(runner.step)
        worst = max(worst, meter.peak)
        if trained.finish is not None:
            meter.run(trained.finish)
    state = sum(x.nbytes for x in _tensors(_inner(trained.optimizer).state.values()))
    return {"between steps": meter.now / MB, "worst": worst / MB, "optimizer state": state / MB}


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """ZeroRedundancyOptimizer keeps its states one level down."""
    return getattr(optimizer, "optim", optimizer)


def _tensors(states: Iterable[dict[str, object]]) -> Iterable[Tensor]:
    for state in states:
        for value in state.values():
            if isinstance(value, DTensor):
                yield value.to_local()
            elif isinstance(value, Tensor):
                yield value

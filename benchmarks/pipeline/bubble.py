"""The measured bubble of a step beside the simulated one, with the costs of that very step."""

import os
from collections.abc import Sequence
from statistics import median

import torch.distributed as dist

from benchmarks.data_parallel.link import Link, enter
from benchmarks.pipeline.cases import PRELOAD
from benchmarks.pipeline.models import CASES
from benchmarks.pipeline.sides import CPU, SIDES, Task, own
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.launch.workers import run_local
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.schedule.generators import build
from torchdistpackage.schedule.trace_costs import attribute_bubble

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "interleaved-zb", "zb-v")
NUMBERS = (4, 8, 16)
STEPS = 3
"""For each round."""


def measure(link: Link, rounds: int) -> dict:
    """rows: bubbles in percent, medians of steps. bars: points between the two."""
    args = (link.hosts, rounds)
    env = {**link.env, "OMP_NUM_THREADS": "1"}
    first, _ = run_local(rank_main, args, num_procs=2, preload=PRELOAD, env=env)
    rows, bars = {}, {}
    for (schedule, m), steps in first.items():
        measured, predicted = (100 * median(part) for part in zip(*steps, strict=True))
        points = 100 * median(abs(a - b) for a, b in steps)
        name = f"{schedule}, m {m}"
        rows[name] = {
            "measured %": f"{measured:.1f}",
            "simulated %": f"{predicted:.1f}",
            "points apart": f"{points:.1f}",
        }
        bars[f"bubble measured and simulated, points apart, {name}"] = {
            "ratio": points,
            "bar": 3.0,
            "aim": 2.0,
        }
    return {"rows": rows, "bars": bars}


def rank_main(
    hosts: Sequence[str], rounds: int
) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """(measured, simulated) of each step, by schedule and microbatches; of the first rank."""
    enter(hosts[int(os.environ["RANK"])])
    rank = setup_distributed()[0]
    found = {}
    for name in SCHEDULES:
        for m in NUMBERS:
            steps = _steps(name, m, 1 + STEPS * rounds)[1:]
            found[name, m] = steps if rank == 0 else []
    leave()
    return found


def _steps(name: str, m: int, rounds: int) -> list[tuple[float, float]]:
    case, placement = CASES["gpt"], SIDES[name].placement
    stages = own(Task(case, m, ()), placement, case.stages(placement))
    schedule = build(name, 2, m, len(placement) // 2)
    executor = Executor(schedule, dist.group.WORLD, device=CPU)
    xs, ys = (value.chunk(m) for value in case.draw(m))
    last = len(placement) - 1

    def forward(s: int, i: int, received):
        given = received if isinstance(received, tuple) else (received,)
        output = stages[s](*((xs[i],) if s == 0 else given))
        return case.loss(output, ys[i]) / m if s == last else output

    found = []
    for _ in range(rounds):
        for stage in stages.values():
            stage.zero_grad()
        dist.barrier()
        executor.run(forward, record=True)
        spans = [None] * dist.get_world_size()
        dist.all_gather_object(spans, executor.spans)
        gap = attribute_bubble(schedule, spans)
        found.append((gap.measured.bubble, gap.predicted.bubble))
    return found

"""One interleaved run: every side trains its own replica on the same batch, taking turns.

A turn is a barrier and a few steps timed together. After its first step each side's gradients are
compared with those of the whole model in one process.
"""

import gc
import os
import time
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from benchmarks.common import take_turns
from benchmarks.data_parallel.link import RATES, enter_alone, shape
from benchmarks.pipeline.bars import CLOSE
from benchmarks.pipeline.models import CASES, TWO
from benchmarks.pipeline.sides import ALONE, SIDES, Running, Task
from benchmarks.turns import Turn
from torchdistpackage.comm.backends import deprioritize
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.parallel.pipeline.partition.layer_costs import (
    PieceCost,
    measure,
    measure_link,
    stage_costs,
)
from torchdistpackage.schedule.engine import simulate
from torchdistpackage.schedule.generators import build

WARM_UP_STEPS = 2
TOLERANCE = 1e-5
"""How far a gradient may be from one process's, relative to the largest of its tensor."""


def rank_main(
    hosts: Sequence[str],
    links: Sequence[str],
    name: str,
    numbers: Sequence[int],
    sides: Sequence[str],
    rounds: int,
    num_steps: int,
) -> dict[tuple[str, int], dict[str, object]]:
    """What one rank saw of a case, by link and number of microbatches."""
    enter_alone(hosts, int(os.environ["RANK"]))
    rank = setup_distributed()[0]
    found = {}
    for link in links:
        dist.barrier()
        if rank == 0:
            shape(hosts, RATES[link])
        dist.barrier()
        for m in numbers:
            found[link, m] = run(name, m, sides, rounds, num_steps)
            gc.collect()
    leave()
    return found


def run(name: str, m: int, sides: Sequence[str], rounds: int, num_steps: int) -> dict[str, object]:
    """turns: by side and round; distance: of gradients; by_time: first piece of
    the second stage, cut by time; ideal: share of one process's time that a step of 1F1B takes
    where messages are free, on the given cut and an even one."""
    task = Task(CASES[name], m, piece_costs(name, m), measure_link(dist.group.WORLD))
    expected = SIDES[ALONE].make(task)
    expected.step()
    running: dict[str, Running] = {}
    distance: dict[str, float] = {}
    for side in sides:
        dist.barrier()
        running[side] = SIDES[side].make(task)
        for _ in range(WARM_UP_STEPS):
            running[side].zero()
            running[side].step()
        distance[side] = furthest(running[side].gradients(), expected.gradients())

    def turn(side: str) -> Turn:
        deprioritize(SIDES[side].yields)
        return _turn(running[side], num_steps)

    turns = take_turns(sides, CLOSE, rounds, turn)
    by_time = task.by_time(TWO, "1f1b")[1].start
    return {"turns": turns, "distance": distance, "ideal": ideal(task), "by_time": by_time}


def piece_costs(name: str, m: int) -> list[PieceCost]:
    """Measured on both ranks at once, on a microbatch as it is trained."""
    case = CASES[name]
    x, y = (value.chunk(m)[0] for value in case.draw(m))
    chain = case.chain()
    *rest, head, loss = measure([*chain, lambda out: case.loss(out, y)], x, group=dist.group.WORLD)
    joined = PieceCost(
        head.forward_s + loss.forward_s,
        head.backward_s + loss.backward_s,
        head.input_s + loss.input_s,
        head.parameter_bytes,
        head.activation_bytes + loss.activation_bytes,
        loss.output_bytes,
    )
    return [*rest, joined]


def ideal(task: Task) -> dict[str, float]:
    m, p = task.num_microbatches, dist.get_world_size()
    work = m * sum(cost.step_s for cost in task.costs)
    costs = stage_costs(task.costs, task.case.stages(TWO))
    return {
        "same cut": simulate(build("1f1b", p, m), costs).total / work,
        "even": (m + p - 1) / (m * p),
    }


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest distance between gradients, of those there are here.

    Raises:
        AssertionError: it is beyond TOLERANCE.
    """
    worst = 0.0
    for name, gradient in found.items():
        other = expected[name]
        worst = max(worst, ((gradient - other).abs().max() / other.abs().max()).item())
        assert worst <= TOLERANCE, f"the gradient of {name} is off by {worst:.1e}"
    return worst


def _turn(running: Running, num_steps: int) -> Turn:
    """`num_steps` in a row."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(num_steps):
        running.zero()
        running.step()
    return begin, time.perf_counter()

"""One interleaved run: every side trains its own replica on the same data, taking turns.

A turn is a barrier and a few steps timed together. A side whose last gather runs under the next
forward makes one step more before the clock starts: then a gather is under way where it starts and
where it stops, and the time is that of steps in a row. (For the others a first step takes as long
as the following, measured.) `finish` ends the turn, untimed: nothing is left on the wire for the
next side.
"""

import gc
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from benchmarks.common import take_turns
from benchmarks.data_parallel.bars import CLOSE
from benchmarks.data_parallel.link import RATES, enter_alone, shape
from benchmarks.data_parallel.models import CASES, Case
from benchmarks.data_parallel.sides import CAPS, SIDES, Trained, alone
from benchmarks.turns import Turn
from torchdistpackage.comm.backends import deprioritize
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.comm.tpc import tpc

NUM_BATCHES = 4
WIRE_BYTES = 16 * 2**20


@dataclass
class Runner:
    """A side at work. phases: seconds of (forward, backward, step and zero_grad) of each step.

    yields: see `Side`.
    """

    case: Case
    batches: Sequence[tuple[torch.Tensor, ...]]
    trained: Trained
    yields: bool = True
    losses: list[float] = field(default_factory=list)
    phases: list[tuple[float, float, float]] = field(default_factory=list)

    def step(self) -> None:
        trained, begin = self.trained, time.perf_counter()
        batch = self.batches[len(self.losses) % len(self.batches)]
        loss = self.case.loss(trained.model, *batch)
        forward = time.perf_counter()
        loss.backward()
        trained.average()
        backward = time.perf_counter()
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.phases.append((forward - begin, backward - forward, time.perf_counter() - backward))

    def turn(self, num_steps: int) -> Turn:
        """`num_steps` in a row."""
        deprioritize(self.yields)
        dist.barrier()
        if self.trained.finish is not None:
            self.step()
        begin = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        end = time.perf_counter()
        if self.trained.finish is not None:
            self.trained.finish()
        return begin, end


def rank_main(
    hosts: Sequence[str],
    links: Sequence[str],
    model: str,
    sides: Sequence[str],
    rounds: int,
    num_steps: int,
) -> dict[str, dict[str, object]]:
    """What one rank saw of a model, by link."""
    enter_alone(hosts, int(os.environ["RANK"]))
    rank = setup_distributed()[0]
    tpc.setup_process_groups([("data", dist.get_world_size())])
    case, generator = CASES[model], torch.Generator().manual_seed(rank)
    batches = [case.draw(generator) for _ in range(NUM_BATCHES)]
    found = {}
    for link in links:
        dist.barrier()
        if rank == 0:
            shape(hosts, RATES[link])
        dist.barrier()
        found[link] = run(case, batches, sides, rounds, num_steps)
        gc.collect()
    tpc.destroy()
    leave()
    return found


def run(
    case: Case,
    batches: Sequence[tuple[torch.Tensor, ...]],
    sides: Sequence[str],
    rounds: int,
    num_steps: int,
) -> dict[str, object]:
    """turns: by round, phases_s: medians, losses: of every step, by side;
    bytes_per_s: of an all-reduce alone; trace: see `trace`."""
    wire_s = statistics.median(_wire_s() for _ in range(5))
    runners, known = {}, {**SIDES, **CAPS}
    for name in sides:
        torch.manual_seed(0)
        trained = known[name].build(case.make(), case)
        runner = runners[name] = Runner(case, batches, trained, known[name].yields)
        for _ in range(known[name].warm_up_steps):
            runner.step()
        if runner.trained.finish is not None:
            runner.trained.finish()
        runner.phases.clear()
    turns = take_turns(sides, CLOSE, rounds, lambda name: runners[name].turn(num_steps))
    phases = {
        name: [statistics.median(phase) for phase in zip(*runner.phases, strict=True)]
        for name, runner in runners.items()
    }
    return {
        "turns": turns,
        "phases_s": phases,
        "losses": {name: runner.losses for name, runner in runners.items()},
        "bytes_per_s": WIRE_BYTES / wire_s,
        "trace": trace(case, batches),
    }


def trace(case: Case, batches: Sequence[tuple[torch.Tensor, ...]]) -> dict[str, object]:
    """One step without communication, the median of five by when its last gradient was there.

    ready: (seconds since the step began, bytes) of each gradient in the order of the backward.
    optimizer_s: of step and zero_grad.
    """
    runner = Runner(case, batches, alone(case.make(), case))
    ready: list[tuple[float, int]] = []
    for parameter in runner.trained.model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: ready.append((time.perf_counter(), p.nbytes))
        )
    steps = []
    for _ in range(6):
        dist.barrier()
        ready.clear()
        begin = time.perf_counter()
        runner.step()
        steps.append([(at - begin, size) for at, size in ready])
    optimizer_s = statistics.median(phase[2] for phase in runner.phases[1:])
    steps = sorted(steps[1:], key=lambda step: step[-1][0])
    return {"ready": steps[len(steps) // 2], "optimizer_s": optimizer_s}


def _wire_s() -> float:
    flat = torch.ones(WIRE_BYTES // 4)
    dist.barrier()
    begin = time.perf_counter()
    dist.all_reduce(flat)
    return time.perf_counter() - begin

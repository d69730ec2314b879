"""What a step allocates in Python for a microbatch, as tracemalloc counts it.

The most that a step holds at once beyond what was there before it, in bytes; what a step of twice
the microbatches adds to that is what a microbatch of the steady state costs. Collection is off.
"""

import gc
import os
import tracemalloc
from collections.abc import Sequence

import torch.distributed as dist

from benchmarks.data_parallel.link import Link, enter
from benchmarks.pipeline.bars import PEER
from benchmarks.pipeline.cases import PRELOAD
from benchmarks.pipeline.models import CASES
from benchmarks.pipeline.sides import SIDES, Running, Task
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.launch.local import run_local

PAIRS = {
    "1f1b": PEER,
    "interleaved": "torch Interleaved1F1B",
    "interleaved-zb": "torch InterleavedZeroBubble",
}
FEW, MANY = 16, 32
TRIES = 5


def measure(link: Link, rounds: int) -> dict:
    """rows: bytes by side, of the busier rank. bars: ours against torch's."""
    env = {**link.env, "OMP_NUM_THREADS": "1"}
    ranks = run_local(rank_main, (link.hosts,), num_procs=2, preload=PRELOAD, env=env)
    held = {side: [max(r[side][i] for r in ranks) for i in (0, 1)] for side in ranks[0]}
    each = {side: (many - few) / (MANY - FEW) for side, (few, many) in held.items()}
    rows = {
        side: {f"m {FEW}": few, f"m {MANY}": many, "a microbatch": f"{each[side]:.0f}"}
        for side, (few, many) in held.items()
    }
    bars = {
        f"Python bytes a microbatch, {side} / {peer}": {
            "ratio": each[side] / each[peer],
            "bar": 0.25,
        }
        for side, peer in PAIRS.items()
    }
    return {"rows": rows, "bars": bars}


def rank_main(hosts: Sequence[str]) -> dict[str, tuple[int, int]]:
    enter(hosts[int(os.environ["RANK"])])
    setup_distributed()
    found = {}
    for side in (name for pair in PAIRS.items() for name in pair):
        made = [SIDES[side].make(Task(CASES["tiny"], m, ())) for m in (FEW, MANY)]
        found[side] = tuple(_most_bytes(running) for running in made)
    leave()
    return found


def _most_bytes(running: Running) -> int:
    """The least of a few steps, after two that warm up."""
    for _ in range(2):
        running.step()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    found = []
    for _ in range(TRIES):
        dist.barrier()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        running.step()
        found.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    gc.enable()
    return min(found)

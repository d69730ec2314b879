"""What a step allocates in Python for a microbatch of its steady state (held.py)."""

import os
from collections.abc import Sequence

from benchmarks.data_parallel.link import Link, enter
from benchmarks.pipeline.bars import PEER
from benchmarks.pipeline.cases import PRELOAD
from benchmarks.pipeline.held import bytes_per_microbatch
from benchmarks.pipeline.models import CASES, Case
from benchmarks.pipeline.sides import SIDES, Task
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.launch.workers import run_local

PAIRS = {
    "1f1b": PEER,
    "interleaved": "torch Interleaved1F1B",
    "interleaved-zb": "torch InterleavedZeroBubble",
}
M = 32
TRIES = 3


def measure(link: Link, rounds: int) -> dict:
    """rows: bytes by side, of the busier rank. bars: ours against torch's."""
    env = {**link.env, "OMP_NUM_THREADS": "1"}
    ranks = run_local(rank_main, (link.hosts,), num_procs=2, preload=PRELOAD, env=env)
    each = {side: max(rank[side] for rank in ranks) for side in ranks[0]}
    rows = {side: {f"m {M}": f"{found:.0f}"} for side, found in each.items()}
    bars = {
        f"Python bytes a microbatch, {side} / {peer}": {
            "ratio": each[side] / each[peer],
            "bar": 0.25,
        }
        for side, peer in PAIRS.items()
    }
    return {"rows": rows, "bars": bars}


def linears(placement: tuple[int, ...]) -> Case:
    """tiny, one piece a stage: little else than the runtime allocates."""
    tiny, num = CASES["tiny"], len(placement)
    cuts = {placement: tuple(range(1, num))}
    return Case(lambda: tiny.chain()[:num], tiny.draw, tiny.loss, cuts)


def rank_main(hosts: Sequence[str]) -> dict[str, float]:
    """By side, the least of a few tries."""
    enter(hosts[int(os.environ["RANK"])])
    setup_distributed()
    found = {}
    for side in (name for pair in PAIRS.items() for name in pair):
        made = SIDES[side].make(Task(linears(SIDES[side].placement), M, ()))
        tries = (bytes_per_microbatch(made.step, made.stages[0], M) for _ in range(TRIES))
        found[side] = min(tries)
    leave()
    return found

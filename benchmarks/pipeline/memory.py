"""Peak resident memory of a rank, in MB, as microbatches of one size grow in number.

Every number is of processes of its own: what the system counted as their most, the least of a
few tries, since what else a machine does adds to it now and then.
"""

import os
import resource
from collections.abc import Sequence

import torch

from benchmarks.data_parallel.link import Link, enter
from benchmarks.pipeline.bars import PEER
from benchmarks.pipeline.cases import PRELOAD
from benchmarks.pipeline.models import BATCH, CASES, LENGTH, VOCAB, Case
from benchmarks.pipeline.sides import SIDES, Task
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.launch.workers import run_local

OURS = "1f1b"
NUMBERS = (4, 32)
TRIES = 2
MB = 1e6


def measure(link: Link, rounds: int) -> dict:
    """rows: by side, of its larger rank. bars: ours against torch's, and its own growth."""
    peaks = {
        side: {m: min(_peak_mb(link, side, m) for _ in range(TRIES)) for m in NUMBERS}
        for side in (PEER, OURS)
    }
    first, last = NUMBERS[0], NUMBERS[-1]
    bars = {
        f"peak memory, {OURS} / {PEER}, m {m}": {
            "ratio": peaks[OURS][m] / peaks[PEER][m],
            "bar": 1.00,
            "aim": 0.9,
        }
        for m in NUMBERS
    }
    bars[f"peak memory, {OURS}, m {last} / m {first}"] = {
        "ratio": peaks[OURS][last] / peaks[OURS][first],
        "bar": 1.02,
    }
    rows = {
        side: {f"m {m}": f"{mb:.0f}" for m, mb in found.items()} for side, found in peaks.items()
    }
    return {"rows": rows, "bars": bars}


def _peak_mb(link: Link, side: str, m: int) -> float:
    env = {**link.env, "OMP_NUM_THREADS": "1"}
    return max(run_local(rank_main, (link.hosts, side, m), num_procs=2, preload=PRELOAD, env=env))


def rank_main(hosts: Sequence[str], side: str, m: int) -> float:
    enter(hosts[int(os.environ["RANK"])])
    setup_distributed()
    running = SIDES[side].make(Task(_growing(), m, ()))
    for _ in range(3):
        running.zero()
        running.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB
    leave()
    return peak


def _growing() -> Case:
    """gpt, with 4 sequences a microbatch."""
    gpt = CASES["gpt"]

    def draw(m: int):
        shape = (BATCH // 4 * m, LENGTH + 1)
        tokens = torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Case(gpt.chain, draw, gpt.loss, gpt.cuts)

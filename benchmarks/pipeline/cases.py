"""A case: a model, a link, a number of microbatches; timed, and what is kept of it."""

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import median

from benchmarks.data_parallel.link import Link
from benchmarks.pipeline.bars import PEER
from benchmarks.pipeline.rounds import rank_main
from benchmarks.pipeline.sides import ALONE
from benchmarks.turns import rounds_s, spread_ms
from torchdistpackage.launch.workers import run_local

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.pipelining",
    "torch._dynamo",
    "benchmarks.pipeline.rounds",
)
STEPS = {"gpt": 1, "tiny": 20}
"""Steps of a turn."""


def measure(
    link: Link,
    links: Sequence[str],
    name: str,
    numbers: Sequence[int],
    sides: Sequence[str],
    rounds: int,
    starts: int = 1,
) -> dict[tuple[str, int], dict]:
    """Cases by link and number of microbatches, each over as many starts of ranks."""
    args = (link.hosts, links, name, numbers, sides, rounds, STEPS[name])
    env = {**link.env, "OMP_NUM_THREADS": "1"}
    runs = [
        run_local(rank_main, args, num_procs=2, preload=PRELOAD, env=env) for _ in range(starts)
    ]
    return {
        key: summarise([[rank[key] for rank in run] for run in runs], STEPS[name])
        for key in runs[0][0]
    }


def summarise(runs: Sequence[Sequence[Mapping]], num_steps: int) -> dict:
    """A case, from what `rounds.run` returned on two ranks, start by start, for turns of so many
    steps.

    ideal_ms: a step of 1F1B where messages are free, on the given cut and on an even one. by_time:
    for each start the piece with which the second stage begins where time decides.
    """
    first, sides = runs[0][0], {}
    for name in first["turns"]:
        rounds = [rounds_s([rank["turns"][name] for rank in run], num_steps) for run in runs]
        sides[name] = spread_ms([s for some in rounds for s in some])
        sides[name]["gradients"] = max(rank["distance"][name] for run in runs for rank in run)
    single = sides[ALONE]["median"] if ALONE in sides else None
    ideal = {cut: median(run[0]["ideal"][cut] for run in runs) for cut in first["ideal"]}
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "load": os.getloadavg()[0],
        "ideal_ms": {
            cut: None if single is None else share * single for cut, share in ideal.items()
        },
        "by_time": [run[0]["by_time"] for run in runs],
        "sides": sides,
    }


def show(title: str, case: Mapping) -> None:
    """Print a case."""
    ideals = ", ".join(f"{cut} {ms:.1f}" for cut, ms in case["ideal_ms"].items() if ms)
    print(f"\n{title}; ideal of 1F1B: {ideals} ms")
    print(f"{'ms a step':30}  median     min     max / {PEER}  gradients")
    peer = case["sides"].get(PEER, {"median": float("nan")})["median"]
    for name, side in case["sides"].items():
        times = f"{side['median']:8.2f}{side['min']:8.2f}{side['max']:8.2f}"
        ratio = side["median"] / peer
        print(f"{name:30}{times}{ratio:10.3f}{side['gradients']:14.0e}", flush=True)

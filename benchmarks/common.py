"""What all benchmarks share: rounds that take turns, medians, and the report.

One rule: implementations are timed in turns inside one run, so that a load from outside falls on
all of them alike, and only ratios within one run are compared.
"""

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from torchdistpackage.launch.workers import run_local

T = TypeVar("T")

PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "numpy")
AGAIN = 2
"""More turns that a side whose bar is close takes in a round; its median turn is its round."""


def arguments(doc: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def take_turns(
    sides: Sequence[str], close: Collection[str], rounds: int, turn: Callable[[str], T]
) -> dict[str, list[list[T]]]:
    """What each call of `turn` returned, by side and round.

    The order is drawn anew each time, alike on all ranks, so that nobody always follows the same
    one, whose memory and caches he finds.
    """
    taken: dict[str, list[list[T]]] = {name: [[] for _ in range(rounds)] for name in sides}
    draw = random.Random(0)
    for number in range(rounds):
        for some in (
            list(sides),
            *([name for name in sides if name in close] for _ in range(AGAIN)),
        ):
            draw.shuffle(some)
            for name in some:
                taken[name][number].append(turn(name))
    return taken


def in_turns(
    sides: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[], object] | None
) -> dict[str, list[float]]:
    """Seconds of each call, by name. `before` (a barrier) runs untimed ahead of each.

    One round ahead of the others warms up.
    """

    def turn(name: str) -> float:
        if before is not None:
            before()
        begin = time.perf_counter()
        sides[name]()
        return time.perf_counter() - begin

    taken = take_turns([*sides], (), rounds + 1, turn)
    return {name: [seconds for (seconds,) in found[1:]] for name, found in taken.items()}


def slowest(per_rank: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Round by round the time of the rank that took longest."""
    return {
        name: [max(turn) for turn in zip(*(times[name] for times in per_rank), strict=True)]
        for name in per_rank[0]
    }


def local(fn: Callable[..., object], *args: object, num_procs: int = 2, preload=PRELOAD) -> list:
    """Results of `fn(*args)` on ranks with one thread each, over loopback."""
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return run_local(fn, args, num_procs=num_procs, preload=preload, env=env)


def rows(times: Mapping[str, Sequence[float]], unit: float = 1e3) -> dict[str, dict[str, float]]:
    """Median and min of each, in seconds x `unit`."""
    return {
        name: {"median": statistics.median(t) * unit, "min": min(t) * unit, "rounds": len(t)}
        for name, t in times.items()
    }


def show(title: str, table: Mapping[str, Mapping[str, float]], unit: str, peer: str = "") -> None:
    """Print a table; with `peer`, each median also as a multiple of that row's."""
    print(f"\n{title} [{unit}]\n{'':36}{'median':>10}{'min':>10}" + ("   / peer" if peer else ""))
    for name, row in table.items():
        line = f"{name:36}{row['median']:10.2f}{row['min']:10.2f}"
        print(line + (f"{row['median'] / table[peer]['median']:9.2f}" if peer else ""), flush=True)


def machine() -> dict[str, object]:
    """What the results were measured on."""
    import torch  # here: who only takes turns needs none

    return {
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.cuda.is_available(),
    }


def write(path: Path | None, results: Mapping[str, object]) -> None:
    """The results with what they were measured on."""
    if path is not None:
        now = datetime.now().astimezone().isoformat()
        found = {"date": now, "machine": machine(), **results}
        path.write_text(json.dumps(found, indent=2) + "\n")

"""A case: one model over one link, timed on two ranks, and what the results file keeps of it."""

import os
from collections.abc import Mapping, Sequence
from datetime import datetime

from benchmarks.data_parallel import limits
from benchmarks.data_parallel.bars import BEST
from benchmarks.data_parallel.link import Link
from benchmarks.data_parallel.rounds import rank_main
from benchmarks.data_parallel.sides import ALONE, CAPS, SIDES
from benchmarks.turns import rounds_s, spread_ms
from torchdistpackage.launch.workers import run_local

PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "benchmarks.data_parallel.rounds")
STEPS = {"mlp": 2, "gpts": 1, "gpt": 1, "tiny": 5}
"""Steps of a turn: a turn takes half a second to two."""


def measure(
    link: Link, links: Sequence[str], model: str, sides: Sequence[str], rounds: int
) -> dict[str, dict]:
    """Cases of a model by the name of the link, one start of ranks for all of them."""
    args = (link.hosts, links, model, sides, rounds, STEPS[model])
    ranks = run_local(rank_main, args, num_procs=2, preload=PRELOAD, env=link.env)
    return {name: summarise(*(rank[name] for rank in ranks), STEPS[model]) for name in links}


def summarise(first: Mapping, second: Mapping, num_steps: int) -> dict:
    """A case, from what `rounds.run` returned on two ranks. Times in ms.

    num_steps: of a turn. Phases, trace and rate are the first rank's.
    The bound and the roofline are those of fp32 on the wire and, at [1], of bf16.

    Raises:
        AssertionError: losses of a side are further from torch DDP's than it may be.
    """
    known = {**SIDES, **CAPS}
    trace, rate = first["trace"], first["bytes_per_s"]
    size = limits.num_bytes(trace)
    sides = {}
    for name, turns in first["turns"].items():
        sides[name] = spread_ms(rounds_s([turns, second["turns"][name]], num_steps))
        sides[name]["phases_ms"] = [round(s * 1e3, 1) for s in first["phases_s"][name]]
    compute_s = sides[ALONE]["median"] / 1e3 if ALONE in sides else 0.0
    roofs = {s: limits.roofline_s(compute_s, size * s, rate) * 1e3 for s in (1.0, 0.5)}
    peer = BEST if BEST in sides else next(name for name in sides if name != ALONE)
    for name, side in sides.items():
        side["roofline"] = round(roofs[known[name].share] / side["median"], 3)
        side["loss"] = None
        if (tolerance := known[name].tolerance) is not None:
            side["loss"] = max(
                _distance(rank["losses"][name], rank["losses"][peer]) for rank in (first, second)
            )
            if side["loss"] > tolerance:
                raise AssertionError(
                    f"{name}: a loss is off by {side['loss']:.1e} from that of {peer}; "
                    f"{tolerance:.0e} is allowed"
                )
    first_bucket_s = next(limits.buckets(trace))[0]
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "load": os.getloadavg()[0],
        "wire_mb_s": rate / 1e6,
        "gradient_mb": size / 1e6,
        "compute_ms": compute_s * 1e3,
        "roofline_ms": [*roofs.values()],
        "bound_ms": [limits.bound_s(trace, rate, share) * 1e3 for share in roofs],
        "first_bucket_ms": first_bucket_s * 1e3,
        "last_gradient_ms": trace["ready"][-1][0] * 1e3,
        "optimizer_ms": trace["optimizer_s"] * 1e3,
        "sides": sides,
    }


def show(title: str, case: Mapping) -> None:
    """Print a case."""
    roofline, bound = case["roofline_ms"][0], case["bound_ms"][0]
    print(
        f"\n{title}: {case['gradient_mb']:.1f} MB at {case['wire_mb_s']:.0f} MB/s, roofline "
        f"{roofline:.0f} ms, bound of an all-reduce in the backward {bound:.0f} ms"
    )
    best = case["sides"].get(BEST, {"median": float("nan")})["median"]
    print(f"{'ms a step':28}  median     min     max  /best roofline  forward backward step")
    for name, side in case["sides"].items():
        times = f"{side['median']:8.1f}{side['min']:8.1f}{side['max']:8.1f}"
        phases = "".join(f"{ms:9.1f}" for ms in side["phases_ms"])
        ratio = side["median"] / best
        print(f"{name:28}{times}{ratio:7.3f}{side['roofline']:9.2f}{phases}", flush=True)


def _distance(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative one, step by step; the shorter run decides how many."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=False))

"""A tensor-parallel block beside torch's and one by hand, on two hosts joined by a link.

    python -m benchmarks.tensor_parallel                    everything, 2 minutes, JSON and pages
    python -m benchmarks.tensor_parallel --quick --parts 'd 64;d 384'

As root. A run replaces only the parts that it measured.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime

from benchmarks.common import machine
from benchmarks.data_parallel.link import Link
from benchmarks.judged import any_fails
from benchmarks.tensor_parallel.bars import CASES, judge
from benchmarks.tensor_parallel.rounds import rank_main
from benchmarks.tensor_parallel.sides import CASES as SIZES
from benchmarks.tensor_parallel.table import PAGES
from benchmarks.turns import rounds_s, spread_ms
from torchdistpackage.launch.workers import run_local

PRELOAD = ("torch", "torch.distributed.tensor.parallel", "benchmarks.tensor_parallel.rounds")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    split = lambda text: text.split(";")  # noqa: E731
    parser.add_argument("--parts", type=split, default=[*CASES], help=";".join(CASES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="3 rounds, not written")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a bar fails")
    options = parser.parse_args(argv)
    path, rounds = PAGES.results, 3 if options.quick else options.rounds
    known = json.loads(path.read_text()) if path.exists() and not options.quick else {}
    results = {**known, "cases": dict(known.get("cases", {}))}
    with Link() as link:
        for part in options.parts:
            results["cases"][part] = measure(link, part, rounds)
            show(part, results["cases"][part])
            results |= {"date": datetime.now().astimezone().isoformat(), "machine": machine()}
            if not options.quick:
                path.write_text(json.dumps(results, indent=1) + "\n")
    failed = any_fails(judge(results))
    if not options.quick:
        PAGES.write(results)
    return int(options.strict and failed)


def measure(link: Link, part: str, rounds: int) -> dict[str, object]:
    rate, sizes, sequence, sides = CASES[part]
    args = (link.hosts, rate, sizes, sequence, sides, rounds)
    env = {**link.env, "OMP_NUM_THREADS": "1"}
    ranks = run_local(rank_main, args, num_procs=2, preload=PRELOAD, env=env)
    found: dict[str, dict[str, object]] = {}
    for side in sides:
        turns = [rank["turns"][side] for rank in ranks]
        found[side] = spread_ms(rounds_s(turns, SIZES[sizes].calls))
        found[side]["distance"] = max(rank["distance"][side] for rank in ranks)
    return {"sides": found}


def show(part: str, case: dict) -> None:
    print(f"\n{part:30}  median     min     max  ms a call")
    for name, side in case["sides"].items():
        print(f"{name:30}{side['median']:8.2f}{side['min']:8.2f}{side['max']:8.2f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

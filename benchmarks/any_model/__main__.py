"""A model split by one line beside transformers' own plan, DTensor, threads and one process.

    python -m benchmarks.any_model                    everything, 9 minutes, JSON and pages
    python -m benchmarks.any_model --quick --parts 'Llama 256;GPT-2 512'

It needs the extra `hf`. A run replaces only the parts that it measured.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from benchmarks.any_model.bars import CASES, WORK, judge
from benchmarks.any_model.models import CASES as SIZES
from benchmarks.any_model.table import PAGES
from benchmarks.common import local, machine
from benchmarks.judged import any_fails
from benchmarks.turns import rounds_s, spread_ms

PRELOAD = ("torch", "torch.distributed.tensor.parallel", "benchmarks.any_model.rounds")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    split = lambda text: text.split(";")  # noqa: E731
    parser.add_argument("--parts", type=split, default=[*CASES], help=";".join(CASES))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="3 rounds, not written")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a bar fails")
    options = parser.parse_args(argv)
    path, rounds = PAGES.results, 3 if options.quick else options.rounds
    known = json.loads(path.read_text()) if path.exists() and not options.quick else {}
    results = {**known, "cases": dict(known.get("cases", {}))}
    for part in options.parts:
        results["cases"][part] = measure(part, rounds)
        show(part, results["cases"][part])
        results |= {"date": datetime.now().astimezone().isoformat(), "machine": machine()}
        if not options.quick:
            path.write_text(json.dumps(results, indent=1) + "\n")
    results["cases"] = {part: results["cases"][part] for part in CASES if part in results["cases"]}
    failed = any_fails(judge(results))
    if not options.quick:
        path.write_text(json.dumps(results, indent=1) + "\n")
        PAGES.write(results)
    return int(options.strict and failed)


def measure(part: str, rounds: int) -> dict[str, Any]:
    from benchmarks.any_model.rounds import rank_main

    sides, size = CASES[part], SIZES[part]
    with tempfile.TemporaryDirectory() as folder:
        args = (part, sides, rounds, folder)
        ranks = local(rank_main, *args, num_procs=size.ranks, preload=PRELOAD)
    per_turn = {"a token": size.num_new, "a step": 1}
    return {
        "ranks": size.ranks,
        "rounds": rounds,
        **{key: ranks[0][key] for key in ("parameters", "distance", "sent")},
        "work": {
            work: {
                side: spread_ms(rounds_s([r["turns"][work][side] for r in ranks], per_turn[work]))
                for side in sides
            }
            for work in WORK
        },
    }


def show(part: str, case: dict[str, Any]) -> None:
    for work, sides in case["work"].items():
        print(f"\n{part}, ms {work:20}  median     min     max")
        for name, side in sides.items():
            times = f"{side['median']:8.2f}{side['min']:8.2f}{side['max']:8.2f}"
            print(f"{name:36}{times}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

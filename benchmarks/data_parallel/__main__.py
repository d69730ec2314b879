"""Data parallel training beside torch's, on two hosts joined by a link of known rate.

    python -m benchmarks.data_parallel                    everything, 13 minutes, JSON and docs
    python -m benchmarks.data_parallel --quick --parts 'mlp;gpts' --sides 'NaiveDDP*;torch DDP*'

As root. A run replaces only the parts that it measured; a part that is done is in the file.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.common import machine
from benchmarks.data_parallel import caps, collectives, hierarchy, memory, table
from benchmarks.data_parallel.bars import BEST, EARLIER, judge
from benchmarks.data_parallel.cases import measure, show
from benchmarks.data_parallel.link import RATES, Link
from benchmarks.data_parallel.sides import ALONE, SIDES
from benchmarks.judged import any_fails

OURS = ("NaiveDDP", "NaiveDDP, bf16 wire", "ZeRO-?", "ZeRO, chosen", "ZeRO-1, bf16 wire")
DENSE = (ALONE, "all-reduce*", "torch*", "FSDP2", *OURS)
FEW = (ALONE, "torch DDP", f"{BEST}*", "torch DDP, bf16*", "NaiveDDP", "ZeRO-1*", "ZeRO, chosen")
FEWEST = (ALONE, f"{BEST}*", "NaiveDDP", "ZeRO, chosen")
PLAN: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("mlp", tuple(RATES), (*DENSE, EARLIER)),
    ("gpts", tuple(RATES), ("*",)),
    ("gpt", ("1g",), FEW),
    ("gpt", ("4g", "free"), FEWEST),
    ("tiny", ("free",), (ALONE, "torch DDP", f"{BEST}*", "NaiveDDP", "ZeRO-[12]", EARLIER)),
]
"""Model, links and sides of the whole run. gpt takes seconds a step, and hides what others send."""

PARTS: dict[str, Callable[[Link, int], dict]] = {
    "collectives": collectives.measure,
    "hierarchy": hierarchy.measure,
    "memory": memory.measure,
    "caps": caps.measure,
}
"""What is no case: each gives rows of a table, and bars. All but caps are in the whole run."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    partial = bool(options.quick or options.sides)
    results = {} if partial or not options.json.exists() else json.loads(options.json.read_text())
    with Link() as link:
        for part in options.parts:
            if part in PARTS:
                results[part] = PARTS[part](link, options.rounds)
                print(f"\n{part}", *table.rows(results[part]["rows"]), sep="\n", flush=True)
            else:
                run_cases(results, link, part, options)
            results |= {"date": datetime.now().astimezone().isoformat(), "machine": machine()}
            if not partial:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    failed = any_fails(judge(results))
    if options.json == table.PAGES.results and not partial:
        table.PAGES.write(results)
    return int(options.strict and failed)


def run_cases(results: dict, link: Link, model: str, options: argparse.Namespace) -> None:
    """Put the cases of a model into `results`, and print them."""
    for _, links, patterns in (row for row in PLAN if row[0] == model):
        links = [name for name in options.links if name in links]
        sides = [n for n in SIDES if any(fnmatchcase(n, p) for p in options.sides or patterns)]
        if links and sides:
            for name, case in measure(link, links, model, sides, options.rounds).items():
                results.setdefault("cases", {}).setdefault(name, {})[model] = case
                show(f"{model}, {name}", case)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])

    def names(text: str) -> list[str]:
        return text.split(";")

    every = [*dict.fromkeys(model for model, _, _ in PLAN), *PARTS]
    usual = [name for name in every if name != "caps"]
    parser.add_argument("--parts", type=names, default=usual, help=";".join(every))
    parser.add_argument("--links", type=names, default=[*RATES], help=";".join(RATES))
    parser.add_argument("--sides", type=names, help="patterns, 'NaiveDDP;torch*': not written")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="3 rounds, not written")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a bar fails")
    parser.add_argument("--json", type=Path, default=table.PAGES.results)
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds = 3
    return options


if __name__ == "__main__":
    sys.exit(main())

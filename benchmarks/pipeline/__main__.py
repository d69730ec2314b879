"""The pipeline beside torch's, on two ranks, one thread each, joined by a link of known rate.

    python -m benchmarks.pipeline                    everything, JSON and docs
    python -m benchmarks.pipeline --quick --parts tiny --sides '1f1b;torch*'

As root. A run replaces only the parts that it measured.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.common import machine
from benchmarks.data_parallel.link import Link
from benchmarks.judged import any_fails
from benchmarks.pipeline import allocations, bubble, memory, table
from benchmarks.pipeline.bars import FUNCTIONS, OURS, PEER, judge
from benchmarks.pipeline.cases import measure, show
from benchmarks.pipeline.sides import SIDES

PLAN: dict[str, tuple[tuple[str, ...], tuple[int, ...], list[str]]] = {
    "gpt": (
        ("free", "1g"),
        (4, 8, 16),
        [n for n in SIDES if n != FUNCTIONS and (not n.endswith(OURS) or n.startswith(PEER))],
    ),
    "tiny": (("free",), (4, 16), [name for name in SIDES if "by time" not in name]),
}
"""Links, numbers of microbatches and sides of a model, in the whole run."""

PARTS: dict[str, Callable[[Link, int], dict]] = {
    "bubble": bubble.measure,
    "memory": memory.measure,
    "allocations": allocations.measure,
}
"""What is no case: each gives rows of a table, and bars."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    partial = bool(options.quick or options.sides)
    results = {} if partial or not options.json.exists() else json.loads(options.json.read_text())
    with Link() as link:
        for part in options.parts:
            if part in PARTS:
                link.shape(None)
                results[part] = PARTS[part](link, options.rounds * options.starts)
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
    planned, numbers, known = PLAN[model]
    links = [name for name in options.links if name in planned]
    numbers = [m for m in numbers if m in options.microbatches]
    patterns = options.sides or ["*"]
    sides = [n for n in known if any(fnmatchcase(n, p) for p in patterns)]
    counts = options.rounds, options.starts
    for (name, m), case in measure(link, links, model, numbers, sides, *counts).items():
        results.setdefault("cases", {}).setdefault(name, {})[f"{model}, m {m}"] = case
        show(f"{model}, {m} microbatches, {name}", case)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])

    def names(text: str) -> list[str]:
        return text.split(";")

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(";")]

    every = [*PLAN, *PARTS]
    parser.add_argument("--parts", type=names, default=every, help=";".join(every))
    parser.add_argument("--links", type=names, default=["free", "1g"], help="free;1g")
    parser.add_argument("--microbatches", type=numbers, default=[4, 8, 16], help="4;8;16")
    parser.add_argument("--sides", type=names, help="patterns, '1f1b;torch*': not written")
    parser.add_argument("--rounds", type=int, default=2, help="of each start")
    parser.add_argument("--starts", type=int, default=3, help="of ranks, for steps of a model")
    parser.add_argument("--quick", action="store_true", help="3 rounds, not written")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a bar fails")
    parser.add_argument("--json", type=Path, default=table.PAGES.results)
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.starts = 3, 1
    return options


if __name__ == "__main__":
    sys.exit(main())

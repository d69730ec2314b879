"""docs/data_parallel_benchmarks.md, written from the results file: `python -m` this module.

One rule: no number is typed by hand; what stands before the marker is prose.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.data_parallel.bars import BEST, judge
from benchmarks.judged import bars_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "data_parallel.json"
PAGE = ROOT / "docs" / "data_parallel_benchmarks.md"
MARKER = "<!-- benchmarks/data_parallel/table.py writes everything below this line -->\n"

LINKS = {"1g": "1 Gbit/s", "4g": "4 Gbit/s", "free": "unshaped (veth)"}


def page(results: Mapping) -> str:
    """Everything below the marker."""
    machine = results["machine"]
    lines = [
        f"Measured {results['date'][:10]} on {machine['system']}, {machine['cores']} cores, "
        f"torch {machine['torch']}, load {machine['load'][0]:.1f} when it ended.",
        *bars_table(judge(results)),
    ]
    for link, models in results.get("cases", {}).items():
        for model, case in models.items():
            lines += _case(f"{model}, {LINKS[link]}", case)
    for title, part in (
        ("Exchanges of slices", "collectives"),
        ("All-reduce over two nodes of two ranks", "hierarchy"),
        ("Memory of one rank, mlp on one row, MB", "memory"),
        ("torch DDP by bucket size", "caps"),
    ):
        if found := results.get(part, {}).get("rows"):
            lines += [f"\n## {title}\n", *rows(found)]
    return "\n".join(lines) + "\n"


def _case(title: str, case: Mapping) -> Iterator[str]:
    roofline, bound = (
        "{:.0f} ({:.0f} with bf16 on the wire)".format(*case[f"{key}_ms"])
        for key in ("roofline", "bound")
    )
    yield f"\n## {title}\n"
    yield (
        f"{case['gradient_mb']:.1f} MB of gradients at {case['wire_mb_s']:.0f} MB/s, the rate of "
        f"an all-reduce alone. In ms: roofline {roofline}; bound of an all-reduce in the backward "
        f"{bound}, with 4 MiB ready at {case['first_bucket_ms']:.0f}, the last gradient at "
        f"{case['last_gradient_ms']:.0f} and an optimizer of {case['optimizer_ms']:.0f}.\n"
    )
    yield "| ms a step | median | middle half | all | / best DDP | roofline / | phases | loss |"
    yield "|---|---|---|---|---|---|---|---|"
    best = case["sides"].get(BEST)
    for name, side in case["sides"].items():
        cells = [
            name,
            f"{side['median']:.0f}",
            f"{side['q1']:.0f} to {side['q3']:.0f}",
            f"{side['min']:.0f} to {side['max']:.0f}",
            f"{side['median'] / best['median']:.3f}" if best else "",
            f"{side['roofline']:.2f}",
            " + ".join(f"{ms:.0f}" for ms in side["phases_ms"]),
            "" if side["loss"] is None else f"{side['loss']:.0e}",
        ]
        yield f"| {' | '.join(cells)} |"


def rows(table: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    """A table whose columns are those of its first row."""
    columns = list(next(iter(table.values())))
    yield f"| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}"
    for name, row in table.items():
        yield f"| {name} | {' | '.join(str(row[column]) for column in columns)} |"


def write(results: Mapping) -> None:
    before = PAGE.read_text().partition(MARKER)[0] if PAGE.exists() else ""
    PAGE.write_text(before + MARKER + "\n" + page(results))


if __name__ == "__main__":
    write(json.loads(RESULTS.read_text()))

"""docs/pipeline_benchmarks.md, written from the results file: `python -m` this module.

One rule: no number is typed by hand; what stands before the marker is prose.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.data_parallel.table import LINKS, rows
from benchmarks.judged import bars_table
from benchmarks.pipeline.bars import PEER, judge

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "pipeline.json"
PAGE = ROOT / "docs" / "pipeline_benchmarks.md"
MARKER = "<!-- benchmarks/pipeline/table.py writes everything below this line -->\n"


def page(results: Mapping) -> str:
    """Everything below the marker."""
    machine = results["machine"]
    lines = [
        f"Measured {results['date'][:10]} on {machine['system']}, {machine['cores']} cores, "
        f"torch {machine['torch']}, load {machine['load'][0]:.1f} when it ended.",
        *bars_table(judge(results)),
    ]
    for link, cases in results.get("cases", {}).items():
        for name, case in cases.items():
            lines += _case(f"{name}, {LINKS[link]}", case)
    for title, part in (
        ("Bubbles of gpt, unshaped", "bubble"),
        ("Peak resident memory of a rank, gpt with 4 sequences a microbatch, MB", "memory"),
        ("Python bytes allocated for a microbatch, tiny", "allocations"),
    ):
        if found := results.get(part, {}).get("rows"):
            lines += [f"\n## {title}\n", *rows(found)]
    return "\n".join(lines) + "\n"


def _case(title: str, case: Mapping) -> Iterator[str]:
    yield f"\n## {title}\n"
    ideal = case["ideal_ms"]
    if ideal["even"]:
        yield (
            f"Ideal of 1F1B with messages free: {ideal['same cut']:.1f} ms on the given cut, "
            f"{ideal['even']:.1f} on an even one.\n"
        )
    if any("cut by time" in name for name in case["sides"]):
        pieces = ", ".join(map(str, case["by_time"]))
        yield f"By time the second stage begins with piece {pieces}, counted from 0.\n"
    yield "| ms a step | median | middle half | all | / torch 1F1B | gradients |"
    yield "|---|---|---|---|---|---|"
    peer = case["sides"].get(PEER)
    for name, side in case["sides"].items():
        cells = [
            name,
            f"{side['median']:.2f}",
            f"{side['q1']:.2f} to {side['q3']:.2f}",
            f"{side['min']:.2f} to {side['max']:.2f}",
            f"{side['median'] / peer['median']:.3f}" if peer else "",
            f"{side['gradients']:.0e}",
        ]
        yield f"| {' | '.join(cells)} |"


def write(results: Mapping) -> None:
    before = PAGE.read_text().partition(MARKER)[0] if PAGE.exists() else ""
    PAGE.write_text(before + MARKER + "\n" + page(results))


if __name__ == "__main__":
    write(json.loads(RESULTS.read_text()))

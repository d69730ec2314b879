"""The pages of this benchmark, written from the results file: `python -m` this module."""

import json
from collections.abc import Mapping

from benchmarks.judged import bars_table
from benchmarks.pages import Pages, measured
from benchmarks.tensor_parallel.bars import judge


def page(results: Mapping) -> str:
    """Everything below the marker."""
    lines = [measured(results), *bars_table(judge(results))]
    for name, case in results.get("cases", {}).items():
        lines.append(f"\n## {name}\n\n| ms a call | median | middle half | all | distance |")
        lines.append("|---|---|---|---|---|")
        for side, times in case["sides"].items():
            cells = [
                side,
                f"{times['median']:.2f}",
                f"{times['q1']:.2f} to {times['q3']:.2f}",
                f"{times['min']:.2f} to {times['max']:.2f}",
                f"{times['distance']:.0e}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


PAGES = Pages(
    "tensor_parallel",
    page,
    judge,
    (
        "ours / DTensor, d 64",
        "ours / DTensor, d 64, sequence",
        "ours / DTensor, d 384",
        "ours / DTensor, d 384, sequence",
        "ours / by hand, d 64",
        "ours / by hand, d 384",
        "ours, tp_comm_overlap / ours, d 512, sequence, 1g",
        "ours / DTensor, d 512, sequence, 1g",
    ),
)

if __name__ == "__main__":
    PAGES.write(json.loads(PAGES.results.read_text("utf-8")))

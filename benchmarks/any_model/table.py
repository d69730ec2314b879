"""The pages of this benchmark, written from the results file: `python -m` this module."""

import json
from collections.abc import Mapping

from benchmarks.any_model.bars import CASES, MESSAGES, ONE, OURS, PEERS, WORK, judge, text
from benchmarks.judged import bars_table
from benchmarks.pages import Pages, measured


def page(results: Mapping) -> str:
    """Everything below the marker."""
    lines = [measured(results), *bars_table(judge(results))]
    for name, case in results.get("cases", {}).items():
        lines.append(f"\n## {name}\n\n{case['parameters'] / 1e6:.1f} million parameters.\n")
        for work in WORK:
            lines += work_table(case, work)
    return "\n".join(lines) + "\n"


def work_table(case: Mapping, work: str) -> list[str]:
    sides = case["work"][work]
    counts = ", ".join(
        f"{count['calls']} {operation} of {count['bytes'] / 1e3:,.0f} kB in all"
        for operation, count in case["sent"][work].items()
    )
    least = sides[ONE]["median"] / case["ranks"] + sides[MESSAGES]["median"]
    lines = [
        f"Ours sends in a turn: {counts}. One process's time over {case['ranks']} ranks and the "
        f"messages alone: {least:.2f} ms; ours {sides[OURS]['median']:.2f}.\n",
        f"| ms {work} | median | middle half | all | logits | gradients |",
        "|---|---|---|---|---|---|",
    ]
    for side, times in sides.items():
        far = case["distance"].get(side)
        cells = [
            side,
            f"{times['median']:.2f}",
            f"{times['q1']:.2f} to {times['q3']:.2f}",
            f"{times['min']:.2f} to {times['max']:.2f}",
            *([f"{far[what]:.0e}" for what in ("logits", "gradients")] if far else ("", "")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


PAGES = Pages(
    "any_model",
    page,
    judge,
    tuple(
        text(OURS, peer, work, case)
        for case, sides in CASES.items()
        for work in WORK
        for peer in (*PEERS, ONE)
        if peer in sides
    ),
)

if __name__ == "__main__":
    PAGES.write(json.loads(PAGES.results.read_text("utf-8")))

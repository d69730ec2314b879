"""The pages of this benchmark, written from the results file: `python -m` this module."""

import json
from collections.abc import Iterator, Mapping

from benchmarks.data_parallel.table import LINKS, rows
from benchmarks.judged import bars_table
from benchmarks.pages import Pages, measured
from benchmarks.pipeline.bars import PEER, judge


def page(results: Mapping) -> str:
    """Everything below the marker."""
    lines = [measured(results), *bars_table(judge(results))]
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


PAGES = Pages(
    "pipeline",
    page,
    judge,
    (
        "1f1b / torch Schedule1F1B, free gpt, m 8",
        "1f1b / torch Schedule1F1B, 1g gpt, m 8",
        "1f1b, cut by time / torch Schedule1F1B, free gpt, m 8",
        "1f1b, cut by time / torch Schedule1F1B, 1g gpt, m 8",
        "auto, cut by time / torch Schedule1F1B, free gpt, m 8",
        "auto, cut by time / torch Schedule1F1B, 1g gpt, m 8",
        "zb-h1 / 1f1b, free gpt, m 16",
        "zb-h1 / 1f1b, 1g gpt, m 16",
        "1f1b / torch Schedule1F1B, free tiny, m 16",
        "interleaved / torch Interleaved1F1B, free tiny, m 16",
        "interleaved-zb / torch InterleavedZeroBubble, free tiny, m 16",
        "zb-v / torch ZBVZeroBubble, free tiny, m 16",
        "1f1b / torch Schedule1F1B, our threads, free tiny, m 16",
        "zb-v / torch ZBVZeroBubble, our threads, free tiny, m 16",
        "peak memory, 1f1b / torch Schedule1F1B, m 32",
    ),
)

if __name__ == "__main__":
    PAGES.write(json.loads(PAGES.results.read_text("utf-8")))

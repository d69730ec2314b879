"""The pages of this benchmark, written from the results file: `python -m` this module."""

import json
from collections.abc import Iterator, Mapping

from benchmarks.data_parallel.bars import BEST, judge
from benchmarks.judged import bars_table
from benchmarks.pages import Pages, measured

LINKS = {"1g": "1 Gbit/s", "4g": "4 Gbit/s", "free": "unshaped (veth)"}


def page(results: Mapping) -> str:
    """Everything below the marker."""
    lines = [measured(results), *bars_table(judge(results))]
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


PAGES = Pages(
    "data_parallel",
    page,
    judge,
    (
        "NaiveDDP / torch DDP, best cap, 1g mlp",
        "NaiveDDP / torch DDP, best cap, 4g mlp",
        "NaiveDDP / torch DDP, best cap, free mlp",
        "NaiveDDP / torch DDP, best cap, 1g gpts",
        "NaiveDDP / torch DDP, best cap, free gpts",
        "NaiveDDP / torch DDP, best cap, free tiny",
        "NaiveDDP / torch DDP, 1g mlp",
        "NaiveDDP / torch DDP, 1g gpts",
        "ZeRO-1 / torch DDP, best cap, 1g mlp",
        "ZeRO-1 / torch DDP + ZeroRedundancy, 1g mlp",
        "ZeRO-1 / roofline, 1g mlp",
        "ZeRO-1, bf16 wire / torch DDP, bf16 hook, 1g mlp",
        "ZeRO-3 / FSDP2, 1g mlp",
        "ZeRO-3 / FSDP2, 1g gpts",
        "all-reduce by node / flat ring, 16 MiB, 2 x 2 ranks",
    ),
)

if __name__ == "__main__":
    PAGES.write(json.loads(PAGES.results.read_text("utf-8")))

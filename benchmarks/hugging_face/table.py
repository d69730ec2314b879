"""The pages of this benchmark, written from the results file: `python -m` this module."""

import json
from collections.abc import Iterator, Mapping

from benchmarks.hugging_face.bars import (
    COMPUTATION,
    GENERATING,
    LOADING,
    MEMORY,
    OURS,
    OURS_HF,
    TRAINER,
    TRAINING,
    TRANSFORMERS,
    judge,
)
from benchmarks.judged import bars_table
from benchmarks.pages import Pages, measured


def page(results: Mapping) -> str:
    """Everything below the marker."""
    parts = results.get("parts", {})
    lines = [measured(results), *bars_table(judge(results))]
    if LOADING in parts:
        lines += loading(parts[LOADING])
    if TRAINING in parts:
        lines += training(parts[TRAINING])
    if GENERATING in parts:
        lines += generating(parts[GENERATING])
    return "\n".join(lines) + "\n"


def loading(found: Mapping) -> Iterator[str]:
    yield (
        f"\n## Loading\n\n{found['bytes'] / 1e9:.2f} GB in {found['files']} files into "
        f"{found['ranks']} ranks, {found['rounds']} rounds. Logits differ by "
        f"{found['distance']:.0e}.\n"
    )
    yield "| | ms | middle half | all | the call alone | CPU ms | peak MB | private | held |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for side in found["time"]:
        memory = [f"{found[key][side] / 1e6:,.0f}" for key in (*MEMORY, "held_bytes")]
        call = f"{found['call'][side]['median']:.1f} | {found['cpu_s'][side] * 1e3:.0f}"
        yield f"| {' | '.join([side, *_times(found['time'][side]), call, *memory])} |"


def training(found: Mapping) -> Iterator[str]:
    yield (
        f"\n## Training\n\n{found['parameters'] / 1e6:.1f} million parameters, {found['tokens']} "
        f"tokens a step on {found['ranks']} ranks, {found['rounds']} rounds of {found['steps']} "
        f"steps. Weights of both Trainers at the end are {found['distance']:.1e} of their way "
        f"apart.\n"
    )
    yield from _timed(found, "ms a step")


def generating(found: Mapping) -> Iterator[str]:
    yield (
        f"\n## Generating\n\n{found['new']} greedy tokens after a prompt of {found['prompt']}, "
        f"each side with a cache, in one process; {found['layers']} layers of width "
        f"{found['dim']}, {found['rounds']} rounds. {found['same']} of {found['new']} tokens are "
        f"the same.\n"
    )
    yield from _timed(found, "ms")


def _timed(found: Mapping, unit: str) -> Iterator[str]:
    yield f"| | {unit} | middle half | all | CPU ms |\n|---|---|---|---|---|"
    for side, times in found["time"].items():
        yield f"| {' | '.join([side, *_times(times)])} | {found['cpu_s'][side] * 1e3:.0f} |"


def _times(times: Mapping) -> list[str]:
    return [
        f"{times['median']:.1f}",
        f"{times['q1']:.1f} to {times['q3']:.1f}",
        f"{times['min']:.1f} to {times['max']:.1f}",
    ]


PAGES = Pages(
    "hugging_face",
    page,
    judge,
    (
        f"{OURS} / {TRANSFORMERS}, loading, time",
        *(f"{OURS} / {TRANSFORMERS}, loading, {what}" for what in MEMORY.values()),
        f"{OURS} / {TRAINER}, a step",
        f"{OURS} / {COMPUTATION}, a step",
        *(f"{side} / {TRANSFORMERS}, generating" for side in (OURS, OURS_HF)),
    ),
)

if __name__ == "__main__":
    PAGES.write(json.loads(PAGES.results.read_text("utf-8")))

"""What the numbers must show, computed from the results file alone.

A bar is a ratio of one interleaved run (turns.py), below which we must stay; `aim` is where we want
to be. A bar whose sides were not run yields nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.data_parallel.link import RATES
from benchmarks.judged import Judged
from benchmarks.turns import ratio

BEST, OURS = "torch DDP, best cap", "NaiveDDP"
BEST_YIELDS = f"{BEST}, our threads"
"""The same with gloo's reading threads as ours have them (comm/backends.py)."""
ROOFLINE = "roofline"
HOOK, WIRE = "torch DDP, bf16 hook", "ZeRO-1, bf16 wire"
EARLIER = "Bf16ZeroOptimizer"
CLOSE = (
    *(BEST, OURS, "torch DDP", "ZeRO-1", "ZeRO-2", "ZeRO, chosen"),
    *(HOOK, WIRE, EARLIER),
)
"""Sides a few percent from a bar, which take more turns."""


@dataclass(frozen=True)
class Bar:
    """`side` may take at most `bar` times as long as `peer`; None: shown, not judged."""

    side: str
    peer: str
    link: str
    model: str
    bar: float | None
    aim: float | None


MODELS = ("mlp", "gpts", "gpt")
FAST = ("4g", "free")
BARS = [
    *(Bar(OURS, BEST, link, model, 1.03, 1.00) for link in RATES for model in MODELS),
    Bar(OURS, "torch DDP", "1g", "mlp", 0.84, 0.80),
    Bar(OURS, "torch DDP", "1g", "gpts", 0.95, 0.90),
    Bar("ZeRO-1", BEST, "1g", "mlp", 0.92, 0.84),
    Bar("ZeRO-1", ROOFLINE, "1g", "mlp", 1 / 0.85, 1 / 0.90),
    Bar("ZeRO-1", "torch DDP + ZeroRedundancy", "1g", "mlp", 0.60, 0.50),
    *(Bar("ZeRO, chosen", OURS, link, model, 1.05, 1.00) for link in FAST for model in MODELS),
    Bar(WIRE, HOOK, "1g", "mlp", 0.90, 0.80),
    *(Bar("ZeRO-3", "FSDP2", "1g", model, 0.55, 0.45) for model in ("mlp", "gpts")),
    Bar(OURS, BEST, "free", "tiny", 1.00, 0.85),
    *(Bar(EARLIER, "ZeRO-2", "free", model, 1.03, 1.00) for model in ("mlp", "tiny")),
    *(Bar(OURS, BEST_YIELDS, link, model, None, None) for link in RATES for model in MODELS),
    *(Bar("ZeRO-1", BEST_YIELDS, "1g", model, None, None) for model in ("mlp", "gpts")),
    Bar(WIRE, f"{HOOK}, our threads", "1g", "mlp", None, None),
    Bar(WIRE, HOOK, "1g", "gpts", None, None),
    Bar(OURS, BEST_YIELDS, "free", "tiny", None, None),
]


def judge(results: Mapping) -> Iterator[Judged]:
    """Every bar for which `results`, the contents of the results file, has both numbers."""
    for bar in BARS:
        case = results.get("cases", {}).get(bar.link, {}).get(bar.model)
        if case is None:
            continue
        sides = {**case["sides"], ROOFLINE: case["roofline_ms"][0]}
        if bar.side in sides and bar.peer in sides:
            what = f"{bar.side} / {bar.peer}, {bar.link} {bar.model}"
            found, half = ratio(sides[bar.side], sides[bar.peer])
            yield Judged(what, found, bar.bar, bar.aim, half)
    for part in ("collectives", "hierarchy", "memory"):
        for what, found in results.get(part, {}).get("bars", {}).items():
            yield Judged(what, found["ratio"], found["bar"], found.get("aim"))

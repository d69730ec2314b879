"""What the numbers must show, computed from the results file alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.judged import Judged
from benchmarks.turns import ratio

PEER = "torch Schedule1F1B"
OURS = ", our threads"
"""Behind a side of torch's: with gloo's reading threads as ours have them
(comm/backends.py)."""
BY_TIME = "auto, cut by time"
"""The order follows the measured times too."""
CHECKED, FUNCTIONS = "1f1b, checked", "1f1b, functions"
"""`Pipeline.step` and `forward_backward` as they come: ranks compare what they bring."""
CLOSE = (PEER, "1f1b", "1f1b, cut by time", BY_TIME, "zb-h1", CHECKED, FUNCTIONS)
"""Sides a few percent from a bar, which take more turns."""
LINKS, NUMBERS = ("free", "1g"), (4, 8, 16)
TINY = {
    "1f1b": (PEER, 0.75, 0.60),
    "interleaved": ("torch Interleaved1F1B", 0.55, 0.45),
    "interleaved-zb": ("torch InterleavedZeroBubble", 0.55, 0.45),
    "zb-v": ("torch ZBVZeroBubble", 0.55, 0.45),
}


@dataclass(frozen=True)
class Bar:
    """`side` may take at most `bar` times as long as `peer`; None: shown, not judged."""

    side: str
    peer: str
    link: str
    case: str
    bar: float | None
    aim: float | None


BARS = [
    *(Bar("1f1b", PEER, link, f"gpt, m {m}", 1.02, 1.00) for link in LINKS for m in NUMBERS),
    *(
        Bar(side, PEER, link, f"gpt, m {m}", *limits)
        for side, limits in (("1f1b, cut by time", (0.97, 0.95)), (BY_TIME, (None, None)))
        for link in LINKS
        for m in NUMBERS
    ),
    *(
        Bar(side, peer, "free", f"tiny, m {m}", bar, aim)
        for side, (peer, bar, aim) in TINY.items()
        for m in (4, 16)
    ),
    *(Bar(FUNCTIONS, CHECKED, "free", f"tiny, m {m}", 1.10, 1.00) for m in (4, 16)),
    *(
        Bar(side, f"{peer}{OURS}", "free", f"tiny, m {m}", None, None)
        for side, (peer, *_) in (*TINY.items(), ("1f1b, executor", (PEER,)))
        for m in (4, 16)
    ),
    *(
        Bar("1f1b", f"{PEER}{OURS}", link, f"gpt, m {m}", None, None)
        for link in LINKS
        for m in NUMBERS
    ),
    *(Bar("zb-h1", "1f1b", link, "gpt, m 16", 1.00, 0.97) for link in LINKS),
    *(
        Bar(side, peer, link, "gpt, m 16", None, None)
        for link in LINKS
        for side, peer in (
            ("zb-h1, cut by time", "1f1b, cut by time"),
            (BY_TIME, "1f1b, cut by time"),
            ("interleaved-zb", "interleaved"),
            ("torch InterleavedZeroBubble", "torch Interleaved1F1B"),
            ("torch ZBVZeroBubble", PEER),
        )
    ),
]


def judge(results: Mapping) -> Iterator[Judged]:
    """Every bar for which `results`, the contents of the results file, has both numbers."""
    for bar in BARS:
        case = results.get("cases", {}).get(bar.link, {}).get(bar.case)
        if case is None:
            continue
        sides = case["sides"]
        if bar.side in sides and bar.peer in sides:
            what = f"{bar.side} / {bar.peer}, {bar.link} {bar.case}"
            found, half = ratio(sides[bar.side], sides[bar.peer])
            yield Judged(what, found, bar.bar, bar.aim, half)
    for part in ("bubble", "memory", "allocations"):
        for what, found in results.get(part, {}).get("bars", {}).items():
            yield Judged(what, found["ratio"], found["bar"], found.get("aim"))

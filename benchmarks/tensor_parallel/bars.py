"""What the numbers must show, computed from the results file alone."""

from collections.abc import Mapping

from benchmarks.judged import Judged
from benchmarks.turns import ratio

OVERLAP = "ours, tp_comm_overlap"
CASES: dict[str, tuple[str, str, bool, tuple[str, ...]]] = {
    "d 64": ("free", "d 64", False, ("DTensor", "by hand", "ours")),
    "d 64, sequence": ("free", "d 64", True, ("DTensor", "by hand", "ours")),
    "d 384": ("free", "d 384", False, ("DTensor", "by hand", "ours")),
    "d 384, sequence": ("free", "d 384", True, ("DTensor", "by hand", "ours", OVERLAP)),
    "d 512, sequence, 1g": ("1g", "d 512", True, ("DTensor", "by hand", "ours", OVERLAP)),
}
"""Link, sizes, whether sequence-parallel, and sides of each case."""

BARS = [
    ("d 64", "ours", "DTensor", 0.45, 0.36),
    ("d 64, sequence", "ours", "DTensor", 0.50, 0.42),
    ("d 384", "ours", "DTensor", 0.85, 0.82),
    ("d 512, sequence, 1g", OVERLAP, "ours", 0.92, None),
    *((case, "ours", "by hand", None, None) for case in CASES),
    ("d 384, sequence", "ours", "DTensor", None, None),
    ("d 512, sequence, 1g", "ours", "DTensor", None, None),
    ("d 384, sequence", OVERLAP, "ours", None, None),
]
"""Case, side, peer, bar, aim; None: shown, not judged."""


def judge(results: Mapping) -> list[Judged]:
    cases, found = results.get("cases", {}), []
    for case, side, peer, bar, aim in BARS:
        sides = cases.get(case, {}).get("sides", {})
        if side in sides and peer in sides:
            value, half = ratio(sides[side], sides[peer])
            found.append(Judged(f"{side} / {peer}, {case}", value, bar, aim, half))
    return found

"""What the numbers must show, computed from the results file alone."""

from collections.abc import Mapping

from benchmarks.judged import Judged
from benchmarks.turns import ratio

ONE, THREADS, OURS, MESSAGES = "one process", "ours, threads", "ours", "its messages alone"
PEERS = ("transformers", "DTensor")
ALL = (ONE, THREADS, *PEERS, OURS, MESSAGES)
CASES = {
    "Llama 256": ALL,
    "Llama 512": ALL,
    "GPT-2 512": tuple(side for side in ALL if side != "transformers"),  # it has no plan for GPT-2
    "Llama 512, 4 ranks": ALL,
}
"""Sides of each case."""
WORK = ("a token", "a step")
BAR, AIM = 1.00, 0.80


def judge(results: Mapping) -> list[Judged]:
    """Ours beside each peer is judged, everything else shown."""
    cases, found = results.get("cases", {}), []
    for case, works in cases.items():
        for work in WORK:
            sides = works["work"][work]
            for side, peer in pairs(sides):
                value, half = ratio(sides[side], sides[peer])
                bar, aim = (BAR, AIM) if side == OURS and peer in PEERS else (None, None)
                found.append(Judged(text(side, peer, work, case), value, bar, aim, half))
    return found


def pairs(sides: Mapping) -> list[tuple[str, str]]:
    beside = [(OURS, peer) for peer in (*PEERS, ONE)]
    return [pair for pair in (*beside, (THREADS, ONE)) if all(side in sides for side in pair)]


def text(side: str, peer: str, work: str, case: str) -> str:
    return f"{side} / {peer}, {work}, {case}"

"""What a round of turns (common.py) says, and how two sides compare over all rounds.

One rule: a machine drifts between fast and slow phases that last for seconds, so two sides are
compared round by round, where they ran one after the other, and the median of these ratios counts.
"""

from collections.abc import Mapping, Sequence
from statistics import median

Turn = tuple[float, float]
"""When a rank began it and when it ended it, on the clock of the machine."""


def rounds_s(ranks: Sequence[Sequence[Sequence[Turn]]], num_steps: int = 1) -> list[float]:
    """A side's seconds a step, round by round, from the turns of its ranks.

    A turn is from when the last rank began to when the last one ended. The slower rank's own time
    would be too long for a side that begins in the middle of its work, where a rank that is ahead
    makes up for it later.
    """
    return [
        median(_took_s(turn) for turn in zip(*turns, strict=True)) / num_steps
        for turns in zip(*ranks, strict=True)
    ]


def _took_s(turn: Sequence[Turn]) -> float:
    return max(end for _, end in turn) - max(begin for begin, _ in turn)


def spread_ms(times_s: Sequence[float]) -> dict[str, object]:
    """Median, the quarter points, the ends, and every round."""
    points = {"median": 0.5, "q1": 0.25, "q3": 0.75, "min": 0.0, "max": 1.0}
    spread = {name: round(_at(share, times_s) * 1e3, 2) for name, share in points.items()}
    return {**spread, "rounds_ms": [round(s * 1e3, 2) for s in times_s]}


def ratio(side: Mapping, peer: Mapping | float) -> tuple[float, tuple[float, float] | None]:
    """Median and middle half of side / peer, round by round; a number is a peer without noise.

    Of results from before rounds were kept the medians are compared, and there is no half.
    """
    if "rounds_ms" not in side:
        return side["median"] / (peer if isinstance(peer, float) else peer["median"]), None
    mine = side["rounds_ms"]
    theirs = [peer] * len(mine) if isinstance(peer, float) else peer["rounds_ms"]
    found = [a / b for a, b in zip(mine, theirs, strict=True)]
    return _at(0.5, found), (_at(0.25, found), _at(0.75, found))


def _at(share: float, values: Sequence[float]) -> float:
    ordered = sorted(values)
    low, rest = divmod(share * (len(ordered) - 1), 1)
    high = min(int(low) + 1, len(ordered) - 1)
    return ordered[int(low)] * (1 - rest) + ordered[high] * rest

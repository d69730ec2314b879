"""How sides take turns, what a round of it says, and how two sides compare over all rounds.

One rule: a machine drifts between fast and slow phases that last for seconds, so two sides are
compared round by round, where they ran one after the other, and the median of these ratios counts.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median

AGAIN = 2
"""More turns that a side whose bar is close takes in a round; its median turn is its round."""


def take_turns(
    sides: Sequence[str], close: Collection[str], rounds: int, turn: Callable[[str], float]
) -> dict[str, list[list[float]]]:
    """What each call of `turn` returned, by side and round.

    Each round begins with another side.
    """
    taken: dict[str, list[list[float]]] = {name: [] for name in sides}
    for number in range(rounds):
        start = number % len(sides)
        order = [*sides[start:], *sides[:start]]
        for name in order:
            taken[name].append([turn(name)])
        for name in [name for name in order if name in close] * AGAIN:
            taken[name][-1].append(turn(name))
    return taken


def rounds_s(ranks: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """A side's seconds, round by round, from what its ranks took: of each turn the slower one."""
    return [
        median(max(turn) for turn in zip(*turns, strict=True)) for turns in zip(*ranks, strict=True)
    ]


def spread_ms(times_s: Sequence[float]) -> dict[str, object]:
    """Median, the quarter points, the ends, and every round."""
    points = {"median": 0.5, "q1": 0.25, "q3": 0.75, "min": 0.0, "max": 1.0}
    spread = {name: round(_at(share, times_s) * 1e3, 2) for name, share in points.items()}
    return {**spread, "rounds_ms": [round(s * 1e3, 2) for s in times_s]}


def ratio(side: Mapping, peer: Mapping | float) -> tuple[float, float, float]:
    """Median and middle half of side / peer, round by round; a number is a peer without noise.

    Of results from before rounds were kept the medians are compared.
    """
    mine = side.get("rounds_ms") or [side["median"]]
    theirs = [peer] * len(mine)
    if not isinstance(peer, float):
        theirs = peer.get("rounds_ms") or [peer["median"]]
    found = [a / b for a, b in zip(mine, theirs, strict=True)]
    return _at(0.5, found), _at(0.25, found), _at(0.75, found)


def _at(share: float, values: Sequence[float]) -> float:
    ordered = sorted(values)
    low, rest = divmod(share * (len(ordered) - 1), 1)
    high = min(int(low) + 1, len(ordered) - 1)
    return ordered[int(low)] * (1 - rest) + ordered[high] * rest

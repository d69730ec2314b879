"""Which host, or which link, is slow: read from the times of all pairs of ranks. No torch.

One rule: a host is named when its links are slow as a whole, a link when it alone is. A link is
slow against the fast ones of its kind, because half a cluster may be ill: the median would be too.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Pair = tuple[int, int]
Link = tuple[str, str]

SLOW = 2.0
"""A link that takes this many times as long as the fast ones is slow."""
_FAST = 0.1
_AS_A_WHOLE = 0.75


@dataclass(frozen=True, slots=True)
class Suspects:
    """slowest: ranks of the slowest pair. times_slower: than the median pair.

    hosts: to be left out. links: slow ones between hosts that are not, and within (both names
    equal) one, each with how many times as long as the fast links it takes.
    """

    slowest: Pair
    times_slower: float
    hosts: tuple[str, ...]
    links: tuple[tuple[Link, float], ...]

    @property
    def exclude(self) -> str:
        """For sbatch; "" where no host is to be left out."""
        return f"--exclude={','.join(self.hosts)}" if self.hosts else ""


def find_suspects(times_s: Mapping[Pair, float], hosts: Sequence[str]) -> Suspects:
    """Judge the median time of each pair of ranks; `hosts` by rank.

    times_s: at least one pair.
    """
    slowest = max(times_s, key=lambda pair: times_s[pair])
    links: dict[Link, list[float]] = {}
    for (a, b), time_s in times_s.items():
        first, second = sorted((hosts[a], hosts[b]))
        links.setdefault((first, second), []).append(time_s)
    medians = {link: statistics.median(times) for link, times in links.items()}
    between = _times_slower({link: t for link, t in medians.items() if link[0] != link[1]})
    within = _times_slower({link: t for link, t in medians.items() if link[0] == link[1]})
    out = _slow_hosts(between, within)
    slow = [
        (link, times)
        for link, times in {**between, **within}.items()
        if times >= SLOW and not out & {*link}
    ]
    return Suspects(
        slowest,
        times_s[slowest] / statistics.median(times_s.values()),
        tuple(sorted(out)),
        tuple(sorted(slow, key=lambda found: -found[1])),
    )


def _times_slower(medians_s: Mapping[Link, float]) -> dict[Link, float]:
    """How many times as long as the fast links each one takes."""
    if not medians_s:
        return {}
    ordered = sorted(medians_s.values())
    fast_s = ordered[math.floor(_FAST * (len(ordered) - 1))]
    return {link: time_s / fast_s for link, time_s in medians_s.items()}


def _slow_hosts(between: Mapping[Link, float], within: Mapping[Link, float]) -> set[str]:
    """Hosts to leave out: the one with the largest slow share first, then without it again."""
    names = {host for link in (*between, *within) for host in link}
    out = {link[0] for link, times in within.items() if times >= SLOW}
    while True:
        left = {link: t for link, t in between.items() if not out & {*link}}
        share: dict[str, tuple[float, float]] = {}
        for host in names - out:
            own = [t for link, t in left.items() if host in link]
            if len(own) > 1:  # of a single link nobody knows which end is to blame
                share[host] = (sum(t >= SLOW for t in own) / len(own), statistics.median(own))
        worst = max(share, key=lambda host: (share[host], host), default=None)
        if worst is None or share[worst][0] < _AS_A_WHOLE:
            # where most hosts are slow, slow is how this cluster is
            return out if 2 * len(out) <= len(names) else set()
        out.add(worst)

"""Which host, rank or link is slow: read from the times of all pairs of ranks. No torch.

A host is named only when nothing but the host explains its times. So slow is measured against the
fast quarter of the links, which is unharmed while fewer than half of the hosts are slow; a rank is
compared with the others of its host; and hosts that are slow to the rest but not to each other are
behind a slow link.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Pair = tuple[int, int]
Link = tuple[str, str]

SLOW = 2.0
"""A link that takes this many times as long as the fast ones is slow."""
_FAST = 0.25
_AS_A_WHOLE = 0.75


@dataclass(frozen=True, slots=True)
class SlowLinks:
    """slowest: ranks of the slowest pair. times_slower: than the median pair.

    hosts: to be left out. ranks: slow to other hosts, each with how many times as long as the
    others of its host it takes. partitions: sets of hosts, links between which are slow and within
    which they are not; () where there is but one. links: slow ones between hosts of one side, and
    within (both names equal) one, none of them to be left out, each with how many times as long
    as the fast links it takes.
    """

    slowest: Pair
    times_slower: float
    hosts: tuple[str, ...]
    ranks: tuple[tuple[int, float], ...]
    partitions: tuple[tuple[str, ...], ...]
    links: tuple[tuple[Link, float], ...]

    @property
    def exclude(self) -> str:
        """For sbatch; "" where no host is to be left out."""
        return f"--exclude={','.join(self.hosts)}" if self.hosts else ""


def find_suspects(times_s: Mapping[Pair, float], hosts: Sequence[str]) -> SlowLinks:
    """Judge the median time of each pair of ranks; `hosts` by rank.

    times_s: at least one pair.
    """
    slowest = max(times_s, key=lambda pair: times_s[pair])
    ranks = _slow_ranks(times_s, hosts)
    links: dict[Link, list[float]] = {}
    for pair, time_s in times_s.items():
        first, second = sorted(hosts[rank] for rank in pair)
        if first == second or ranks.keys().isdisjoint(pair):
            links.setdefault((first, second), []).append(time_s)
    medians = {link: statistics.median(times) for link, times in links.items()}
    between = _times_slower({link: t for link, t in medians.items() if link[0] != link[1]})
    within = _times_slower({link: t for link, t in medians.items() if link[0] == link[1]})
    out = {hosts[rank] for rank in ranks} | {a for (a, _), t in within.items() if t >= SLOW}
    out |= _slow_hosts(between, out)
    if 2 * len(out) >= len(set(hosts)):
        out = set()  # where half of all hosts are slow, slow is how this cluster is
    sides = _sides(set(hosts) - out, between)
    side = {host: i for i, members in enumerate(sides) for host in members}
    slow = [
        (link, times)
        for link, times in {**between, **within}.items()
        if times >= SLOW and not out & {*link} and side.get(link[0]) == side.get(link[1])
    ]
    return SlowLinks(
        slowest,
        times_s[slowest] / statistics.median(times_s.values()),
        tuple(sorted(out)),
        tuple(sorted(ranks.items())),
        sides,
        tuple(sorted(slow, key=lambda found: -found[1])),
    )


def _times_slower(medians_s: Mapping[Link, float]) -> dict[Link, float]:
    """How many times as long as the fast links each one takes."""
    if not medians_s:
        return {}
    ordered = sorted(medians_s.values())
    fast_s = ordered[math.floor(_FAST * (len(ordered) - 1))]
    return {link: time_s / fast_s for link, time_s in medians_s.items()}


def _slow_ranks(times_s: Mapping[Pair, float], hosts: Sequence[str]) -> dict[int, float]:
    """Ranks whose way to other hosts is slow while that of the others of their host is not."""
    away: dict[int, list[float]] = {}
    for (a, b), time_s in times_s.items():
        if hosts[a] != hosts[b]:
            away.setdefault(a, []).append(time_s)
            away.setdefault(b, []).append(time_s)
    # low: of two pairs, one slow, the other end may be to blame
    typical_s = {rank: statistics.median_low(times) for rank, times in away.items()}
    by_host: dict[str, list[float]] = {}
    for rank, time_s in typical_s.items():
        by_host.setdefault(hosts[rank], []).append(time_s)
    fair_s = {host: statistics.median_low(times) for host, times in by_host.items()}
    slower = {rank: time_s / fair_s[hosts[rank]] for rank, time_s in typical_s.items()}
    return {rank: times for rank, times in slower.items() if times >= SLOW}


def _slow_hosts(between: Mapping[Link, float], out: Iterable[str]) -> set[str]:
    """The host with the largest slow share first, then without it again; `out` are out already."""
    left = {link: t for link, t in between.items() if not {*link} & {*out}}
    found: set[str] = set()
    while True:
        share: dict[str, tuple[float, float]] = {}
        open_links = {link: t for link, t in left.items() if not found & {*link}}
        for host in {host for link in open_links for host in link}:
            own = [t for link, t in open_links.items() if host in link]
            if len(own) > 1:  # of a single link either end may be to blame
                share[host] = (sum(t >= SLOW for t in own) / len(own), statistics.median(own))
        worst = max(share, key=lambda host: (share[host], host), default=None)
        if worst is None or share[worst][0] < _AS_A_WHOLE:
            break
        found.add(worst)
    # what is ill is slow to the ill ones too
    near = {host for link, t in left.items() if t < SLOW and found >= {*link} for host in link}
    return found - near


def _sides(names: set[str], between: Mapping[Link, float]) -> tuple[tuple[str, ...], ...]:
    """Hosts by whom they reach over fast links; () if all are one, or each is alone."""
    side = {host: {host} for host in names}
    for (a, b), times in between.items():
        if times < SLOW and {a, b} <= names and side[a] is not side[b]:
            side[a] |= side[b]
            side.update(dict.fromkeys(side[b], side[a]))
    sides = sorted({tuple(sorted(members)) for members in side.values()})
    return tuple(sides) if 1 < len(sides) < len(names) else ()

"""Judge what each rank measured before the first step, and name the nodes to leave out. No torch.

A wrong result convicts a node by itself. A time only says something beside the times of other
nodes with the same device: a node is slow if its slowest rank takes SLOW_NODE times as long as
that of the median node. So of two nodes the slower one is named, and of two nodes with unlike
devices none. A pair of ranks has two ends: `find_suspects` names a node only if its links to
several others are slow, for which three nodes are needed.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchdistpackage.harness.bench.report import Pair, find_suspects

SLOW_NODE = 1.5
"""A node that takes this many times as long as the median node is slow."""
LINK = "message to another node"
"""Name of the measurement of pairs."""


@dataclass(frozen=True, slots=True)
class RankSpeed:
    """Measurements of one rank: its best time by name, in seconds.

    host: the name of its node. device: nodes with the same one are compared. wrong: which result
    was wrong, or "". facts: what the devices of its node report.
    """

    rank: int
    host: str
    device: str
    best_s: Mapping[str, float]
    wrong: str = ""
    facts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BadNode:
    """A node to leave out, its rank that shows why, and how many times slower than others it is.

    times_slower: infinite for a wrong result.
    """

    host: str
    rank: int
    reason: str
    times_slower: float


def bad_nodes(
    speeds: Sequence[RankSpeed], pairs_s: Mapping[Pair, float], hosts: Sequence[str]
) -> list[BadNode]:
    """Return the nodes to leave out, the worst first; each once, for its worst reason.

    pairs_s: the best time of each measured pair of ranks. hosts: node of each rank.
    """
    candidates = [
        BadNode(speed.host, speed.rank, f"computes wrong results: {speed.wrong}", float("inf"))
        for speed in speeds
        if speed.wrong
    ]
    candidates += _slow_devices(speeds)
    candidates += _slow_links(pairs_s, hosts)
    worst: dict[str, BadNode] = {}
    for node in sorted(candidates, key=lambda node: (-node.times_slower, node.rank)):
        worst.setdefault(node.host, node)
    return list(worst.values())


def _slow_devices(speeds: Sequence[RankSpeed]) -> list[BadNode]:
    slow: list[BadNode] = []
    for device in dict.fromkeys(speed.device for speed in speeds):
        ranks = [speed for speed in speeds if speed.device == device]
        for name in ranks[0].best_s:
            slowest: dict[str, RankSpeed] = {}
            for speed in ranks:
                other = slowest.setdefault(speed.host, speed)
                if speed.best_s[name] > other.best_s[name]:
                    slowest[speed.host] = speed
            # of two the faster one counts
            typical_s = statistics.median_low(x.best_s[name] for x in slowest.values())
            for host, speed in slowest.items():
                time_s = speed.best_s[name]
                if time_s >= SLOW_NODE * typical_s:
                    reason = _slower(name, time_s, typical_s, len(slowest))
                    slow.append(BadNode(host, speed.rank, reason, time_s / typical_s))
    return slow


def _slow_links(pairs_s: Mapping[Pair, float], hosts: Sequence[str]) -> list[BadNode]:
    slow: list[BadNode] = []
    named = find_suspects(pairs_s, hosts).hosts if pairs_s else ()
    typical_s = statistics.median_low(pairs_s.values()) if named else 0.0
    for host in named:
        times_s = {pair: time_s for pair, time_s in pairs_s.items() if host in _ends(pair, hosts)}
        pair = max(times_s, key=lambda pair: times_s[pair])
        rank = pair[0] if hosts[pair[0]] == host else pair[1]
        reason = _slower(LINK, times_s[pair], typical_s, len(set(hosts)))
        slow.append(BadNode(host, rank, reason, times_s[pair] / typical_s))
    return slow


def _ends(pair: Pair, hosts: Sequence[str]) -> tuple[str, str]:
    return hosts[pair[0]], hosts[pair[1]]


def _slower(name: str, time_s: float, typical_s: float, num_nodes: int) -> str:
    of = "the other node" if num_nodes == 2 else f"the median of {num_nodes} nodes"
    return (
        f"is slow: {name} takes {1e3 * time_s:.3g} ms, {time_s / typical_s:.1f} times the "
        f"{1e3 * typical_s:.3g} ms of {of}"
    )

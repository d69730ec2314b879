"""The results of a bench: values, their JSON, violated limits and slow links. No torch.

A row is the slowest of the units that it stands for, because a collective job waits for that one.
Times are of one call, of which the slowest rank of an iteration counts.

From the times of all pairs of ranks a host is named only when nothing but the host explains them.
So slow is measured against the fast quarter of the links, which is unharmed while fewer than half
of the hosts are slow; a rank is compared with the others of its host; and hosts that are slow to
the rest but not to each other are behind a slow link.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, computed_field, field_serializer

from torchdistpackage.comm.collective_table import COLLECTIVES
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench import profile
from torchdistpackage.harness.bench.profile import CostModel, MeasuredDevice, Profile, fit
from torchdistpackage.harness.bench.request import Participants, parts_of

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
    others of its host it takes. partitions: sets of hosts with fast links within each set and slow
    links between sets; () if there is only one set. links: slow ones between hosts of one side, and
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
        """Return the option for sbatch that excludes these hosts; "" if there are none."""
        return f"--exclude={','.join(self.hosts)}" if self.hosts else ""


def find_suspects(times_s: Mapping[Pair, float], hosts: Sequence[str]) -> SlowLinks:
    """Judge the median time of each pair of ranks. hosts: host of each rank.

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
        tuple(sorted(slow, key=lambda suspect: -suspect[1])),
    )


def _times_slower(medians_s: Mapping[Link, float]) -> dict[Link, float]:
    """Return the time of each link divided by that of fast links."""
    if not medians_s:
        return {}
    ordered = sorted(medians_s.values())
    fast_s = ordered[math.floor(_FAST * (len(ordered) - 1))]
    return {link: time_s / fast_s for link, time_s in medians_s.items()}


def _slow_ranks(times_s: Mapping[Pair, float], hosts: Sequence[str]) -> dict[int, float]:
    """Return ranks that are slow to other hosts although the other ranks of their host are not."""
    times_of_rank: dict[int, list[float]] = {}
    for (a, b), time_s in times_s.items():
        if hosts[a] != hosts[b]:
            times_of_rank.setdefault(a, []).append(time_s)
            times_of_rank.setdefault(b, []).append(time_s)
    # low: of two pairs, one slow, the other end may be to blame
    typical_s = {rank: statistics.median_low(times) for rank, times in times_of_rank.items()}
    by_host: dict[str, list[float]] = {}
    for rank, time_s in typical_s.items():
        by_host.setdefault(hosts[rank], []).append(time_s)
    fair_s = {host: statistics.median_low(times) for host, times in by_host.items()}
    slower = {rank: time_s / fair_s[hosts[rank]] for rank, time_s in typical_s.items()}
    return {rank: times for rank, times in slower.items() if times >= SLOW}


def _slow_hosts(between: Mapping[Link, float], out: Iterable[str]) -> set[str]:
    """Return slow hosts: the one with the largest fraction of slow links first, then the next among
    the remaining links. `out`: hosts that are excluded from the start.
    """
    other_links = {link: t for link, t in between.items() if not {*link} & {*out}}
    slow_hosts: set[str] = set()
    while True:
        share: dict[str, tuple[float, float]] = {}
        open_links = {link: t for link, t in other_links.items() if not slow_hosts & {*link}}
        for host in {host for link in open_links for host in link}:
            host_times = [t for link, t in open_links.items() if host in link]
            if len(host_times) > 1:  # of a single link either end may be to blame
                share[host] = (
                    sum(t >= SLOW for t in host_times) / len(host_times),
                    statistics.median(host_times),
                )
        worst = max(share, key=lambda host: (share[host], host), default=None)
        if worst is None or share[worst][0] < _AS_A_WHOLE:
            break
        slow_hosts.add(worst)
    # what is ill is slow to the ill ones too
    near = {
        host
        for link, t in other_links.items()
        if t < SLOW and slow_hosts >= {*link}
        for host in link
    }
    return slow_hosts - near


def _sides(names: set[str], between: Mapping[Link, float]) -> tuple[tuple[str, ...], ...]:
    """Return sets of hosts that fast links connect; () if there is one set, or all are single."""
    side = {host: {host} for host in names}
    for (a, b), times in between.items():
        if times < SLOW and {a, b} <= names and side[a] is not side[b]:
            side[a] |= side[b]
            side.update(dict.fromkeys(side[b], side[a]))
    sides = sorted({tuple(sorted(members)) for members in side.values()})
    return tuple(sides) if 1 < len(sides) < len(names) else ()


EVERY, PAIRS = "", "pairs"
"""Names that stand for all axes, and for the slowest of all pairs."""


class Measurement(BaseModel, frozen=True):
    """One measurement: an operation over one kind of group, at one size.

    size_bytes: as counted, full elements.
    """

    axis: str
    operation: str
    mode: str
    dtype: str
    size_bytes: int


class Row(Measurement, frozen=True):
    """The slowest of `num_units` units of one measurement that the same link carries.

    ranks: of that unit. bare_p50_s: of the same call in a bare torch.distributed loop, in turns
    with ours. fastest_p50_s: of the fastest unit. verified: every element that arrived was
    compared; a bench that finds a wrong one has no report. host_p50_s: what the host took to issue
    ours, which is in no other figure; None where it blocks.
    """

    link: str
    ranks: Participants
    num_units: int
    p50_s: float
    p95_s: float
    max_s: float
    fastest_p50_s: float
    bare_p50_s: float
    verified: bool = True
    host_p50_s: float | None = None

    @computed_field
    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @computed_field
    @property
    def algbw_bytes_per_s(self) -> float:
        """Return the algorithm bandwidth, as the NCCL tests define it."""
        return self.size_bytes / self.p50_s

    @computed_field
    @property
    def busbw_bytes_per_s(self) -> float:
        """Return the bus bandwidth, as the NCCL tests define it."""
        spec = COLLECTIVES[self.operation]
        return spec.bus_bytes_per_s(self.size_bytes, self.num_ranks, self.p50_s)


class Pairs(BaseModel, frozen=True):
    """Messages both ways at once between every two ranks. times: median seconds of each pair."""

    size_bytes: int
    dtype: str
    times: Mapping[Pair, float]

    @field_serializer("times")
    def _listed(self, times: Mapping[Pair, float]) -> list[dict[str, object]]:
        return [{"ranks": list(pair), "p50_s": time_s} for pair, time_s in times.items()]

    def busbw_bytes_per_s(self, pair: Pair) -> float:
        spec = COLLECTIVES["p2p_both"]
        return spec.bus_bytes_per_s(self.size_bytes, 2, self.times[pair])


class BenchReport(BaseModel, frozen=True):
    """hosts: by rank. topology: axes outermost first. date: ISO 8601, with the zone.

    Its JSON is described in docs/comm_bench.md.
    """

    format: str = "torchdistpackage bench"
    version: int = 1
    date: str
    by: str
    backend: str
    device: str
    torch: str
    topology: tuple[tuple[str, int], ...]
    hosts: tuple[str, ...]
    iterations: int
    warmup: int
    rows: tuple[Row, ...] = ()
    pairs: Pairs | None = None
    speed: MeasuredDevice | None = None

    @computed_field
    @property
    def lines(self) -> tuple[CostModel, ...]:
        """A fit for each kind of rows that has at least two sizes."""
        kinds: dict[tuple[str, str, str, str, str, int], list[tuple[float, float]]] = {}
        for row in self.rows:
            kind = (row.axis, row.link, row.operation, row.mode, row.dtype, row.num_ranks)
            bus_bytes = row.size_bytes * COLLECTIVES[row.operation].bus_factor(row.num_ranks)
            kinds.setdefault(kind, []).append((bus_bytes, row.p50_s))
        names = ("axis", "link", "operation", "mode", "dtype", "num_ranks")
        return tuple(
            CostModel.model_validate(
                dict(zip(names, kind, strict=True))
                | {"largest_bytes": float(max(points)[0]), "fit": line}
            )
            for kind, points in kinds.items()
            if (line := fit(points)) is not None
        )

    def profile(self) -> Profile:
        """Return the cluster profile of this report.

        Raises:
            ConfigError: no operation was measured at two sizes or more.
        """
        if not self.lines:
            raise ConfigError(
                "a profile needs times at two sizes or more for a line through them, and no "
                "operation has them; give a range, e.g. --sizes 1KiB:4MiB:x4, and more than one "
                "rank"
            )
        return Profile(
            format=profile.FORMAT,
            version=profile.VERSION,
            date=self.date,
            by=self.by,
            backend=self.backend,
            hosts=tuple(dict.fromkeys(self.hosts)),
            topology=self.topology,
            lines=self.lines,
            device=self.speed,
        )


Times = tuple[Participants, Sequence[float], Sequence[float], Sequence[float]]
"""A unit, and for each iteration the seconds of our call, of the bare call, and of the host in ours
(none if it blocks)."""


def rows_of(
    cell: Measurement, times_s: Iterable[Times], link: Mapping[Participants, str]
) -> tuple[Row, ...]:
    """Return a row for each link."""
    by_link: dict[str, list[tuple[float, float, Times]]] = {}
    for one in times_s:
        unit, ours, bare, _ = one
        medians = statistics.median(ours), statistics.median(bare)
        by_link.setdefault(link[unit], []).append((*medians, one))
    rows: list[Row] = []
    for name, same in by_link.items():
        # by both, or what was unlucky in ours alone would be held against the bare call
        p50_s, bare_s, (unit, ours, _, host) = max(same, key=lambda one: one[0] + one[1])
        row = Row(
            **cell.model_dump(),
            link=name,
            ranks=unit,
            num_units=len(same),
            p50_s=p50_s,
            p95_s=percentile(sorted(ours), 95),
            max_s=max(ours),
            fastest_p50_s=min(one[0] for one in same),
            bare_p50_s=bare_s,
            host_p50_s=statistics.median(host) if host else None,
        )
        rows.append(row)
    return tuple(rows)


def percentile(ascending: Sequence[float], percent: int) -> float:
    """Return the smallest value that `percent` % of the values do not exceed."""
    return ascending[max(math.ceil(percent / 100 * len(ascending)), 1) - 1]


def rate(bytes_per_s: float) -> str:
    """Return a rate in GB/s (10^9), with three digits."""
    return f"{bytes_per_s / 1e9:.3g}"


# -- limits -------------------------------------------------------------------------------


def parse_limits(texts: Sequence[str]) -> dict[str, float]:
    """Parse `data=10,pipe=2`, or `10` for every axis, in GB/s; return bytes per second by axis.

    Raises:
        ConfigError: no positive number, or one axis twice.
    """
    limits: dict[str, float] = {}
    for text in (part for several in texts for part in parts_of(several, "limit")):
        axis, _, number = (field.strip() for field in text.rpartition("="))
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if not 0 < value < math.inf:
            raise ConfigError(f"--min-busbw {text}: write GB/s, or axis=GB/s, e.g. data=10")
        if axis in limits:
            raise ConfigError(f"--min-busbw names {axis or 'all axes'} twice; name it once")
        limits[axis] = value * 1e9
    return limits


def violations(report: BenchReport, limits: Mapping[str, float]) -> list[str]:
    """Return one line for each operation whose best size stays below its limit.

    The best size counts, because small messages are slow on any network; of the measured units, the
    slowest counts.
    """
    best: dict[tuple[str, str, str, str], tuple[float, tuple[int, ...]]] = {}
    for row in report.rows:
        key = (row.axis, row.link, row.mode, row.operation)
        slowest = (row.busbw_bytes_per_s, row.ranks)
        best[key] = max(best.get(key, slowest), slowest)
    lines = [
        f"{axis}, {link}, {mode}: {operation} over ranks {list(ranks)} reaches {rate(busbw)} GB/s, "
        f"below {rate(limit)}"
        for (axis, link, mode, operation), (busbw, ranks) in best.items()
        if (limit := limits.get(axis, limits.get(EVERY))) is not None and busbw < limit
    ]
    limit = limits.get(PAIRS)
    if limit is not None and report.pairs is not None:
        for a, b in report.pairs.times:
            if (busbw := report.pairs.busbw_bytes_per_s((a, b))) < limit:
                hosts = f"{report.hosts[a]} and {report.hosts[b]}"
                lines.append(
                    f"pair of ranks {a} and {b} on {hosts}: {rate(busbw)} GB/s, below {rate(limit)}"
                )
    return lines

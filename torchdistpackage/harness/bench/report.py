"""What a bench found: the value, its JSON, its text, and what is below a limit. No torch.

A row is the slowest of the units that it stands for, because a collective job waits for
that one; how fast the fastest was stands beside it. Times are of one call, the slowest rank of an
iteration counting for all, and every name carries its unit.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench.fit import LinkFit, fit
from torchdistpackage.harness.bench.pairs import SlowLinks
from torchdistpackage.harness.bench.request import Participants, parts_of
from torchdistpackage.harness.operations import COLLECTIVES
from torchdistpackage.topology.mesh import describe

FORMAT, VERSION = "torchdistpackage bench", 1
ISOLATED, CONCURRENT = "alone", "together"
"""One unit at a time, or all units of an axis at once."""
EVERY, PAIRS = "", "pairs"
"""Stand for all axes, and for the slowest of all pairs."""
_HEAD = ("operation", "dtype", "size", "p50", "p95", "max", "algbw", "busbw", "bare p50", "ours")
_MATRIX = 16
"""Ranks whose matrix is printed; the file has it whole."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is measured at one go: an operation over one kind of group, at one size."""

    axis: str
    operation: str
    mode: str
    dtype: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """The slowest of `num_units` units of one cell that the same link carries.

    size_bytes: as counted, whole elements. ranks: of that unit. bare_p50_s: of the same call in a
    bare torch.distributed loop, in turns with ours. fastest_p50_s: of the fastest unit. verified:
    every element that arrived was compared; a bench that finds a wrong one has no report.
    host_p50_s: what the host took to issue ours, which is in no other figure; None where it blocks.
    """

    axis: str
    link: str
    operation: str
    mode: str
    dtype: str
    size_bytes: int
    ranks: Participants
    num_units: int
    p50_s: float
    p95_s: float
    max_s: float
    fastest_p50_s: float
    bare_p50_s: float
    verified: bool = True
    host_p50_s: float | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def algbw_bytes_per_s(self) -> float:
        """Algorithm bandwidth, as the NCCL tests have it."""
        return self.size_bytes / self.p50_s

    @property
    def busbw_bytes_per_s(self) -> float:
        """Bus bandwidth, as the NCCL tests have it."""
        return COLLECTIVES[self.operation].bus_bytes_per_s(
            self.size_bytes, self.num_ranks, self.p50_s
        )


@dataclass(frozen=True, slots=True)
class Pairs:
    """Both ways at once between each two ranks: (rank, rank, p50_s) each."""

    size_bytes: int
    dtype: str
    times: tuple[tuple[int, int, float], ...]

    def busbw_bytes_per_s(self, time_s: float) -> float:
        return COLLECTIVES["p2p_both"].bus_bytes_per_s(self.size_bytes, 2, time_s)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Time by *bus* bytes, size_bytes x bus factor, so that it holds for other group sizes too.

    largest_bytes: bus bytes of the largest size that was measured.
    """

    axis: str
    link: str
    operation: str
    mode: str
    dtype: str
    num_ranks: int
    largest_bytes: float
    fit: LinkFit

    def time_s(self, bus_bytes: float) -> float | None:
        """Seconds of one call; None where size made no difference as far as it was measured, and
        these are more bytes."""
        flat = self.fit.bytes_per_s is None
        return None if flat and bus_bytes > self.largest_bytes else self.fit.time_s(bus_bytes)


@dataclass(frozen=True, slots=True)
class BenchReport:
    """hosts: by rank. topology: axes outermost first. date: ISO 8601, with the zone."""

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

    @property
    def lines(self) -> tuple[CostModel, ...]:
        """A fit for each kind of rows that has two sizes or more."""
        found: dict[tuple[str, str, str, str, str, int], list[tuple[float, float]]] = {}
        for row in self.rows:
            key = (row.axis, row.link, row.operation, row.mode, row.dtype, row.num_ranks)
            bus_bytes = row.size_bytes * COLLECTIVES[row.operation].bus_factor(row.num_ranks)
            found.setdefault(key, []).append((bus_bytes, row.p50_s))
        fits = ((key, max(points)[0], fit(points)) for key, points in found.items())
        return tuple(CostModel(*key, most, line) for key, most, line in fits if line is not None)

    def as_json(self) -> dict[str, object]:
        """Nothing in it but what JSON has; see docs/comm_bench.md for the fields."""
        rows = [
            asdict(row)
            | {
                "num_ranks": row.num_ranks,
                "algbw_bytes_per_s": row.algbw_bytes_per_s,
                "busbw_bytes_per_s": row.busbw_bytes_per_s,
            }
            for row in self.rows
        ]
        pairs = self.pairs and asdict(self.pairs) | {
            "times": [{"ranks": [a, b], "p50_s": t} for a, b, t in self.pairs.times]
        }
        head = {"format": FORMAT, "version": VERSION}
        lines = [asdict(line) for line in self.lines]
        return head | asdict(self) | {"rows": rows, "pairs": pairs, "lines": lines}


def rows_of(
    cell: Measurement,
    times_s: Iterable[tuple[Participants, Sequence[float], Sequence[float], Sequence[float]]],
    link: dict[Participants, str],
) -> tuple[Row, ...]:
    """A row for each link: times_s holds (unit, ours, bare, host), each by iteration."""
    found: list[Row] = []
    units = list(times_s)
    for name in dict.fromkeys(link[unit] for unit, *_ in units):
        same = [
            (statistics.median(ours), statistics.median(bare), unit, sorted(ours), host)
            for unit, ours, bare, host in units
            if link[unit] == name
        ]
        # by both, or what was unlucky in ours alone would be held against the bare call
        p50_s, bare_s, unit, ours, host = max(same, key=lambda one: one[0] + one[1])
        found.append(
            Row(
                cell.axis,
                name,
                cell.operation,
                cell.mode,
                cell.dtype,
                cell.size_bytes,
                unit,
                len(same),
                p50_s,
                percentile(ours, 95),
                ours[-1],
                min(one[0] for one in same),
                bare_s,
                host_p50_s=statistics.median(host) if host else None,
            )
        )
    return tuple(found)


def percentile(ascending: Sequence[float], percent: int) -> float:
    """The smallest of the values that `percent` of them do not exceed."""
    return ascending[max(math.ceil(percent / 100 * len(ascending)), 1) - 1]


# -- text ---------------------------------------------------------------------------------


def report_text(report: BenchReport) -> str:
    """All tables, one for each axis, link and mode."""
    num_hosts = len(set(report.hosts))
    parts = [
        f"{report.backend} on {len(report.hosts)} ranks of {num_hosts} "
        f"host{'s' if num_hosts > 1 else ''} ({describe(report.topology)}), {report.date}; "
        f"{report.iterations} iterations after {report.warmup}, every element verified"
    ]
    kinds = dict.fromkeys((row.axis, row.link, row.mode) for row in report.rows)
    for kind in kinds:
        rows = [row for row in report.rows if (row.axis, row.link, row.mode) == kind]
        lines = [x for x in report.lines if (x.axis, x.link, x.mode) == kind]
        parts.append(f"{_title(rows)}\n{_table(_cells(rows))}" + _fits(lines))
    return "\n\n".join(parts)


def pairs_text(pairs: Pairs, suspects: SlowLinks, hosts: Sequence[str]) -> str:
    """The matrix where it is small, the slowest pair, and what to leave out."""
    num_ranks, times = len(hosts), {(a, b): t for a, b, t in pairs.times}
    lines = [f"pairs, both ways at once, {size_text(pairs.size_bytes)} of {pairs.dtype}"]
    if num_ranks <= _MATRIX:
        rows: list[Sequence[str]] = [("GB/s", *map(str, range(num_ranks)), "")]
        for a in range(num_ranks):
            found = [times.get((min(a, b), max(a, b))) for b in range(num_ranks)]
            shown = ("" if t is None else rate(pairs.busbw_bytes_per_s(t)) for t in found)
            rows.append((str(a), *shown, hosts[a]))
        lines.append(_table(rows))
    a, b = suspects.slowest
    lines.append(
        f"slowest pair: rank {a} ({hosts[a]}) and rank {b} ({hosts[b]}), "
        f"{rate(pairs.busbw_bytes_per_s(times[a, b]))} GB/s, {suspects.times_slower:.1f} x the "
        f"median time"
    )
    for rank, slower in suspects.ranks:
        lines.append(
            f"slow rank: {rank} on {hosts[rank]}, to other hosts {slower:.1f} x the time of the "
            f"others there"
        )
    if suspects.partitions:
        sides = " | ".join(" ".join(members) for members in suspects.partitions)
        lines.append(f"slow between these sets of hosts, and not within: {sides}")
    for (first, second), slower in suspects.links:
        where = f"inside {first}" if first == second else f"between {first} and {second}"
        lines.append(f"slow link: {where}, {slower:.1f} x the time of the fast ones")
    lines.append(suspects.exclude or "no host stands out, so none is to be excluded")
    return "\n".join(lines)


def size_text(num_bytes: float) -> str:
    """`4 MiB`, `1.5 KiB`, `12 B`."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def duration(seconds: float) -> str:
    """Three or more digits, in us, ms or s."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def rate(bytes_per_s: float) -> str:
    """In GB/s (10^9), three digits."""
    return f"{bytes_per_s / 1e9:.3g}"


def _title(rows: Sequence[Row]) -> str:
    row = rows[0]
    link = "on one host" if row.link == "node" else "between hosts"
    if row.mode == ISOLATED:
        return f"{row.axis}, {link}: one group at a time, others silent (GB/s)"
    return f"{row.axis}, {link}: all groups at once, the slowest of them (GB/s)"


def _cells(rows: Sequence[Row]) -> list[Sequence[str]]:
    queues = any(row.host_p50_s is not None for row in rows)
    cells: list[Sequence[str]] = [(*_HEAD, *["host"] * queues, "slowest ranks")]
    for row in rows:
        ranks = " ".join(map(str, row.ranks[:4])) + (" ..." if row.num_ranks > 4 else "")
        cells.append(
            (
                row.operation,
                row.dtype,
                size_text(row.size_bytes),
                *map(duration, (row.p50_s, row.p95_s, row.max_s)),
                *map(rate, (row.algbw_bytes_per_s, row.busbw_bytes_per_s)),
                duration(row.bare_p50_s),
                f"{row.p50_s / row.bare_p50_s:.2f} x",
                *[duration(row.host_p50_s or 0.0)] * queues,
                f"{ranks} (of {row.num_units})" if row.num_units > 1 else ranks,
            )
        )
    return cells


def _fits(lines: Sequence[CostModel]) -> str:
    if not lines:
        return ""
    shown = [
        f"  {x.operation} {x.dtype}: {duration(x.fit.latency_s)}"
        + (
            f" + bytes x bus factor / {rate(x.fit.bytes_per_s)} GB/s, "
            if x.fit.bytes_per_s
            else ", bandwidth not seen, use larger sizes; "
        )
        + ("two sizes" if x.fit.deviation is None else f"{x.fit.deviation:.0%} off")
        for x in lines
    ]
    return "\nfitted\n" + "\n".join(shown)


def _table(rows: Iterable[Sequence[str]]) -> str:
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


# -- limits -------------------------------------------------------------------------------


def parse_limits(texts: Sequence[str]) -> dict[str, float]:
    """`data=10,pipe=2` or `10` (every axis), in GB/s, as bytes a second by axis.

    Raises:
        ConfigError: no positive number, or one axis twice.
    """
    limits: dict[str, float] = {}
    for text in (part for several in texts for part in parts_of(several, "limit")):
        axis, _, number = (word.strip() for word in text.rpartition("="))
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise ConfigError(f"--min-busbw {text}: write GB/s, or axis=GB/s, e.g. data=10")
        if axis in limits:
            raise ConfigError(f"--min-busbw names {axis or 'all axes'} twice; name it once")
        limits[axis] = value * 1e9
    return limits


def violations(report: BenchReport, limits: Mapping[str, float]) -> list[str]:
    """One line for each operation whose best size stays under its limit.

    The best size counts, because small messages are slow on any network; of the units that were
    measured the slowest.
    """
    best: dict[tuple[str, str, str, str], tuple[float, tuple[int, ...]]] = {}
    for row in report.rows:
        key = (row.axis, row.link, row.mode, row.operation)
        found = (row.busbw_bytes_per_s, row.ranks)
        best[key] = max(best.get(key, found), found)
    lines = [
        f"{axis}, {link}, {mode}: {operation} over ranks {list(ranks)} reaches {rate(busbw)} GB/s, "
        f"below {rate(limit)}"
        for (axis, link, mode, operation), (busbw, ranks) in best.items()
        if (limit := limits.get(axis, limits.get(EVERY))) is not None and busbw < limit
    ]
    limit = limits.get(PAIRS)
    if limit is not None and report.pairs is not None:
        for a, b, time_s in report.pairs.times:
            if (busbw := report.pairs.busbw_bytes_per_s(time_s)) < limit:
                hosts = f"{report.hosts[a]} and {report.hosts[b]}"
                lines.append(
                    f"pair of ranks {a} and {b} on {hosts}: {rate(busbw)} GB/s, below {rate(limit)}"
                )
    return lines

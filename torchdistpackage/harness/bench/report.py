"""What a bench found, as a value and as JSON. No torch.

One rule: a row is the slowest of the units that it stands for, because a collective job waits for
that one; how fast the fastest was stands beside it. Times are of one call, the slowest rank of an
iteration counting for all, and every name carries its unit.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from torchdistpackage.harness.bench.fit import LinkFit, fit
from torchdistpackage.harness.bench.rounds import Participants
from torchdistpackage.harness.operations import COLLECTIVES

FORMAT, VERSION = "torchdistpackage bench", 1
ISOLATED, CONCURRENT = "alone", "together"
"""One unit at a time, or all units of an axis at once."""


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

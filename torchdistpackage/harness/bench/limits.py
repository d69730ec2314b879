"""Bandwidths that a cluster must reach, and what is below them. No torch."""

from collections.abc import Mapping, Sequence

from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench.report import BenchReport
from torchdistpackage.harness.bench.request import parts_of
from torchdistpackage.harness.bench.table import rate

EVERY, PAIRS = "", "pairs"
"""Stand for all axes, and for the slowest of all pairs."""


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

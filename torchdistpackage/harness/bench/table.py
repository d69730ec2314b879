"""A bench as text for a terminal. No torch."""

from collections.abc import Iterable, Sequence

from torchdistpackage.harness.bench.pairs import SlowLinks
from torchdistpackage.harness.bench.report import ISOLATED, BenchReport, CostModel, Pairs, Row
from torchdistpackage.topology.mesh import describe

_HEAD = ("operation", "dtype", "size", "p50", "p95", "max", "algbw", "busbw", "bare p50", "ours")
_MATRIX = 16
"""Ranks whose matrix is printed; the file has it whole."""


def text(report: BenchReport) -> str:
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
    lines = [f"pairs, both ways at once, {size(pairs.size_bytes)} of {pairs.dtype}"]
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


def size(num_bytes: float) -> str:
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
                size(row.size_bytes),
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

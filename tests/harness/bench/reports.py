"""A made-up report: every link takes 100 us and 1 ns a bus byte, but for what a test says."""

from torchdistpackage.comm.collective_table import COLLECTIVES
from torchdistpackage.harness.bench.report import BenchReport, Pairs, Row
from torchdistpackage.harness.bench.request import CONCURRENT

LATENCY_S, PER_BYTE_S = 1e-4, 1e-9


def row(operation="all_reduce", size_bytes=2**20, **more) -> Row:
    facts = {"axis": "data", "link": "node", "mode": CONCURRENT, "dtype": "float32"}
    facts |= {"ranks": (0, 1, 2, 3), "num_units": 2} | more
    bus_bytes = size_bytes * COLLECTIVES[operation].bus_factor(len(facts["ranks"]))
    p50_s = facts.pop("p50_s", LATENCY_S + bus_bytes * PER_BYTE_S)
    times = {"p50_s": p50_s, "p95_s": 2 * p50_s, "max_s": 3 * p50_s}
    return Row(
        operation=operation,
        size_bytes=size_bytes,
        fastest_p50_s=p50_s / 2,
        bare_p50_s=p50_s,
        **times,
        **facts,
    )


def report(*rows: Row, pairs: Pairs | None = None) -> BenchReport:
    return BenchReport(
        date="2026-01-02T03:04:05+00:00",
        by="me@n0",
        backend="gloo",
        device="cpu",
        torch="2.13",
        topology=(("data", 4), ("pipe", 2)),
        hosts=tuple(f"n{rank // 4}" for rank in range(8)),
        iterations=20,
        warmup=3,
        rows=rows,
        pairs=pairs,
    )


def both_links(axis: str, ranks: tuple[int, ...], *operations: str) -> list[Row]:
    """Rows of three sizes; between nodes each takes ten times as long."""
    sizes = (2**10, 2**15, 2**20)
    near = [row(name, size, axis=axis, ranks=ranks) for name in operations for size in sizes]
    return [*near, *(x.model_copy(update={"link": "network", "p50_s": 10 * x.p50_s}) for x in near)]

"""What stands in a report: percentiles, bandwidths, the slowest unit of each link. No torch."""

import json
import re

import pytest

from tests.harness.bench.reports import LATENCY_S, report, row
from tests.tells import tells
from torchdistpackage.cli.comm_bench import pairs_text, report_text
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench.report import (
    Measurement,
    Pairs,
    Row,
    SlowLinks,
    find_suspects,
    parse_limits,
    percentile,
    rate,
    rows_of,
    violations,
)
from torchdistpackage.text import short_time, size_text

CELL = Measurement(
    axis="data", operation="all_reduce", mode="together", dtype="float32", size_bytes=4096
)
PAIRS = Pairs(size_bytes=2**20, dtype="float32", times={(0, 1): 1e-3, (0, 7): 8e-3, (1, 7): 2e-3})


def test_percentiles_are_measured_values():
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, p) for p in (1, 50, 95, 100)] == [1, 50, 95, 100]
    assert percentile([3.0], 95) == 3.0
    assert percentile([1.0, 2.0], 95) == 2.0


def test_a_row_is_the_slowest_unit_of_its_link():
    units = {(0, 1): 1.0, (2, 3): 3.0, (4, 5): 2.0, (1, 2): 9.0}
    link = {unit: "network" if unit == (1, 2) else "node" for unit in units}
    times = [(u, [t, t + 1, t + 2, t + 50], [t / 2] * 4, [t / 8] * 4) for u, t in units.items()]
    near, far = rows_of(CELL, times, link)
    assert (near.link, near.ranks, near.num_units) == ("node", (2, 3), 3)
    assert (near.p50_s, near.p95_s, near.max_s) == (4.5, 53.0, 53.0)
    assert (near.fastest_p50_s, near.bare_p50_s) == (2.5, 1.5)
    assert near.host_p50_s == 0.375
    assert (far.link, far.ranks, far.num_units) == ("network", (1, 2), 1)


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", lambda n: 2 * (n - 1) / n),
        ("all_gather", lambda n: (n - 1) / n),
        ("reduce_scatter", lambda n: (n - 1) / n),
        ("all_to_all", lambda n: (n - 1) / n),
        ("broadcast", lambda n: 1),
        ("p2p", lambda n: 1),
    ],
)
def test_bandwidths_are_those_of_the_nccl_tests(operation, factor, n):
    found = row(operation, 10**6, ranks=tuple(range(n)), p50_s=1e-3)
    assert found.algbw_bytes_per_s == pytest.approx(1e9)
    assert found.busbw_bytes_per_s == pytest.approx(1e9 * factor(n))


def test_the_json_has_every_figure_with_its_unit():
    whole = report(row(), row(size_bytes=2**10), pairs=PAIRS)
    found = json.loads(json.dumps(whole.model_dump(mode="json")))
    assert (found["format"], found["version"]) == ("torchdistpackage bench", 1)
    assert found["hosts"][7] == "n1" and found["topology"] == [["data", 4], ["pipe", 2]]
    for one, of in zip(found["rows"], whole.rows, strict=True):
        assert set(Row.model_fields) < set(one)
        assert one["busbw_bytes_per_s"] == of.busbw_bytes_per_s == one["algbw_bytes_per_s"] * 1.5
        assert one["verified"] is True and one["ranks"] == [0, 1, 2, 3]
    (line,) = found["lines"]
    assert line["fit"]["latency_s"] == pytest.approx(LATENCY_S)
    assert found["pairs"]["times"][1] == {"ranks": [0, 7], "p50_s": 8e-3}
    names = re.findall(r'"(\w*(?:p50|p95|max|latency|busbw|algbw|size)\w*)"', json.dumps(found))
    assert all(name.endswith(("_s", "_bytes")) for name in names)


def test_the_table_shows_ours_beside_the_bare_call():
    shown = report_text(report(row(), row("p2p", axis="pipe", mode="alone", num_units=1)))
    assert tells(shown, "8 ranks", "2 hosts", "4", "pipe=2")
    first = next(line for line in shown.splitlines() if line.startswith("all_reduce"))
    cells = "all_reduce float32 1 MiB 1.67 ms 1.67 ms 1.00 x 0.627 0.94 3.35 ms 5.02 ms 0 1 2 3"
    assert first.split() == [*cells.split(), "(of", "2)"]
    assert "pipe, on one host: one group at a time" in shown and "fitted" not in shown


def test_a_terminal_gets_tables_in_blocks_of_its_width(monkeypatch):
    small = row("reduce_scatter", size_bytes=2**10, host_p50_s=4.2e-5, p50_s=1.234e-3)
    whole = report(small, row("reduce_scatter", p50_s=1.5e-3, host_p50_s=1e-5), pairs=PAIRS)
    hosts = [f"node{i:03}" for i in range(16)]
    times = {(a, b): 1e-3 + 1e-5 * a for a in range(16) for b in range(a + 1, 16)}
    pairs = Pairs(size_bytes=2**20, dtype="float32", times=times)
    suspects = find_suspects(times, hosts)

    def lines() -> list[str]:
        return f"{report_text(whole)}\n{pairs_text(pairs, suspects, hosts)}".splitlines()

    wide = lines()
    heads = [x for x in wide if x.startswith(("operation", "GB/s"))]
    assert len(heads) == 2 and min(map(len, heads)) > 100
    monkeypatch.setenv("COLUMNS", "80")
    narrow = lines()
    assert max(map(len, narrow)) <= 80
    for head in heads:  # the same columns in the same order, the first ones again in each block
        begin = ("operation", "dtype", "size") if head.startswith("op") else ("GB/s",)
        blocks = [x.split() for x in narrow if x.startswith(begin[0])]
        assert len(blocks) > 1 and all(tuple(x[: len(begin)]) == begin for x in blocks)
        assert [*begin, *(x for block in blocks for x in block[len(begin) :])] == head.split()


def test_the_pairs_name_the_slowest_and_whom_to_exclude():
    hosts = report().hosts
    shown = pairs_text(PAIRS, find_suspects(PAIRS.times, hosts), hosts)
    assert tells(shown, "rank 0", "n0", "rank 7", "n1", "0.131 GB", "4.0")
    assert shown.endswith("no host stands out, so exclude none")
    many = {(a, b): 5e-3 if b == 2 else 1e-3 for a in range(3) for b in range(a + 1, 3)}
    three = Pairs(size_bytes=2**20, dtype="float32", times=many)
    alone = ["n0", "n1", "n2"]
    assert pairs_text(three, find_suspects(many, alone), alone).endswith("--exclude=n2")
    found = SlowLinks((0, 7), 4.0, (), ((5, 6.0),), (("n0", "n2"), ("n1",)), ())
    shown = pairs_text(PAIRS, found, hosts)
    assert "slow rank: 5 on n1 takes 6.0 x the time" in shown
    assert "slow between these sets of hosts, but not within them: n0 n2 | n1" in shown


def test_figures_are_readable():
    assert [size_text(x) for x in (12, 1536, 2**22, 2**31)] == ["12 B", "1.5 KiB", "4 MiB", "2 GiB"]
    assert [short_time(x) for x in (2.5e-6, 1.2345e-3, 12)] == ["2.5 us", "1.23 ms", "12 s"]
    assert rate(12.34e9) == "12.3"


def test_limits_name_what_stays_below_at_its_best_size():
    slow = report(row(size_bytes=2**10), row(), row("broadcast"), pairs=PAIRS)
    assert violations(slow, {}) == violations(slow, parse_limits(["0.9"])) == []
    (line,) = violations(slow, parse_limits(["data=0.92"]))
    assert line.startswith("data, node, together: broadcast over ranks [0, 1, 2, 3] reaches 0.913")
    assert violations(slow, parse_limits(["pipe=99"])) == []
    assert parse_limits(["data=10, pipe=2"]) == {"data": 10e9, "pipe": 2e9}
    assert len(violations(slow, parse_limits(["0.95", "data=0.1"]))) == 0
    (pair,) = violations(slow, parse_limits(["pairs=0.2"]))
    assert pair == "pair of ranks 0 and 7 on n0 and n1: 0.131 GB/s, below 0.2"


@pytest.mark.parametrize("wrong", ["x", "data=", "data=-1", "0", "data=nan", "inf"])
def test_a_limit_is_a_positive_number(wrong):
    with pytest.raises(ConfigError, match="write GB/s, or axis=GB/s"):
        parse_limits([wrong])


def test_a_limit_is_given_once():
    with pytest.raises(ConfigError, match="names data twice"):
        parse_limits(["data=1", "pipe=1", "data=2"])


def test_where_calls_queue_the_table_shows_what_the_host_takes():
    shown = report_text(report(row(host_p50_s=4.2e-5), row(size_bytes=2**10, host_p50_s=3e-5)))
    head, *rows = (x.split("  ") for x in shown.splitlines() if x.startswith(("oper", "all_red")))
    place = [x.strip() for x in head if x].index("host")
    assert [[x.strip() for x in cells if x][place] for cells in rows[:2]] == ["42 us", "30 us"]
    assert " host " not in report_text(report(row()))
    assert rows_of(CELL, [((0, 1), [1.0], [1.0], ())], {(0, 1): "node"})[0].host_p50_s is None

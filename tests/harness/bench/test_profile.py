"""A stored profile reads back as it was written, and no other file is taken for one. No torch."""

import json
import re
import sys

import pytest

from tests.harness.bench.reports import LATENCY_S, PER_BYTE_S, both_links, report, row
from tests.tells import tells
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench.outputs import Outputs
from torchdistpackage.harness.bench.profile import dumps, read
from torchdistpackage.harness.bench.request import Request

PROFILE = report(*both_links("data", (0, 1, 2, 3), "all_reduce", "p2p_both")).profile()


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "cluster.json"
    file.write_text(dumps(PROFILE))
    return file


def test_what_is_written_is_read(path):
    assert read(path) == PROFILE
    found = json.loads(path.read_text())
    assert (found["by"], found["date"][:4], found["hosts"]) == ("me@n0", "2026", ["n0", "n1"])
    assert {"latency_s", "bus_bytes_per_s", "num_ranks", "link", "operation"} < set(
        found["lines"][0]
    )


@pytest.mark.parametrize("n", [2, 4, 64])
def test_times_follow_the_group_by_the_bus_factor(n):
    bus_bytes = 2 * (n - 1) / n * 10**7
    time_s = PROFILE.line("data", "node", "all_reduce", "float32", n).time_s(bus_bytes)
    assert time_s == pytest.approx(LATENCY_S + bus_bytes * PER_BYTE_S)
    far = PROFILE.line("data", "network", "all_reduce", "float32", n)
    assert far.time_s(bus_bytes) == pytest.approx(10 * time_s)


def test_another_axis_borrows_a_link_and_a_link_never():
    near = report(row(), row(size_bytes=2**10)).profile()
    assert near.line("pipe", "node", "all_reduce", "float32", 4) is not None
    assert near.line("data", "network", "all_reduce", "float32", 4) is None
    assert near.line("data", "node", "broadcast", "float32", 4) is None


def test_of_several_measurements_the_own_axis_and_all_groups_at_once_count():
    rows = [
        row(size_bytes=size, axis=axis, mode=mode, p50_s=time_s + size * 1e-9)
        for axis, mode, time_s in [
            ("pipe", "together", 1.0),
            ("data", "alone", 2.0),
            ("data", "together", 3.0),
        ]
        for size in (1000, 2000)
    ]
    found = report(*rows).profile()
    for axis, time_s in [("data", 3.0), ("pipe", 1.0)]:
        line = found.line(axis, "node", "all_reduce", "float32", 4)
        assert line.time_s(0) == pytest.approx(time_s)


@pytest.mark.parametrize("turned", [1, -1])
@pytest.mark.parametrize(
    ("dtype", "num_ranks", "time_s"),
    [("float32", 2, 1.0), ("float32", 64, 2.0), ("int8", 64, 3.0), ("bf16", 2, 1.0)],
)
def test_then_the_element_type_counts_and_then_the_nearest_number_of_ranks(
    dtype, num_ranks, time_s, turned
):
    measured = [("float32", 2, 1.0), ("float32", 16, 2.0), ("int8", 2, 3.0)][::turned]
    rows = [
        row(size_bytes=size, dtype=name, ranks=tuple(range(n)), p50_s=latency_s + size * 1e-9)
        for name, n, latency_s in measured
        for size in (1000, 2000)
    ]
    line = report(*rows).profile().line("data", "node", "all_reduce", dtype, num_ranks)
    assert line.time_s(0) == pytest.approx(time_s)


def test_what_was_measured_ends_at_the_largest_bus_bytes(path):
    lines = read(path).lines
    assert {x.largest_bytes for x in lines if x.operation == "all_reduce"} == {1.5 * 2**20}
    assert {x.largest_bytes for x in lines if x.operation == "p2p_both"} == {2**20}


def test_where_size_made_no_difference_nothing_is_known_of_larger_ones():
    rows = [row("p2p", size, p50_s=1e-5, ranks=(0, 1)) for size in (1, 2, 4)]
    (line,) = report(*rows).profile().lines
    assert line.time_s(4) == pytest.approx(1e-5) and line.time_s(5) is None


def test_one_size_gives_no_profile():
    with pytest.raises(ConfigError, match="needs times at two sizes or more"):
        report(row()).profile()


def change(**more):
    def write(text: str) -> str:
        return json.dumps(json.loads(text) | more)

    return write


def change_line(**more):
    def write(text: str) -> str:
        found = json.loads(text)
        found["lines"][0] |= more
        return json.dumps(found)

    return write


@pytest.mark.parametrize(
    ("damage", "key", "value"),
    [
        (lambda text: text[: len(text) // 2], "Invalid JSON: ", ""),
        (lambda text: "", "Invalid JSON: ", ""),
        (lambda text: "[1, 2]", "an object", "[1, 2]"),
        (lambda text: "[" * 100_000, "Invalid JSON: ", ""),
        (change(format="other"), "format: ", "'other'"),
        (change(version=2), "version: ", "2"),
        (change(lines=7), "lines: ", "7"),
        (change(lines=[7]), "lines.0: ", "7"),
        (change(topology=[["data"]]), "topology.0.1: ", ""),
        (change_line(latency_s=-1), "lines.0.latency_s: ", "-1"),
        (change_line(latency_s="3"), "lines.0.latency_s: ", "'3'"),
        (change_line(bus_bytes_per_s=0), "lines.0.bus_bytes_per_s: ", "0"),
        (change_line(bus_bytes_per_s=float("nan")), "lines.0.bus_bytes_per_s: ", "nan"),
        (change_line(bus_bytes_per_s=float("inf")), "lines.0.bus_bytes_per_s: ", "inf"),
        (change_line(latency_s=True), "lines.0.latency_s: ", "True"),
        (change_line(largest_bytes=0), "lines.0.largest_bytes: ", "0"),
        (change_line(num_ranks=0), "lines.0.num_ranks: ", "0"),
        (change_line(link="rope"), "lines.0.link: ", "'rope'"),
        (change_line(operation="gossip"), "lines.0.operation: ", "'gossip'"),
        (lambda text: text.replace('"date"', '"day"'), "date: ", ""),
        (lambda text: text.replace('"deviation"', '"off"'), "lines.0.deviation: ", ""),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_with_its_key_and_value(path, damage, key, value):
    path.write_text(damage(path.read_text()))
    with pytest.raises(ConfigError, match=re.escape(key)) as caught:
        read(path)
    text = str(caught.value)
    assert text.startswith(f"{path} is not a torchdistpackage cluster profile of version 1")
    assert not value or f", got {value};" in text
    assert tells(text, "--profile", "FILE")


def test_a_file_of_an_earlier_release_is_read(path):
    """The format is what users have on disk."""
    line = {"axis": "data", "link": "node", "operation": "all_reduce", "mode": "together"}
    line |= {"dtype": "float32", "num_ranks": 4, "largest_bytes": 1572864.0}
    line |= {"latency_s": 0.0001, "bus_bytes_per_s": 1e9, "deviation": None}
    head = {"format": "torchdistpackage cluster profile", "version": 1}
    head |= {"date": "2026-01-02T03:04:05+00:00", "by": "me@n0", "backend": "gloo"}
    head |= {"hosts": ["n0", "n1"], "topology": [["data", 4], ["pipe", 2]]}
    text = json.dumps(head | {"lines": [line]}, indent=1) + "\n"
    path.write_text(text)
    assert read(path).lines[0].time_s(1e6) == pytest.approx(1.1e-3)
    assert dumps(read(path)) == text


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(tmp_path / "none.json")


def test_outputs_are_refused_before_anything_is_measured(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"none/a\.json cannot be written"):
        Outputs(json=tmp_path / "none" / "a.json").check(Request())
    with pytest.raises(ConfigError, match="cannot be written"):
        Outputs(profile=tmp_path).check(Request())
    with pytest.raises(ConfigError, match="at two sizes or more"):
        Outputs(profile=tmp_path / "p.json").check(Request(sizes_bytes=(1, 4)))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="plots need matplotlib, which"):
        Outputs(plots=tmp_path / "p").check(Request())
    assert list(tmp_path.iterdir()) == []

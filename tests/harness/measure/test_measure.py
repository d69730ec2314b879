"""The bench on real ranks: all is measured and verified, one wrong element ends it on all."""

import getpass
import itertools
import os
import time

import pytest
import torch

from tests.harness.measure.late_calls import DELAY_S, late_calls
from torchdistpackage.comm import primitives
from torchdistpackage.comm.collective_table import COLLECTIVES
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError
from torchdistpackage.harness import measure as measuring
from torchdistpackage.harness.bench.report import BenchReport
from torchdistpackage.harness.bench.request import ELEMENT_BYTES, Request
from torchdistpackage.harness.measure import measure

QUICK = {"iterations": 1, "warmup": 0}


def measured(config: tuple[tuple[str, int], ...], request: Request) -> BenchReport:
    tpc.setup_process_groups(list(config))
    return measure(request)


full = pytest.mark.full


def without_a_name() -> str:
    """A user that no passwd entry knows, as in a container; the bench is not lost for it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
            patch.delenv(name, raising=False)
        patch.setattr(os, "getuid", lambda: 54_321)
        with pytest.raises((KeyError, OSError)):
            getpass.getuser()
        report = measured(
            (("data", 2),), Request(operations=("all_reduce",), sizes_bytes=(1024,), **QUICK)
        )
    return report.by.partition("@")[0]


def test_a_user_without_a_name_has_a_number(ranks):
    assert ranks(2).run(without_a_name) == ["54321"] * 2


@pytest.mark.parametrize("over", [("pipe",), pytest.param((), marks=full)], ids=str)
def test_every_operation_is_measured_over_every_axis_and_all_ranks_know(ranks, over):
    request = Request(sizes_bytes=(101, 400), over=over, **QUICK)
    reports = ranks(4).run(measured, (("data", 2), ("pipe", 2)), request)
    assert all(report.rows == reports[0].rows for report in reports)
    rows, axes = reports[0].rows, over or ("data", "pipe")
    seen = {(r.axis, r.operation, r.mode, r.size_bytes) for r in rows}
    assert seen == {
        (axis, operation, mode, size)
        for axis in axes
        for operation in COLLECTIVES
        for mode in ("alone", "together")
        for size in (104, 400)
    }
    for row in rows:
        pairs = {"data": [(0, 2), (1, 3)], "pipe": [(0, 1), (2, 3)]}[row.axis]
        assert row.ranks in pairs and row.num_units == 2 and row.link == "node"
        assert row.fastest_p50_s > 0 and row.bare_p50_s > 0
        assert 0 < row.p50_s <= row.p95_s <= row.max_s
    assert len(reports[0].lines) == len(axes) * len(COLLECTIVES) * 2


def test_neighbours_along_a_long_axis_are_all_measured_and_so_are_all_pairs(ranks):
    request = Request(("p2p", "p2p_both"), (64,), isolated=9, pairs=True, **QUICK)
    report, *_ = ranks(4).run(measured, (("pipe", 4),), request)
    assert {(r.mode, r.num_units) for r in report.rows} == {("alone", 3), ("together", 3)}
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    assert [time[:2] for time in report.pairs.times] == pairs


@pytest.mark.parametrize(
    "operations", [("all_reduce",), pytest.param(tuple(COLLECTIVES), marks=full)], ids=len
)
def test_every_element_type_arrives(ranks, operations):
    request = Request(operations, (1000,), dtypes=tuple(ELEMENT_BYTES), **QUICK)
    report, *_ = ranks(2).run(measured, (("data", 2),), request)
    assert {(r.operation, r.dtype) for r in report.rows} == {
        (operation, dtype) for operation in operations for dtype in ELEMENT_BYTES
    }


def test_sizes_are_rounded_up_to_whole_parts(ranks):
    request = Request(("all_gather", "all_reduce"), (101,), **QUICK)
    report, *_ = ranks(3).run(measured, (("data", 3),), request)
    assert [row.size_bytes for row in report.rows] == [108, 104]


@pytest.mark.parametrize(
    ("config", "over", "axes"),
    [
        ((("data", 1),), (), set()),
        ((("tensor", 1), ("data", 2)), ("tensor", "data"), {"data"}),
        ((("tensor", 2), ("data", 1)), ("global",), {"global"}),
    ],
)
def test_a_group_of_one_is_nothing_to_measure(ranks, config, over, axes):
    world_size = config[0][1] * config[-1][1] if len(config) > 1 else 1
    request = Request(("all_reduce",), (4,), over=over, pairs=world_size == 1, **QUICK)
    reports = ranks(world_size).run(measured, config, request)
    assert {row.axis for row in reports[0].rows} == axes
    assert reports[0].pairs is None


def one_wrong_element(operation: str, broken: int) -> str:
    tpc.setup_process_groups([("data", 2), ("pipe", 2)])
    right = measuring.tdp_call

    def ours(name, x, place):
        call = right(name, x, place)

        def damaged():
            out = call()
            if out is not None and len(out) > 100:
                out[7] = 77
            return out

        return damaged

    with pytest.MonkeyPatch.context() as patch:
        if tpc.rank == broken:
            patch.setattr(measuring, "tdp_call", ours)
        with pytest.raises(CommError) as caught:
            measure(Request((operation,), (8, 1600), over=("pipe",), **QUICK))
    return str(caught.value)


@pytest.mark.few(2)
@pytest.mark.parametrize("operation", COLLECTIVES)
def test_one_wrong_element_ends_it_on_all_ranks_and_is_named(ranks, operation):
    texts = ranks(4).run(one_wrong_element, operation, 3)
    assert len(set(texts)) == 1
    (line,) = [x for x in texts[0].splitlines() if operation in x]
    assert line.startswith(f"  {operation} over pipe ranks [2, 3], 1600 bytes of float32: rank 3 ")
    assert "got 77 at element 7, expected" in line and "(1 of " in line


def wrong_only_after_a_while() -> str:
    """The data of the last call is looked at too, not only that of the first."""
    tpc.setup_process_groups([("data", 2)])
    right, number = primitives.broadcast, 0

    def broadcast(x, group):
        nonlocal number
        number += 1
        out = right(x, group)
        if number > 2 and tpc.rank == 1:
            out[0] = 99
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitives, "broadcast", broadcast)
        with pytest.raises(CommError) as caught:
            measure(Request(("broadcast",), (64,), **QUICK))
    return str(caught.value)


def test_data_is_verified_after_the_measurement_too(ranks):
    assert all("got 99 at element 0" in text for text in ranks(2).run(wrong_only_after_a_while))


def late() -> BenchReport:
    with late_calls(measuring):
        return measured((("data", 2),), Request(("p2p",), (64,), iterations=3, warmup=0))


def test_the_slowest_rank_of_an_iteration_counts(ranks):
    for report in ranks(2).run(late):
        (row,) = report.rows
        assert row.p50_s > DELAY_S > row.bare_p50_s


def test_calls_take_turns_after_a_meeting_and_the_warm_up_is_not_kept():
    seen: list[str] = []
    calls = [lambda: seen.append("a"), lambda: seen.append("b")]
    together = lambda: seen.append("|")  # noqa: E731
    times = measuring.in_turns(calls, together, torch.device("cpu"), iterations=3, warmup=2)
    assert "".join(seen) == "|a|b|b|a|a|b|b|a|a|b"
    assert [len(kept.seconds) for kept in times] == [3, 3]
    assert [kept.host_s for kept in times] == [[], []]


def spans_of_calls(config, request: Request) -> list[tuple[float, float]]:
    """Begin and end of each timed call of this rank; those of rank 0's unit take longer."""
    tpc.setup_process_groups(list(config))
    spans, right = [], measuring._host_s

    def watched(call):
        begin_s = time.monotonic()
        seconds = right(call)
        time.sleep(0.003 if 0 in tpc.get_ranks_in_group("data") else 0)
        spans.append((begin_s, time.monotonic()))
        return seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "_host_s", watched)
        measure(request)
    return spans


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("config", "operation"),
    [
        ((("data", 2), ("tensor", 2)), "all_reduce"),
        ((("tensor", 2), ("data", 3)), "p2p"),
    ],
    ids=["groups", "neighbours, of which one sits out"],
)
def test_groups_that_are_busy_at_once_do_not_drift_apart(ranks, config, operation):
    """No call begins before the one before it has ended everywhere."""
    request = Request((operation,), (64,), over=("data",), isolated=0, iterations=8, warmup=2)
    spans = ranks(config[0][1] * config[1][1]).run(spans_of_calls, config, request)
    if operation == "p2p":  # first the neighbours (0, 1) and (3, 4), then (1, 2) and (4, 5)
        rounds = [[spans[0], spans[1][:20], spans[3], spans[4][:20]]]
        rounds += [[spans[1][20:], spans[2], spans[4][20:], spans[5]]]
    else:
        rounds = [spans]
    for busy in rounds:
        assert {len(one) for one in busy} == {20}
        for before, after in itertools.pairwise(zip(*busy, strict=True)):
            assert max(end for _, end in before) <= min(begin for begin, _ in after)


def test_of_pairs_too_who_sits_out_meets_the_others(ranks):
    request = Request((), (64,), isolated=0, pairs=True, iterations=3, warmup=1)
    report, *_ = ranks(5).run(measured, (("data", 5),), request)
    assert len(report.pairs.times) == 10

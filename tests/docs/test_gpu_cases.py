"""The cases of the GPU benchmarks' part `several`: which they are, how they end, two over gloo."""

import json
import time
from pathlib import Path

import pytest

from benchmarks.gpu import memory_check, several
from benchmarks.gpu.here import Here
from benchmarks.gpu.part import read
from benchmarks.gpu.rows import Choice, Found, NotRun, Row, Status, expect
from benchmarks.gpu.shared_cases import TESTS, TOUR, Case, cases
from benchmarks.gpu.shared_ranks import DeviceRanks


def test_the_cases_are_the_library_each_kind_once_then_all():
    every = cases(on_gpu=True)
    names = [case.name for case in every]
    assert len(names) - len({*names}) <= 1, "test_experts.py has one twice"
    assert [case.is_base for case in every[:5]] == [True] * 5
    first = [case.kind for case in every if case.by_default and not case.is_base]
    kinds = {case.kind for case in every} - {"nccl", "memcheck"}
    assert len(first) == len({*first}) and {*first} == kinds >= {*TESTS}
    for way in ("p2p", "all_gather", "a2a", "a2a+p2p"):
        assert any(x.startswith("context ") and x.endswith(f"-{way}") for x in names)
    assert {f"order {x}" for x in TOUR} <= {*names}
    only_on_gpu = {*names} - {case.name for case in cases(on_gpu=False)}
    assert {x.partition(" ")[0] for x in only_on_gpu} == {"memcheck"}


@pytest.mark.parametrize("name", ["layout tensor2-sp", "order pipe2-tied"])
def test_a_case_over_gloo(pool, tmp_path, name):
    (case,) = [x for x in cases(on_gpu=False) if x.name == name]
    assert case.run(DeviceRanks(tmp_path, pool))


def hangs() -> None:
    time.sleep(100)


def test_a_case_that_hangs_ends_with_the_stacks_of_its_ranks(pool, tmp_path):
    ranks = DeviceRanks(tmp_path, pool)
    ranks.limit_s = 1.0
    found = Found(lambda rows: None, small=True)
    with found.case("hangs"):
        ranks(2).run(hangs)
    assert found.rows[0].status == Status.FAILED and "within 1 s" in found.rows[0].text
    assert "in hangs" in found.rows[0].detail


def not_here(ranks: DeviceRanks) -> str:
    raise NotRun("no tool")


def wrong(ranks: DeviceRanks) -> str:
    expect(False, "other numbers")
    return ""


def test_a_run_that_goes_on_keeps_what_held_and_ends_with_the_library(monkeypatch, tmp_path):
    every = [
        Case("nccl a", lambda ranks: "as it must", is_base=True, by_default=True),
        Case("tool b", not_here, by_default=True),
        Case("nccl c", wrong, is_base=True, by_default=True),
        Case("layout d", wrong, by_default=True),
    ]
    monkeypatch.setattr(several, "cases", lambda on_gpu: every)

    def run(choice: Choice) -> list[Row]:
        found = Found(lambda rows: None, small=True, choice=choice)
        several.run_cases(Here.find(), found)
        return found.rows

    def shown(rows: list[Row]) -> list[tuple[str, str]]:
        return [(row.name, row.status) for row in rows]

    left = ("other cases", "not run")
    first = run(Choice())
    ended = [("nccl a", "ok"), ("tool b", "not run"), ("nccl c", "failed"), left]
    assert shown(first) == ended
    file = tmp_path / "rows.json"
    rows = [{"name": x.name, "status": x.status, "text": x.text} for x in first]
    file.write_text(json.dumps({"rows": rows}))
    again = run(Choice(earlier=read(file)))
    assert shown(again) == ended and again[0].text == first[0].text, "it is not run again"
    assert shown(run(Choice("layout *,tool ?"))) == [("tool b", "not run"), ("layout d", "failed")]
    assert shown(run(Choice(end_s=time.monotonic() + 10))) == [left]


@pytest.mark.parametrize(("errors", "status"), [(0, "ok"), (1, "ok"), (0, "failed")])
def test_memcheck_counts_the_errors_of_all_processes(
    monkeypatch, tmp_path: Path, pool, errors, status
):
    """With a stand-in that says what the tool says."""
    rows = json.dumps({"rows": [{"status": status}]})
    tool = tmp_path / memory_check.TOOL
    tool.write_text(
        f"#!/bin/sh\nfor x in \"$@\"; do case $x in *.json) echo '{rows}' > $x;; esac; done\n"
        f"echo '==== ERROR SUMMARY: 0 errors'; echo '==== ERROR SUMMARY: {errors} errors'\n"
    )
    tool.chmod(0o700)
    ranks = DeviceRanks(tmp_path, pool)
    monkeypatch.setenv("PATH", str(tmp_path))
    if not errors and status == "ok":
        assert memory_check.memory_checked("layout a", ranks) == "no error in 2 processes"
    else:
        with pytest.raises(AssertionError, match="ERROR SUMMARY"):
            memory_check.memory_checked("layout a", ranks)
    tool.unlink()
    with pytest.raises(NotRun, match="not installed"):
        memory_check.memory_checked("layout a", ranks)

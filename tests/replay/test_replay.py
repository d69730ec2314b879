"""What the page says of published bugs, planted again, is found and named as it should be.

`scripts/replay` runs all of them and writes the page of the score; `--full` asserts it of each.
"""

import json

import pytest

from tests.replay import page
from tests.replay.replay import findings, replay
from tests.replay.reports import REPORTS

BY_NAME = {report.name: report for report in REPORTS}
SMALL = (
    "norm_not_summed",
    "experts_twice",
    "tied_not_summed",
    "auxiliary_by_ranks",
    "mean_of_context_means",
    "expert_lora_detached",
    "clip_by_stage",
    "schedule_by_ranks",
    "labels_shifted_in_parts",
    "mean_of_microbatch_means",
    "loader_begins_anew",
    "recompute_draws_anew",
    "stale_activation",
    "average_not_restored",
    "sums_in_bf16",
    "collective_eliminated",
)
"""A quarter, which the default run has: every kind and axis, and what takes least time of each."""
RESULTS = {row["name"]: row for row in json.loads(page.RESULTS.read_text("utf-8"))["reports"]}


@pytest.mark.parametrize(
    "name",
    [name if name in SMALL else pytest.param(name, marks=pytest.mark.full) for name in RESULTS],
)
def test_what_the_page_says_of_a_report_is_found(pool, name):
    report, expected = BY_NAME[name], RESULTS[name]
    outcome = replay(report, pool, "this" if name in SMALL else "all")
    assert outcome.result == expected["result"], outcome
    assert (outcome.is_named, outcome.is_told) == (expected["is_named"], expected["is_told"])


@pytest.mark.full
@pytest.mark.parametrize("changes", {x.changes: x for x in REPORTS}, ids="-".join)
def test_a_run_without_the_plant_is_right(pool, changes):
    report = next(x for x in REPORTS if x.changes == changes)
    assert [str(x) for _, x in findings(report, pool, is_planted=False) if x] == []


def test_the_page_says_what_the_results_say():
    results = json.loads(page.RESULTS.read_text("utf-8"))
    assert page.PAGE.read_text("utf-8").partition(page.MARKER)[2] == page.page(results)
    assert set(SMALL) <= set(RESULTS) <= set(BY_NAME)
    small = [BY_NAME[name] for name in SMALL]
    assert {x.kind for x in small} == {x.kind for x in REPORTS}
    assert {axis for x in small for axis in x.axis} >= {
        *("data", "pipe", "context", "tensor", "expert", "accumulation", "resume", "recompute"),
    }

"""The pages on benchmarks say what was measured, and against the right limits."""

import ast
import itertools
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import faults_page, muon
from benchmarks.any_model import table as any_model
from benchmarks.common import take_turns
from benchmarks.data_parallel import table as data_parallel
from benchmarks.data_parallel.limits import CAP_BYTES, Trace, bound_s, roofline_s
from benchmarks.gpu import summary as gpu
from benchmarks.host_time import page as host_time
from benchmarks.hugging_face import table as hugging_face
from benchmarks.pages import RESULTS, section
from benchmarks.pipeline import table as pipeline
from benchmarks.tensor_parallel import table as tensor_parallel
from benchmarks.turns import ratio, rounds_s, spread_ms
from tests.package_files import HAS_WING

SCRIPTS = sorted(Path(data_parallel.__file__).parents[1].glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_imports_is_there(script, monkeypatch):
    """In the project, as scripts run as modules of it; the peer of the faults runs by its path."""
    if script.stem == "faults_train":
        monkeypatch.syspath_prepend(script.parent)
    parts = ast.walk(ast.parse(script.read_text(encoding="utf-8")))
    modules = [node.module for node in parts if isinstance(node, ast.ImportFrom)]
    ours = {m for m in modules if m and m.split(".")[0] not in ("torch", "submitit")}
    here = {m for m in ours if HAS_WING or not m.startswith("torchdistpackage.compat")}
    assert [m for m in sorted(here) if find_spec(m) is None] == []


@pytest.mark.parametrize(
    "table",
    [any_model, data_parallel, hugging_face, pipeline, tensor_parallel],
    ids=lambda table: table.PAGES.name,
)
def test_the_tables_follow_the_results(table):
    pages = table.PAGES
    results = json.loads(pages.results.read_text(encoding="utf-8"))
    record = pages.record.read_text(encoding="utf-8")
    assert record.partition(pages.marker)[2] == "\n" + pages.page(results)
    assert section(pages.name) == pages.summary(results)


def test_the_record_of_muon_follows_its_results():
    results = json.loads(muon.RESULTS.read_text(encoding="utf-8"))
    assert muon.RECORD.read_text(encoding="utf-8") == muon.page(results)


def test_the_section_of_the_gpu_follows_its_results():
    results = json.loads(gpu.RESULTS.read_text(encoding="utf-8"))
    assert section(gpu.NAME) == gpu.summary(results)


def test_the_pages_on_host_time_follow_its_results():
    results = json.loads(host_time.RESULTS.read_text(encoding="utf-8"))
    assert section(host_time.NAME) == host_time.summary(results)
    assert host_time.measured(results) in host_time.PAGE.read_text(encoding="utf-8")


def test_a_section_has_one_table():
    page = RESULTS.read_text(encoding="utf-8")
    names = re.findall(r"<!-- benchmarks/(\w+) writes from here -->", page)
    assert len(names) == 7
    for name in names:
        assert len(re.findall(r"^\|---", section(name), re.M)) == 1, name


@pytest.mark.parametrize(
    ("buckets_per_s", "share", "expected_s"),
    [
        (1, 1.0, 1 + 3 + 0.5),  # the link is busy from the first bucket on
        (1, 0.5, 2.5 + 0.5 + 0.5),  # it waits for the last one
        (10, 1.0, 2.5 + 0.1 + 0.5),
    ],
)
def test_the_bound_is_first_bucket_and_wire_or_last_gradient(buckets_per_s, share, expected_s):
    half = CAP_BYTES // 2
    ready = [(0.9, half), (1.0, half), (2.0, CAP_BYTES), (2.4, half), (2.5, half)]
    trace: Trace = {"ready": ready, "optimizer_s": 0.5}
    assert bound_s(trace, buckets_per_s * CAP_BYTES, share) == pytest.approx(expected_s)


def test_the_roofline_is_the_busier_of_processor_and_link():
    assert roofline_s(2.0, 30.0, 10.0) == 3.0
    assert roofline_s(4.0, 30.0, 10.0) == 4.0


def test_close_sides_take_more_turns_and_nobody_always_follows_the_same_one():
    order: list[str] = []

    def turn(side: str) -> float:
        order.append(side)
        return float(len(order) - 1)

    sides, close = "abcde", {"a", "c"}
    taken = take_turns(sides, close, 20, turn)
    size = len(sides) + 2 * len(close)
    for number in range(20):
        once, again = order[size * number :][:5], order[size * number + 5 : size * (number + 1)]
        assert sorted(once) == [*sides] and {*again[:2]} == {*again[2:]} == close
        for side in sides:
            assert [order[int(at)] for at in taken[side][number]] == [side] * (
                1 + 2 * (side in close)
            )
    assert {(a, b) for a, b in itertools.pairwise(order)} >= {*itertools.permutations(sides, 2)}
    before, order[:] = [*order], []
    take_turns(sides, close, 20, turn)
    assert order == before  # on another rank


def test_a_turn_is_from_the_last_begin_to_the_last_end_and_a_round_is_its_middle_turn():
    first = [[(0.0, 4.0), (10.0, 18.0), (20.0, 22.0)], [(30.0, 38.0)]]
    second = [[(2.0, 3.0), (8.0, 9.0), (20.0, 24.0)], [(28.0, 42.0)]]
    assert rounds_s([first, second], 2) == [2.0, 6.0]  # 2, 8, 4 and 12, by 2 steps


def test_sides_compare_round_by_round():
    fast, slow = spread_ms([0.1, 0.2, 0.4]), spread_ms([0.2, 0.2, 1.6])
    assert (fast["median"], fast["min"], fast["max"]) == (200, 100, 400)
    found, half = ratio(fast, slow)
    assert (found, half) == (pytest.approx(0.5), pytest.approx((0.375, 0.75)))
    found, half = ratio(slow, 100.0)
    assert (found, half) == (pytest.approx(2.0), pytest.approx((2.0, 9.0)))
    assert ratio({"median": 3.0}, {"median": 2.0}) == (1.5, None)


def test_the_page_of_faults_follows_the_stored_rows():
    text = faults_page.PAGE.read_text("utf-8").partition(faults_page.MARKER)[2]
    expected = f"{faults_page.restarts()}\n{faults_page.page(faults_page.stored())}"
    assert text.strip("\n") == expected.strip("\n")

"""The pages on benchmarks say what was measured, and against the right limits."""

import ast
import itertools
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.any_model import table as any_model
from benchmarks.common import take_turns
from benchmarks.data_parallel import table as data_parallel
from benchmarks.data_parallel.limits import CAP_BYTES, Trace, bound_s, roofline_s
from benchmarks.hugging_face import table as hugging_face
from benchmarks.pipeline import table as pipeline
from benchmarks.tensor_parallel import table as tensor_parallel
from benchmarks.turns import ratio, rounds_s, spread_ms

SUMMARIES = sorted((Path(__file__).parents[2] / "docs").glob("*_benchmarks.md"))
SCRIPTS = sorted(Path(data_parallel.__file__).parents[1].glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_imports_is_there(script, monkeypatch):
    """Beside it, as it is run by its path, or in the project."""
    monkeypatch.syspath_prepend(script.parent)
    parts = ast.walk(ast.parse(script.read_text(encoding="utf-8")))
    modules = [node.module for node in parts if isinstance(node, ast.ImportFrom)]
    ours = {m for m in modules if m and m.split(".")[0] not in ("torch", "submitit")}
    assert [m for m in sorted(ours) if find_spec(m) is None] == []


@pytest.mark.parametrize(
    "table",
    [any_model, data_parallel, hugging_face, pipeline, tensor_parallel],
    ids=lambda table: table.PAGES.name,
)
def test_the_tables_follow_the_results(table):
    pages = table.PAGES
    written = pages.texts(json.loads(pages.results.read_text(encoding="utf-8")))
    assert len(written) == 2
    for path, text in written.items():
        assert path.read_text(encoding="utf-8").partition(pages.marker)[2] == "\n" + text


@pytest.mark.parametrize("page", SUMMARIES, ids=lambda page: page.stem)
def test_a_page_on_a_benchmark_is_short_and_has_one_table(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert sum(line.startswith("|---") for line in lines) == 1


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

"""Made to measure: never longer than a stock order that fits, shorter where costs are unequal."""

import itertools
import os
import random
import subprocess
import sys
import time

import pytest

from tests.tells import facts_pattern
from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import ActionKind, Program, Schedule, flatten
from torchdistpackage.schedule.autoschedule import synthesize
from torchdistpackage.schedule.costs import StageCosts, costs_text, read_costs
from torchdistpackage.schedule.engine import TaskGraph, simulate
from torchdistpackage.schedule.generators import GENERATORS, build
from torchdistpackage.schedule.list_scheduling import (
    Rules,
    deepest_first,
    list_order,
    merge_backward,
)
from torchdistpackage.schedule.order_search import local_search
from torchdistpackage.schedule.orders import looped
from torchdistpackage.schedule.passes import check
from torchdistpackage.schedule.trace_costs import costs_of

STOCK = [name for name in GENERATORS if name != "forward"]
DEAR_INPUT = {"input": 1.4, "weight": 0.6}


def random_costs(draw: random.Random, num_stages: int) -> StageCosts:
    forward = [draw.uniform(0.5, 2) for _ in range(num_stages)]
    share, over, back = draw.uniform(0.3, 0.7), draw.uniform(1, 1.3), draw.uniform(1.5, 2.5)
    return StageCosts(
        tuple(forward),
        tuple(back * f for f in forward),
        tuple(back * over * share * f for f in forward),
        tuple(back * over * (1 - share) * f for f in forward),
        (draw.choice([0.0, 0.1, 1.0]),) * num_stages,
    )


def best_stock(p: int, m: int, chunks: int, costs: StageCosts, cap: float | None) -> float:
    lengths = [float("inf")]
    for name in STOCK:
        timeline = simulate(build(name, p, m, chunks), costs)
        if cap is None or max(timeline.peak_live_of_rank) <= cap:
            lengths.append(timeline.total)
    return min(lengths)


def has(schedule: Schedule, kind: ActionKind) -> bool:
    return any(a.kind is kind for program in schedule.programs for a in flatten(program))


def keeps_its_promise(seed: int) -> None:
    draw = random.Random(seed)
    p, m, chunks = draw.randint(1, 4), draw.randint(1, 9), draw.choice([1, 1, 2, 2, 3])
    costs = random_costs(draw, p * chunks)
    cap = draw.choice([None, chunks, p * chunks, (chunks + 1) * p, 2 * p * chunks])
    made = synthesize(p, m, costs, chunks=chunks, memory_cap=cap)
    check(made)
    timeline = simulate(made, costs)
    assert timeline.total <= best_stock(p, m, chunks, costs, cap) + 1e-9
    assert cap is None or max(timeline.peak_live_of_rank) <= cap


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(12))
def test_never_longer_than_stock_legal_and_within_the_cap(seed: int):
    keeps_its_promise(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12, 400))
def test_that_over_many_more_costs(seed: int):
    keeps_its_promise(seed)


@pytest.mark.few(1)
@pytest.mark.parametrize(("p", "m"), [(4, 8), pytest.param(4, 16, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["interleaved-zb", "zb-v", "dualpipe-v"])
def test_dear_input_gradients_lose_less_than_in_stock_orders(name: str, p: int, m: int):
    costs = StageCosts.uniform(2 * p, **DEAR_INPUT)
    stock = build(name, p, m)
    stock_time = simulate(stock, costs)
    ideal = (p - 1) / (6 * m + p - 1)
    assert 0.017 < stock_time.bubble - ideal < 0.056
    as_much = max(stock_time.peak_live_of_rank)
    same = synthesize(p, m, costs, chunks=2, placement=stock.placement, memory_cap=as_much)
    assert simulate(same, costs).bubble < stock_time.bubble - 0.003
    free = synthesize(p, m, costs, chunks=2, placement=stock.placement)
    assert simulate(free, costs).bubble == pytest.approx(ideal, abs=0.008)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "costs",
    [
        StageCosts((1, 1.1, 0.9, 1), (2, 2.3, 1.9, 2), (1, 1.4, 0.9, 1), (1,) * 4, (0.0,) * 4),
        StageCosts((1, 1.2, 0.9, 1.1), (2, 2.2, 2, 2), (1, 1.2, 1, 1.2), (1.1,) * 4, (0.2,) * 4),
        StageCosts.uniform(4, message=1.0),
    ],
    ids=["unequal-stages", "dear-splits-too", "dear-messages"],
)
def test_unequal_costs_gain_over_every_stock_order_of_as_much_memory(costs: StageCosts):
    cap = 6
    made = synthesize(4, 8, costs, memory_cap=cap)
    assert simulate(made, costs).total < best_stock(4, 8, 1, costs, cap)


def test_backwards_are_split_where_that_pays_and_only_there():
    free, dear = StageCosts.uniform(2), StageCosts.uniform(2, backward=1.0)
    assert has(synthesize(2, 16, free), ActionKind.W)
    assert not has(synthesize(2, 16, dear), ActionKind.W)


def test_a_cap_in_bytes_counts_each_stage_by_its_own():
    costs, stage_bytes = StageCosts.uniform(4, **DEAR_INPUT), (100.0, 10.0, 10.0, 30.0)
    made = synthesize(
        2, 8, costs, chunks=2, placement=(0, 1, 1, 0), memory_cap=(260.0, 40.0),
        stage_bytes=stage_bytes,
    )  # fmt: skip
    for program, cap in zip(made.programs, (260.0, 40.0), strict=True):
        now = 0.0
        for stage, kind, _ in flatten(program):
            now += {ActionKind.F: 1, ActionKind.B: -1, ActionKind.W: -1}.get(kind, 0) * stage_bytes[
                stage
            ]
            assert now <= cap


def test_bytes_that_do_not_sum_up_exactly_hold_up_nobody():
    assert 0.1 + 0.1 + 0.1 > 0.3
    costs = StageCosts.uniform(6)
    check(synthesize(2, 3, costs, chunks=3, memory_cap=0.3, stage_bytes=(0.1,) * 6))


def test_without_a_cap_memory_does_not_grow_with_the_microbatches():
    costs = StageCosts.uniform(4, **DEAR_INPUT)
    for m in (8, 16):
        held = simulate(synthesize(2, m, costs, chunks=2), costs).peak_live_of_rank
        assert max(held) <= 8


def test_a_run_is_solved_anew_from_its_own_timings(tmp_path):
    true = StageCosts((1, 1.1, 0.9, 1), (2, 2.3, 1.9, 2), (1, 1.4, 0.9, 1), (1,) * 4, (0.0,) * 4)
    run = build("zb-h2", 4, 12)
    measured = costs_of(simulate(run, true).spans, 4)
    (tmp_path / "costs.yaml").write_text(costs_text(measured, {}))
    again = synthesize(4, 12, read_costs(tmp_path / "costs.yaml").of(4))
    assert simulate(again, true).total < simulate(run, true).total


@pytest.mark.full
def test_the_same_on_every_rank():
    code = (
        "from torchdistpackage.schedule.autoschedule import synthesize\n"
        "from torchdistpackage.schedule.costs import StageCosts\n"
        "costs = StageCosts.uniform(6, input=1.3, weight=0.8, backward=2, message=0.1)\n"
        "print(synthesize(3, 7, costs, chunks=2))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    (text,) = texts
    assert text.startswith("auto")


def test_a_stock_order_that_cannot_be_beaten_keeps_its_name():
    made = synthesize(4, 8, StageCosts.uniform(4), memory_cap=4)
    assert made.name == "auto:zb-h1"
    assert simulate(made).total == simulate(build("zb-h1", 4, 8)).total


def test_what_cannot_be_made_is_refused_with_what_to_change():
    costs = StageCosts.uniform(4)
    with pytest.raises(ScheduleError, match=r"rank 0 may hold 1, but .* takes 2; allow at least"):
        synthesize(2, 4, costs, chunks=2, memory_cap=1)
    with pytest.raises(ScheduleError, match="costs of 4 stages cannot time a schedule of 2"):
        synthesize(2, 4, costs)
    with pytest.raises(ScheduleError, match="must name a rank of 0 to 1 for each of 4 stages"):
        synthesize(2, 4, costs, chunks=2, placement=(0, 0, 0, 0))
    with pytest.raises(ScheduleError, match=facts_pattern("1 ranks", "2 ranks")):
        synthesize(2, 4, costs, chunks=2, memory_cap=[4])
    with pytest.raises(ScheduleError, match=facts_pattern("1 stages", "4 stages")):
        synthesize(2, 4, costs, chunks=2, memory_cap=8, stage_bytes=[1])
    with pytest.raises(ScheduleError, match="0 microbatches"):
        synthesize(2, 0, costs, chunks=2)


@pytest.mark.parametrize(("p", "m", "least"), [(1, 32, 1), (1, 3, 1), (2, 8, 2)])
def test_of_orders_as_short_the_one_that_holds_least_is_taken(p: int, m: int, least: int):
    costs = StageCosts.uniform(p)
    timeline = simulate(synthesize(p, m, costs), costs)
    assert max(timeline.peak_live_of_rank) == least


def test_orders_are_timed_as_the_simulator_does():
    draw = random.Random(3)
    for name in GENERATORS:
        schedule = build(name, 4, 6)
        costs = random_costs(draw, schedule.num_stages)
        work = TaskGraph(schedule.placement, 6, costs)
        order, timeline = work.order(schedule), simulate(schedule, costs)
        assert work.makespan(order) == pytest.approx(timeline.total)
        if schedule.has_backward:
            assert timeline.total >= work.lowest_makespan() - work.tiny
            assert tuple(work.held(order)) == timeline.peak_live_of_rank
        again = work.schedule(schedule.name, order)
        assert work.order(again) == order


def test_ranks_that_wait_for_each_other_never_end():
    work = TaskGraph((0, 1), 1)
    forward, backward = work.number(0, 0, 0), work.number(3, 0, 0)
    assert work.makespan([[backward, forward], [work.number(0, 1, 0)]]) == float("inf")


def most_owed(program: Program) -> int:
    """The most Is whose W is still to come."""
    owed = itertools.accumulate(
        (a.kind is ActionKind.I) - (a.kind is ActionKind.W) for a in flatten(program)
    )
    return max(owed)


@pytest.mark.parametrize("placement", [looped(3, 2), (0, 1, 2, 2, 1, 0), (0, 0, 1, 2)])
def test_list_scheduling_stays_within_any_possible_capacity_and_gets_through(
    placement: tuple[int, ...],
):
    work, stages = TaskGraph(placement, 5), len(placement)
    for extra in range(4):
        capacity = tuple(len(mine) + extra for mine in work.stages)
        for split in (0, 2, 5):
            rules = Rules(
                deepest_first(stages), capacity, (5,) * stages, ((split, 0),) * stages, (2,) * 3
            )
            order = list_order(work, rules)
            assert work.makespan(order) < float("inf")
            assert max(map(most_owed, work.schedule("made", order).programs)) <= 2 + 1
            assert all(h <= c for h, c in zip(work.held(order), capacity, strict=True))


def test_rejoining_makes_no_order_longer_and_improving_makes_it_shorter():
    costs = StageCosts.uniform(4, **DEAR_INPUT)
    work = TaskGraph(looped(4, 1), 8, costs)
    order = work.order(build("1f1b", 4, 8))
    split = [
        [
            x
            for n in row
            for x in ((n - 2 * work.size, n - work.size) if n >= 3 * work.size else (n,))
        ]
        for row in order
    ]
    assert work.makespan(merge_backward(work, split)) <= work.makespan(split) < work.makespan(order)
    assert any(n >= 3 * work.size for row in merge_backward(work, split) for n in row)
    shorter = local_search(work, order, lambda changed: True, 500)
    assert work.makespan(shorter) < work.makespan(order)
    assert local_search(work, order, lambda changed: False, 500) == order


@pytest.mark.full
@pytest.mark.parametrize("chunks", [1, 2])
def test_sixteen_ranks_and_sixty_four_microbatches_take_less_than_two_seconds(chunks: int):
    costs = random_costs(random.Random(1), 16 * chunks)

    def seconds() -> float:
        start = time.process_time()
        synthesize(16, 64, costs, chunks=chunks, placement=looped(16, chunks))
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 2

"""The cut is the best there is, found by trying all of them."""

import itertools
import os
import random
import subprocess
import sys
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tells import facts_pattern
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.partition import cut_search
from torchdistpackage.parallel.pipeline.partition.cost_split import (
    MOST_COMPUTATIONS,
    MemoryLimit,
    refine,
    split_by_cost,
    split_evenly,
)
from torchdistpackage.parallel.pipeline.partition.cut_search import PartitionProblem
from torchdistpackage.parallel.pipeline.partition.layer_costs import (
    PieceCost,
    block_weights,
    split_measured,
    stage_costs,
)
from torchdistpackage.schedule.engine import simulate
from torchdistpackage.schedule.generators import build


def every_cut(num_pieces, num_stages):
    for inner in itertools.combinations(range(1, num_pieces), num_stages - 1):
        edges = (0, *inner, num_pieces)
        yield [range(a, b) for a, b in itertools.pairwise(edges)]


def by_rank(values, ranges, placement):
    """Largest sum of `values(stage, pieces)` over the stages of one rank."""
    sums = defaultdict(int)
    for stage, (pieces, rank) in enumerate(zip(ranges, placement, strict=True)):
        sums[rank] += values(stage, pieces)
    return max(sums.values())


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 6))
def test_no_other_cut_has_a_smaller_largest_stage(costs, num_stages):
    ranges = split_by_cost(costs, num_stages)
    assert len(ranges) == num_stages
    assert [i for r in ranges for i in r] == list(range(len(costs)))
    used = min(num_stages, len(costs))
    assert all(len(r) > 0 for r in ranges[:used])
    largest = lambda cut: max(sum(costs[i] for i in r) for r in cut)  # noqa: E731
    assert not used or largest(ranges) == min(map(largest, every_cut(len(costs), used)))


@st.composite
def chunked(draw):
    """Costs of at least as many pieces as there are stages, and a loop or a zigzag over ranks."""
    p, v = draw(st.sampled_from([(1, 3), (2, 2), (2, 3), (3, 2)]))
    loop = list(range(p)) * v
    zigzag = [s % p if s // p % 2 == 0 else p - 1 - s % p for s in range(p * v)]
    costs = draw(st.lists(st.integers(0, 9), min_size=p * v, max_size=9))
    return costs, draw(st.sampled_from([loop, zigzag]))


@given(chunked())
def test_no_other_cut_has_a_less_busy_rank_where_ranks_run_several_stages(case):
    costs, placement = case
    ranges = split_by_cost(costs, len(placement), placement=placement)
    assert [i for r in ranges for i in r] == list(range(len(costs)))
    spent = lambda stage, pieces: sum(costs[i] for i in pieces)  # noqa: E731
    found = (by_rank(spent, cut, placement) for cut in every_cut(len(costs), len(placement)))
    assert by_rank(spent, ranges, placement) == min(found)


@given(chunked(), st.data())
def test_what_goes_across_a_cut_counts_on_both_of_its_ranks(case, data):
    costs, placement = case
    numbers = st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs))
    crossing = data.draw(numbers)

    def spent(stage, pieces):
        ends = [(stage - 1, pieces[0])] if stage else []
        ends += [(stage, pieces[-1] + 1)] if pieces[-1] + 1 < len(costs) else []
        over = sum(crossing[at] for s, at in ends if placement[s] != placement[s + 1])
        return sum(costs[i] for i in pieces) + over

    ranges = split_by_cost(costs, len(placement), placement=placement, crossing=crossing)
    found = (by_rank(spent, cut, placement) for cut in every_cut(len(costs), len(placement)))
    assert by_rank(spent, ranges, placement) == min(found)


def test_a_cut_moves_to_where_less_goes_across_as_far_as_that_saves_time():
    pieces = [PieceCost(1.0, 1.0, 1.0, output_bytes=10 if i == 3 else 2) for i in range(8)]
    cut = lambda bytes_per_s: split_measured(pieces, range(2), bytes_per_s=bytes_per_s)  # noqa: E731
    assert [r.start for r in cut(10.0)] == [0, 4]
    assert [r.start for r in cut(3.0)] in ([0, 3], [0, 5])
    slow = stage_costs(pieces, cut(10.0), message_s=0.5, bytes_per_s=10.0)
    assert slow.message[0] == 0.5 + 10 / 10


@pytest.mark.parametrize("m", [2, 4, 16])
def test_a_busy_stage_ahead_costs_less_than_one_behind(m):
    pieces = [PieceCost(s, 2 * s) for s in (4.0, 1.5, 3.8)]
    schedule = build("1f1b", 2, m)
    assert split_measured(pieces, range(2)) == (range(1), range(1, 3))
    ahead = split_measured(pieces, range(2), schedule=schedule) == (range(2), range(2, 3))
    assert ahead == (m < 8)
    lengths = [
        simulate(schedule, stage_costs(pieces, cut)).total for cut in every_cut(len(pieces), 2)
    ]
    assert lengths == pytest.approx([3 * (4 + 5.3 * m), 3 * ((m - 1) * 5.5 + 2 * 3.8)])


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=4, max_size=8),
    st.sampled_from([("1f1b", 2, 4), ("1f1b", 3, 4), ("zb-h1", 4, 8), ("interleaved", 2, 4)]),
    st.integers(0, 60),
)
def test_a_cut_for_a_schedule_has_no_longer_step_and_keeps_to_the_cap(numbers, of, cap):
    pieces = [PieceCost(a, 2 * a, a, b, b, output_bytes=b) for a, b in numbers]
    schedule = build(*of)
    placement, options = schedule.placement, {"bytes_per_s": 2.0, "cap_bytes": 50 + 10 * cap}
    options["live"] = simulate(schedule).peak_live
    step = lambda cut: simulate(schedule, stage_costs(pieces, cut, bytes_per_s=2.0)).total  # noqa: E731
    try:
        before = split_measured(pieces, placement, **options)
    except ScheduleError:
        return
    cut = split_measured(pieces, placement, schedule=schedule, **options)
    assert [i for r in cut for i in r] == [*range(len(pieces))]
    assert step(cut) <= step(before)
    held = lambda s, r: sum((4.0 + options["live"][s]) * pieces[i].parameter_bytes for i in r)  # noqa: E731
    assert by_rank(held, cut, placement) <= options["cap_bytes"]
    one_more = [(i, by) for i in range(1, len(cut)) for by in (-1, 1)]
    for i, by in one_more:  # and no edge alone could go on
        edges = [r.start + by * (s == i) for s, r in enumerate(cut)] + [len(pieces)]
        other = [range(a, b) for a, b in itertools.pairwise(edges)]
        if all(other) and by_rank(held, other, placement) <= options["cap_bytes"]:
            assert step(other) >= step(cut) * (1 - 1e-6)


def test_without_numbers_as_many_microbatches_are_held_as_the_schedule_holds():
    pieces = [PieceCost(1.0, 2.0, 1.0, activation_bytes=10) for _ in range(4)]
    gpipe, half = build("gpipe", 2, 8), (range(2), range(2, 4))
    cut = lambda cap, schedule: split_measured(  # noqa: E731
        pieces, range(2), cap_bytes=cap, schedule=schedule
    )
    assert cut(40, build("1f1b", 2, 8)) == cut(40, None) == cut(160, gpipe) == half
    with pytest.raises(ScheduleError, match="holds at most 159 bytes"):
        cut(159, gpipe)


def test_a_schedule_of_another_placement_is_refused():
    with pytest.raises(ScheduleError, match=r"1f1b runs its stages on \(0, 1\), the cut is for"):
        split_measured([PieceCost(1.0, 1.0)] * 4, [0, 1, 0, 1], schedule=build("1f1b", 2, 4))


def test_of_cuts_with_equally_busy_ranks_the_one_with_the_smallest_stage_is_taken():
    ranges = split_by_cost([1] * 8, 4, placement=[0, 1, 0, 1])
    assert [len(r) for r in ranges] == [2, 2, 2, 2]
    ranges = split_by_cost([0, *[1] * 12, 4], 4, placement=[0, 1, 1, 0])
    sizes = [sum([0, *[1] * 12, 4][i] for i in r) for r in ranges]
    assert (sizes[0] + sizes[3], max(sizes)) == (8, 4)


@given(chunked(), st.data())
def test_no_rank_holds_more_than_its_cap_and_nothing_faster_would(case, data):
    costs, placement = case
    numbers = st.lists(st.integers(0, 5), min_size=len(costs), max_size=len(costs))
    live = data.draw(st.lists(st.integers(1, 4), min_size=len(placement), max_size=len(placement)))
    memory = MemoryLimit(
        data.draw(st.integers(5, 60)), data.draw(numbers), data.draw(numbers), live
    )
    spent = lambda stage, pieces: sum(costs[i] for i in pieces)  # noqa: E731

    def held(stage, pieces):
        one = sum(memory.live_bytes[i] for i in pieces)
        return sum(memory.held_bytes[i] for i in pieces) + live[stage] * one

    fitting = [
        cut
        for cut in every_cut(len(costs), len(placement))
        if by_rank(held, cut, placement) <= memory.cap_bytes
    ]
    if not fitting:
        with pytest.raises(ScheduleError, match="the one that holds least needs"):
            split_by_cost(costs, len(placement), placement=placement, memory=memory)
        return
    ranges = split_by_cost(costs, len(placement), placement=placement, memory=memory)
    assert by_rank(held, ranges, placement) <= memory.cap_bytes
    best = min(by_rank(spent, cut, placement) for cut in fitting)
    assert by_rank(spent, ranges, placement) == best


def test_a_cut_that_is_slower_so_far_is_followed_where_it_holds_less():
    """On the way to the one that fits, or to the fastest that does."""
    memory = MemoryLimit(4, [2, 2, 0, 0, 3], [0] * 5, [1] * 4)
    ranges = split_by_cost([1, 1, 1, 1, 0], 4, placement=[0, 1, 0, 1], memory=memory)
    assert [len(r) for r in ranges] == [2, 1, 1, 1]
    memory = MemoryLimit(3, [0, 2, 0, 2, 0], [0] * 5, [1] * 4)
    ranges = split_by_cost([1, 0, 0, 3, 4], 4, placement=[0, 1, 1, 0], memory=memory)
    assert [len(r) for r in ranges] == [2, 1, 1, 1]


def test_among_equal_cuts_the_more_even_one_is_taken():
    assert split_by_cost([5, 1, 1, 1, 1], 3) == (range(1), range(1, 3), range(3, 5))
    assert sorted(len(r) for r in split_by_cost([1] * 7, 4)) == [1, 2, 2, 2]


@given(st.integers(0, 30), st.integers(1, 9))
def test_even_lengths_differ_by_at_most_one(num_pieces, num_stages):
    ranges = split_evenly(num_pieces, num_stages)
    assert [i for r in ranges for i in r] == list(range(num_pieces))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@pytest.mark.parametrize(
    ("num_pieces", "p", "v"),
    [
        (126, 16, 4),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((126, 8, 2), (254, 8, 2))),
        pytest.param(254, 16, 4, marks=pytest.mark.full),
    ],
)
def test_a_large_chain_is_cut_in_a_bounded_number_of_tries(p, v, num_pieces):
    """126 blocks, whole or in halves, between an embedding and a head."""
    costs = [0.1, *(1.0 + i % 2 for i in range(num_pieces - 2)), 2.5]
    total, placement, asked = [0.0, *itertools.accumulate(costs)], [*range(p)] * v, 0

    def time(stage: int, first: int, end: int) -> float:
        nonlocal asked
        asked += 1
        return total[end] - total[first]

    cut = PartitionProblem(num_pieces, placement, time, time).best()
    assert asked < 800_000, "the whole search asks 1.4 million times for the smallest of these"
    edges = [0, *cut.ends()[1:]]
    ranges = [range(a, b) for a, b in itertools.pairwise(edges)]
    spent = lambda stage, pieces: sum(costs[i] for i in pieces)  # noqa: E731
    busiest = by_rank(spent, ranges, placement)
    assert busiest == pytest.approx(cut.rank) and all(ranges) and edges[-1] == num_pieces
    assert busiest <= sum(costs) / p + max(costs) / 2


@pytest.mark.few(1)
@pytest.mark.parametrize("zigzag", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_walk_finds_as_good_a_cut_as_a_whole_search(monkeypatch, zigzag):
    """Of random chains, on average; and what goes across a cut counts there too."""
    draw, found = random.Random(3), {0: 0.0, cut_search.MOST_TRIED: 0.0}
    p, v = 3, 2
    placement = [*range(p), *reversed(range(p))] if zigzag else [*range(p)] * v
    for _ in range(4):
        costs = [draw.uniform(0.5, 1.5) for _ in range(24)]
        crossing = [draw.uniform(0, 0.2) for _ in costs]
        for most in found:
            monkeypatch.setattr(cut_search, "MOST_TRIED", most)
            cut = split_by_cost(costs, p * v, placement=placement, crossing=crossing)
            cost = dict.fromkeys(range(p), 0.0)
            for stage, pieces in enumerate(cut):
                cost[placement[stage]] += sum(costs[i] for i in pieces)
            for stage, pieces in enumerate(cut[1:]):
                if placement[stage] != placement[stage + 1]:
                    for rank in placement[stage : stage + 2]:
                        cost[rank] += crossing[pieces.start]
            found[most] += max(cost.values())
    assert found[0] <= found[cut_search.MOST_TRIED] * 1.002


CUTS = """
from random import Random
from torchdistpackage.parallel.pipeline.partition import cut_search
from torchdistpackage.parallel.pipeline.partition.cost_split import MemoryLimit, split_by_cost
draw, placement = Random(1).random, [0, 1, 2, 2, 1, 0]
costs, crossing = [draw() for _ in range(24)], [draw() / 5 for _ in range(24)]
memory = MemoryLimit(9.0, costs[::-1], crossing, [6, 5, 4, 3, 2, 1])
found = [split_by_cost(costs, 6, placement=placement, crossing=crossing)]
found += [split_by_cost(costs, 6, placement=placement, memory=memory)]
cut_search.MOST_TRIED, cut_search.MOVES = 0, 5000
found += [split_by_cost(costs, 6, placement=placement, crossing=crossing)]
print([[len(stage) for stage in cut] for cut in found])
"""


def test_ranks_of_different_hashes_find_the_same_cuts():
    """By search, under a cap, and by walks."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", CUTS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    one, other = (process.communicate()[0] for process in started)
    assert one == other and one.count("[") == 4


def test_nonsense_is_refused():
    with pytest.raises(ScheduleError, match="into 0 stages"):
        split_by_cost([1.0], 0)
    with pytest.raises(ScheduleError, match="lowest: -1"):
        split_by_cost([1.0, -1.0], 1)
    with pytest.raises(ScheduleError, match="lowest: -2"):
        split_by_cost([1.0] * 2, 2, crossing=[0.0, -2.0])
    with pytest.raises(ScheduleError, match=facts_pattern("1 numbers", "2 pieces")):
        split_by_cost([1.0] * 2, 2, crossing=[0.0])
    with pytest.raises(ScheduleError, match=r"\[0, 1\] has 2 stages, but the cut has 3"):
        split_by_cost([1.0] * 4, 3, placement=[0, 1])


def test_a_stage_with_many_live_microbatches_gets_less_where_memory_is_short():
    """1F1B's first stage keeps most: it pays for balance with memory, until there is none."""
    pieces = [PieceCost(1.0, 2.0, 1.0, parameter_bytes=1, activation_bytes=10)] * 8
    assert [len(r) for r in split_measured(pieces, range(2))] == [4, 4]
    # 4 pieces: 4 x 4 + 2 x 40 = 96 bytes on the first stage, 3 pieces 72; 5 on the last 70
    tight = split_measured(pieces, range(2), cap_bytes=80)
    assert [len(r) for r in tight] == [3, 5]
    with pytest.raises(ScheduleError, match=r"holds at most 70 bytes a rank; .* needs 72"):
        split_measured(pieces, range(2), cap_bytes=70)


def test_costs_of_stages_are_the_sums_of_their_pieces():
    pieces = [PieceCost(1.0, 2.0, 0.5), PieceCost(2.0, 5.0, 2.0), PieceCost(3.0, 5.0, 6.0)]
    costs = stage_costs(pieces, (range(1), range(1, 3)), message_s=0.25)
    assert (costs.forward, costs.backward) == ((1.0, 5.0), (2.0, 10.0))
    assert costs.input == (0.0, 8.0)  # nobody wants the gradient of the first stage's input
    assert costs.weight == (2.0, 2.0)
    assert costs.message == (0.25, 0.25)
    # a part that was measured as longer than the whole leaves nothing for the other
    assert stage_costs(pieces, (range(2), range(2, 3))).weight == (7.0, 0.0)


def test_embedding_and_head_count_as_they_are_told():
    assert block_weights(4, first=0.0, last=3.0) == [0.0, 1.0, 1.0, 3.0]
    assert block_weights(1, first=3.0, last=2.0) == [3.0]
    assert [len(r) for r in split_by_cost(block_weights(8, 0.0, 3.0), 2)] == [5, 3]


def test_a_large_schedule_is_simulated_a_bounded_number_of_times():
    schedule, lengths = build("interleaved", 16, 32, 4), random.Random(1)
    costs = [lengths.uniform(0.5, 2) for _ in range(254)]
    computations = []

    def step(cut):
        computations.append(2 * schedule.num_stages * schedule.num_microbatches)
        return max(sum(costs[i] for i in stage) for stage in cut)

    cut = split_evenly(254, schedule.num_stages)
    found = refine(cut, schedule, step)
    assert sum(computations) <= MOST_COMPUTATIONS
    assert step(found) <= step(cut)

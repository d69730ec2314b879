"""Who talks when: nobody twice in a round, everybody in the end. No torch."""

import itertools

import pytest

from torchdistpackage.harness.bench.request import (
    NETWORK,
    NODE,
    all_at_once,
    link_of,
    one_by_one,
    tournament,
    units_of,
)
from torchdistpackage.topology.mesh import Mesh


@pytest.mark.parametrize("num_ranks", range(2, 20))
def test_in_a_tournament_all_pairs_meet_once_in_rounds_that_are_full(num_ranks):
    rounds = tournament(num_ranks)
    assert len(rounds) == num_ranks - 1 + num_ranks % 2
    for pairs in rounds:
        assert len(pairs) == num_ranks // 2
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)
    met = sorted(pair for pairs in rounds for pair in pairs)
    assert met == list(itertools.combinations(range(num_ranks), 2))


def test_units_are_whole_groups_or_neighbours_in_them():
    groups = [(0, 2, 4), (1, 3, 5), (6,)]
    assert units_of(groups, False) == [(0, 2, 4), (1, 3, 5)]
    assert units_of(groups, True) == [(0, 2), (2, 4), (1, 3), (3, 5)]


@pytest.mark.parametrize("is_message", [False, True])
def test_all_at_once_is_every_unit_and_no_rank_twice(is_message):
    mesh = Mesh((("data", 2), ("pipe", 5), ("tensor", 2)))
    for axis in mesh.names:
        units = units_of(mesh.groups((axis,)), is_message)
        rounds = all_at_once(units)
        assert sorted(unit for part in rounds for unit in part) == sorted(units)
        for part in rounds:
            ranks = [rank for unit in part for rank in unit]
            assert len(set(ranks)) == len(ranks)
        assert len(rounds) == (2 if is_message and axis == "pipe" else 1)


def test_one_by_one_takes_some_of_each_link_from_all_over():
    hosts = [f"n{rank // 4}" for rank in range(16)]
    units = [(i, i + 1) for i in range(15)]
    rounds = one_by_one(units, hosts, 2)
    assert all(len(part) == 1 for part in rounds)
    links = [link_of(unit, hosts) for (unit,) in rounds]
    assert links == [NODE, NODE, NETWORK, NETWORK]
    assert rounds[0] == ((0, 1),) and rounds[1][0][0] >= 6
    assert one_by_one(units, hosts, 0) == []
    assert len(one_by_one(units, hosts, 99)) == 15

"""Made-up clusters, in which it is known who is ill: the host is named, or the link, or nobody.

No torch.
"""

import itertools
import random

import pytest

from torchdistpackage.harness.bench.report import find_suspects

FINE_S, WITHIN_S = 1e-3, 1e-4


def cluster(num_hosts, per_host=2, hosts=(), links=(), factor=5.0, jitter=0.3):
    """Times of all pairs; `hosts` are slow in all they send, `links` are pairs of hosts."""
    draw = random.Random(num_hosts * 100 + per_host)
    names = [f"n{rank // per_host}" for rank in range(num_hosts * per_host)]
    times = {}
    for a, b in itertools.combinations(range(len(names)), 2):
        ends = {names[a], names[b]}
        time_s = WITHIN_S if len(ends) == 1 else FINE_S
        slow = (len(ends) == 2 and ends & {*hosts}) or any(ends == {*link} for link in links)
        times[a, b] = time_s * (factor if slow else 1) * draw.uniform(1, 1 + jitter)
    return times, names


@pytest.mark.parametrize("per_host", [1, 2, 8])
@pytest.mark.parametrize("num_hosts", [1, 2, 3, 4, 8])
def test_in_a_healthy_cluster_nobody_is_named(num_hosts, per_host):
    if num_hosts * per_host > 1:
        found = find_suspects(*cluster(num_hosts, per_host))
        assert (found.hosts, found.links, found.exclude) == ((), (), "")


@pytest.mark.parametrize("per_host", [1, 4])
@pytest.mark.parametrize(
    ("num_hosts", "ill"), [(3, ["n2"]), (4, ["n0"]), (5, ["n1", "n3"]), (8, ["n5", "n6", "n7"])]
)
def test_a_host_whose_links_are_all_slow_is_to_be_excluded(num_hosts, per_host, ill):
    found = find_suspects(*cluster(num_hosts, per_host, hosts=ill))
    assert found.exclude == f"--exclude={','.join(ill)}" and found.links == ()


@pytest.mark.parametrize("num_hosts", [3, 4, 8])
def test_one_bad_link_is_named_and_no_host(num_hosts):
    found = find_suspects(*cluster(num_hosts, links=[("n0", "n2")]))
    assert found.hosts == () and found.exclude == ""
    ((link, slower),) = found.links
    assert link == ("n0", "n2") and 3.5 < slower < 6.6


def test_a_bad_link_between_others_is_named_beside_a_bad_host():
    found = find_suspects(*cluster(6, hosts=["n5"], links=[("n0", "n1")]))
    assert found.hosts == ("n5",)
    assert [link for link, _ in found.links] == [("n0", "n1")]


def test_of_two_hosts_nobody_knows_whose_the_only_link_is():
    found = find_suspects(*cluster(2, hosts=["n1"]))
    assert found.hosts == () == found.links


def test_a_host_that_is_slow_inside_is_excluded():
    times, hosts = cluster(4, 4)
    for a, b in times:
        if hosts[a] == hosts[b] == "n2":
            times[a, b] *= 6
    assert find_suspects(times, hosts).exclude == "--exclude=n2"


def test_of_the_last_link_that_is_left_no_end_is_to_blame():
    times, hosts = cluster(3, 4, links=[("n0", "n1")])
    for a, b in times:
        if hosts[a] == hosts[b] == "n2":
            times[a, b] *= 6
    found = find_suspects(times, hosts)
    assert found.hosts == ("n2",)
    assert [link for link, _ in found.links] == [("n0", "n1")]


def test_where_most_are_slow_none_is_excluded():
    """Then slow is how this cluster is, and the list would leave nothing to run on."""
    found = find_suspects(*cluster(5, 1, hosts=["n0", "n1", "n2"]))
    assert found.exclude == ""


def names_and(slow, hosts):
    """Times of all pairs of ranks by `slow(host, host, rank, rank)`, and the hosts by rank."""
    pairs = itertools.combinations(range(len(hosts)), 2)
    return {(a, b): slow(hosts[a], hosts[b], a, b) for a, b in pairs}, hosts


@pytest.mark.parametrize("num_hosts", [4, 5, 8])
def test_one_link_that_is_faster_than_all_others_makes_nobody_slow(num_hosts):
    """Two hosts behind one switch."""
    hosts = list("abcdefgh"[:num_hosts])
    found = find_suspects(*names_and(lambda x, y, *_: 1.0 if x + y == "ab" else 2.1, hosts))
    assert (found.hosts, found.links, found.partitions, found.ranks) == ((), (), (), ())


@pytest.mark.parametrize("per_host", [1, 2, 4])
@pytest.mark.parametrize("rack", ["gh", "fgh", "efgh", "ab"])
def test_racks_with_a_slow_way_between_them_are_told_and_no_host_excluded(rack, per_host):
    hosts = [host for host in "abcdefgh" for _ in range(per_host)]
    times, hosts = names_and(lambda x, y, *_: 3.0 if (x in rack) != (y in rack) else 1.0, hosts)
    found = find_suspects(times, hosts)
    assert (found.hosts, found.links, found.ranks) == ((), (), ())
    others = tuple(host for host in "abcdefgh" if host not in rack)
    assert found.partitions == tuple(sorted([others, tuple(rack)]))


def test_a_bad_host_is_told_from_racks():
    def slow(x, y, *_):
        return 7.0 if "c" in (x, y) else 3.0 if (x in "gh") != (y in "gh") else 1.0

    found = find_suspects(*names_and(slow, list("abcdefgh")))
    assert found.exclude == "--exclude=c"
    assert found.partitions == (tuple("abdef"), tuple("gh")) and found.links == ()


@pytest.mark.parametrize("num_hosts", [3, 8])
@pytest.mark.parametrize("per_host", [2, 4, 8])
def test_a_rank_that_is_slow_to_all_other_hosts_is_named_and_its_host_excluded(num_hosts, per_host):
    """One bad network card of several."""
    times, hosts = cluster(num_hosts, per_host)
    ill = per_host + 1
    for pair in times:
        if ill in pair and len({hosts[rank] for rank in pair}) == 2:
            times[pair] *= 6
    found = find_suspects(times, hosts)
    ((rank, slower),) = found.ranks
    assert rank == ill and 4 < slower < 9
    assert (found.exclude, found.links, found.partitions) == ("--exclude=n1", (), ())


def test_bad_ranks_on_half_of_the_hosts_are_named_and_nobody_excluded():
    times, hosts = cluster(2, 4)
    for pair in times:
        if 1 in pair and len({hosts[rank] for rank in pair}) == 2:
            times[pair] *= 6
    found = find_suspects(times, hosts)
    assert [rank for rank, _ in found.ranks] == [1]
    assert found.exclude == ""


@pytest.mark.parametrize("pair", [(0, 1), (3, 14), (8, 9)])
def test_the_slowest_pair_is_named_with_how_slow_it_is(pair):
    times, hosts = cluster(4, 4, jitter=0)
    times[pair] = 1.0
    found = find_suspects(times, hosts)
    assert found.slowest == pair
    assert found.times_slower == pytest.approx(1.0 / FINE_S)

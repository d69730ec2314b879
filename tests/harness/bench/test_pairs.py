"""Made-up clusters, in which it is known who is ill: the host is named, or the link, or nobody."""

import itertools
import random

import pytest

from torchdistpackage.harness.bench.pairs import find_suspects

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


@pytest.mark.parametrize("pair", [(0, 1), (3, 14), (8, 9)])
def test_the_slowest_pair_is_named_with_how_slow_it_is(pair):
    times, hosts = cluster(4, 4, jitter=0)
    times[pair] = 1.0
    found = find_suspects(times, hosts)
    assert found.slowest == pair
    assert found.times_slower == pytest.approx(1.0 / FINE_S)

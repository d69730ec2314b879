"""What stops a host: making a group, its first collective or batch, the first message of a pair."""

import pytest
import torch
import torch.distributed as dist

from tests.tells import tells
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.harness.lint.linter import lint


def test_a_group_that_a_member_does_not_make():
    def step(rank):
        if rank == 0:
            dist.new_group([0, 1], use_local_synchronization=True)

    finding = lint(step, {"pipe": 2}).finding
    assert finding.kind == "group creation" and finding.ranks == (1, 0)
    assert tells(str(finding), "new_group", "rank 1", "pipe 1")


def test_groups_in_two_orders():
    a, b, c = (0, 1), (1, 2), (0, 2)

    def step(rank, orders):
        for ranks in orders[rank]:
            tpc.groups.of(ranks)

    finding = lint(lambda rank: step(rank, [(a, c), (b, a), (c, b)]), 3).finding
    assert finding.kind == "group creation" and set(finding.ranks) == {0, 1, 2}
    lint(lambda rank: step(rank, [(a, c), (a, b), (c, b)]), 3).check()


def first_messages(rank, connected):
    """A chain of three, in which each message is announced over another group."""
    pipe, host = dist.new_group(range(3)), dist.new_group(range(3), backend="threads_host")
    x = torch.ones(4)
    if connected:
        dist.all_reduce(x, group=pipe)
        for there in ((0, 1), (1, 2)):
            if rank in there:
                batch(rank, pipe, there[1 - there.index(rank)])
    for source in range(2):
        if rank == source:
            dist.send(x, source + 1, group=host)
            dist.batch_isend_irecv([dist.P2POp(dist.isend, x, source + 1, pipe)])[0].wait()
        elif rank == source + 1:
            dist.recv(x, source, group=host)
            dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, source, pipe)])[0].wait()


def batch(rank, group, peer):
    x, room = torch.ones(1), torch.ones(1)
    ops = [dist.P2POp(dist.isend, x, peer, group), dist.P2POp(dist.irecv, room, peer, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def test_threads_stop_where_hosts_would():
    report = lint(lambda rank: first_messages(rank, connected=False), {"pipe": 3})
    assert report.finding.kind == "first use" and set(report.finding.ranks) == {1, 2}
    assert tells(str(report), "rank 2", "pipe 2")
    lint(lambda rank: first_messages(rank, connected=True), {"pipe": 3}).check()


def test_a_first_collective_waits_for_all_members_though_nobody_waits_for_it():
    def step(rank, connected):
        group = dist.new_group([0, 1])
        host = dist.new_group([0, 1], backend="threads_host")
        x = torch.ones(3)
        if connected:
            dist.all_reduce(x, group=group)
        if rank:
            dist.recv(x, 0, group=host)
            work = dist.all_reduce(x, group=group, async_op=True)
        else:
            work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
            dist.send(x, 1, group=host)
        work.wait()

    finding = lint(lambda rank: step(rank, connected=False), 2).finding
    assert finding.kind == "first use" and set(finding.ranks) == {0, 1}
    lint(lambda rank: step(rank, connected=True), 2).check()


def test_the_first_message_of_a_pair_waits_for_its_other_end():
    """Begun and not waited for, but the host stops all the same."""

    def step(rank, connected):
        group = dist.new_group([0, 1])
        other = dist.new_group([0, 1], backend="threads_host")
        dist.all_reduce(torch.ones(1), group=group)
        if connected:
            batch(rank, group, 1 - rank)
        x = torch.ones(3)
        if rank:
            work = dist.irecv(x, 0, group=group)
            dist.all_reduce(x, group=other)
        else:
            dist.all_reduce(x, group=other)
            work = dist.isend(x, 1, group=group)
        work.wait()

    finding = lint(lambda rank: step(rank, connected=False), 2).finding
    assert finding.kind == "first use" and set(finding.ranks) == {0, 1}
    assert tells(str(finding), "rank 0", "data 0")
    lint(lambda rank: step(rank, connected=True), 2).check()


def bound(rank, local):
    """Two groups, of which each rank but one makes one; the world is bound to a device."""
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    for ranks in ([0, 1], [2, 3], [0, 1, 2, 3]):
        if rank in ranks or not local:
            dist.new_group(ranks, use_local_synchronization=local)


@pytest.mark.parametrize("local", [False, True])
def test_a_bound_world_is_split_by_all(local):
    """Its members alone are not enough, whatever torch's own option says."""
    report = lint(lambda rank: bound(rank, local), {"data": 2, "tensor": 2})
    assert report.ok  # by luck: the k-th group of all ranks is among one set of them
    report = lint(lambda rank: rank < 2 and bound(rank, local), {"data": 2, "tensor": 2})
    assert report.finding.kind == "group creation" and report.finding.ranks[0] in (2, 3)


def test_members_that_split_at_different_points_get_smaller_groups():
    def step(rank):
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        for ranks in ([0, 1, 2], [2, 3])[:: 1 if rank < 2 else -1]:
            if rank in ranks:
                dist.new_group(ranks, use_local_synchronization=True)

    finding = lint(step, 4).finding
    assert finding.kind == "group creation" and finding.ranks == (0, 2)
    assert tells(str(finding), "ranks (0, 1, 2)", "rank 2", "ranks (2, 3)")
    assert "ranks (0, 1) alone get a communicator" in str(finding)

"""Ranks on one board: what agrees passes, what can get stuck is found and told in words."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist

from tests.tells import tells
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError
from torchdistpackage.harness.lint.linter import drive, lint
from torchdistpackage.harness.lint.report import GroupKind, LintReport
from torchdistpackage.thread_ranks.findings import group_name, rank_name
from torchdistpackage.thread_ranks.matcher import (
    LintGroup,
    Matcher,
    OpSignature,
    P2POp,
    PendingOp,
)
from torchdistpackage.topology.mesh import Topology, topology

GRID = topology([("data", 2), ("tensor", 2)], 4)
Call = Callable[[dist.ProcessGroup | None], dist.Work]
Op = Callable[[list[dist.Work]], object]
"""What a rank does next; the list holds what it has begun."""


def all_reduce(size: int = 3, op: dist.ReduceOp = dist.ReduceOp.SUM) -> Call:
    return lambda group: dist.all_reduce(torch.ones(size), op, group=group, async_op=True)


def barrier(group: dist.ProcessGroup | None) -> dist.Work:
    return dist.barrier(group, async_op=True)


SUM = all_reduce()


def run(*ops_of_ranks: Sequence[Op], topo: Topology | None = None) -> LintReport:
    def step(rank: int) -> None:
        begun: list[dist.Work] = []
        for op in ops_of_ranks[rank]:
            op(begun)

    return lint(step, topo or topology([("data", len(ops_of_ranks))], len(ops_of_ranks)))


def collective(axis: str | None, *calls: Call, blocks: bool = True) -> Op:
    """On the group along an axis, or of all ranks."""

    def op(begun: list[dist.Work]) -> None:
        for call in calls:
            begun.append(call(tpc.get_group(axis) if axis else None))
            if blocks:
                begun.pop().wait()

    return op


def world(*calls: Call, blocks: bool = True) -> Op:
    return collective(None, *calls, blocks=blocks)


def wait_all(begun: list[dist.Work]) -> None:
    for work in begun:
        work.wait()
    begun.clear()


def message(kind: Callable, peer: int, size: int = 4) -> Op:
    def op(begun: list[dist.Work]) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(kind, torch.ones(size), peer)]):
            work.wait()

    return op


def send(peer: int, size: int = 4) -> Op:
    return message(dist.isend, peer, size)


def receive(peer: int, size: int = 4) -> Op:
    return message(dist.irecv, peer, size)


def test_one_order_in_every_group_passes_and_is_counted():
    over = [collective("data", SUM), collective("tensor", SUM, barrier), world(barrier)]
    report = run(over, over, over, over, topo=GRID).check()
    assert {(k.name, k.num_groups, k.num_ranks, k.num_calls) for k in report.kinds} == {
        ("data", 2, 2, 2),
        ("tensor", 2, 2, 4),
        ("global", 1, 4, 1),
    }


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (all_reduce(4), "they differ in shape"),
        (all_reduce(op=dist.ReduceOp.MAX), "they differ in op"),
        (barrier, r"is all_reduce \(shape \[3\].* on rank 0 \(data 0\), but barrier on"),
    ],
)
def test_members_that_differ_in_one_call_are_both_named(other, told):
    report = run([world(barrier, SUM)], [world(barrier, other)])
    assert report.finding.kind == "disagreement" and report.finding.ranks == (0, 1)
    with pytest.raises(CommError, match=told):
        report.check()
    assert tells(str(report), "call 2", "ranks 0, 1")


def test_two_groups_in_different_orders_are_a_circle():
    """Each group sees one order; together they wait for each other."""
    one = [collective("tensor", SUM), collective("data", SUM)]
    other = one[::-1]
    finding = run(one, other, other, one, topo=GRID).finding
    assert finding.kind == "cycle" and len(finding.ranks) >= 2
    assert tells(str(finding), "call 1", "ranks 0, 1")


def test_calls_under_way_on_two_groups_have_one_launch_order():
    """Nobody waits between them, but a device that runs one after another would."""
    one = [collective(axis, SUM, blocks=False) for axis in ("tensor", "data")]
    there, back = [*one, wait_all], [*one[::-1], wait_all]
    finding = run(there, back, back, there, topo=GRID).finding
    assert finding.kind == "launch order" and set(finding.ranks) == {0, 1, 2, 3}
    assert str(finding).count("stack of rank") >= 4
    assert run(there, there, there, there, topo=GRID).ok
    # one rank apart from the others makes no circle
    assert run(there, back, back, back, topo=GRID).ok
    # waited for in between, the orders of each group are all that counts
    apart = [one[0], wait_all, one[1], wait_all]
    assert run(apart, apart, there, there, topo=GRID).ok


def test_a_way_longer_than_pythons_stack_is_told():
    """Each rank waits for a message of the next, the last one for the first."""
    size = 1500
    group = LintGroup(range(size), "data")

    def ring(board: Matcher, rank: int) -> Iterator[PendingOp]:
        entry = PendingOp(rank, group, num_open=1, is_batch=True)
        board.issue(entry)
        board.post(entry, P2POp(OpSignature("receive"), (rank + 1) % size, rank))
        yield entry

    finding = drive(lambda board: [ring(board, r) for r in range(size)], [group], "rank {}".format)
    assert finding.kind == "cycle" and len(finding.ranks) == size


def test_sends_are_not_buffered():
    both = run([send(1), receive(1)], [send(0), receive(0)])
    assert both.finding.kind == "cycle" and set(both.finding.ranks) == {0, 1}
    assert tells(str(both), "4 dtype", "float32", "rank 1", "data 1")

    def exchange(begun: list[dist.Work]) -> None:
        peer = 1 - dist.get_rank()
        pair = [dist.P2POp(kind, torch.ones(4), peer) for kind in (dist.isend, dist.irecv)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    assert run([exchange], [exchange]).ok


def test_a_message_behind_a_collective_of_its_group_waits_for_it():
    """One stream a group, as NCCL has it: the bucket of a tied weight before the last message."""
    begins = world(SUM, blocks=False)
    finding = run([receive(1), begins, wait_all], [begins, send(0), wait_all]).finding
    assert finding.kind == "cycle"
    assert tells(str(finding), "rank 1", "data 1")
    assert tells(str(finding), "rank 1", "data 1", "call 1")


def test_what_a_rank_that_returned_did_not_do_is_missing():
    finding = run([world(SUM)], [world(SUM)], []).finding
    assert finding.kind == "missing" and finding.ranks[0] == 2
    assert tells(str(finding), "rank 2", "data 2")
    for ops in ([send(1)], [world(SUM, blocks=False)]):
        assert run(ops, []).finding.kind == "missing"
    assert run([world(SUM, blocks=False)], [world(SUM)]).ok


def test_both_ends_of_a_message_must_agree():
    finding = run([send(1, 4)], [receive(0, 5)]).finding
    assert finding.kind == "disagreement"
    assert tells(str(finding), "rank 0", "data 0", "elements 4")


def test_groups_are_called_by_their_axes():
    topo = topology([("data", 2), ("pipe", 3), ("tensor", 2)], 12)
    mesh = topo.dense
    assert group_name(topo, tuple(mesh.group(5, ("pipe", "tensor")))) == "pipe+tensor"
    assert group_name(topo, (0, 4)) == "part of pipe"
    assert group_name(topo, range(12)) == "global" and group_name(topo, (3,)) == "alone"
    assert rank_name(topo, 9) == "rank 9 (data 1 pipe 1 tensor 1)"
    one_long = topology([("data", 1), ("pipe", 3), ("tensor", 1)], 3)
    assert group_name(one_long, range(3)) == "pipe"
    experts = topology([("data", 4), ("tensor", 2)], 8, expert=2)
    assert group_name(experts, experts.group(0, "expert")) == "expert"
    assert group_name(experts, experts.group(0, "expert_data")) == "expert_data"
    assert group_name(experts, experts.group(0, "data")) == "data"
    assert group_name(experts, (0, 6)) == "part of data"


def test_a_long_name_moves_the_columns_of_all():
    topo = topology([("data", 2), ("pipe", 4)], 8)
    names = ("part of data+pipe", 1, 4, 1, 0), ("data", 4, 2, 5, 1)
    lines = str(LintReport(topo, None, tuple(GroupKind(*name) for name in names))).splitlines()
    assert lines == [
        "part of data+pipe  1 group of 4   1 collective, 0 messages, orders agree",
        "data               4 groups of 2  5 collectives, 1 message, orders agree",
    ]

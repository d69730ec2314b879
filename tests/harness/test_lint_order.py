"""The board on paper: what agrees passes, what can get stuck is found and told in words."""

import pytest

from torchdistpackage.errors import CommError
from torchdistpackage.harness.lint.matcher import OpSignature
from torchdistpackage.harness.lint.programs import (
    CallProgram,
    Collective,
    Messages,
    ProgramMessage,
    WaitAll,
    check,
)
from torchdistpackage.harness.lint.report import GroupKind, LintReport, group_name, rank_name
from torchdistpackage.topology.views import topology

GRID = topology([("data", 2), ("tensor", 2)], 4)
SUM, BARRIER = OpSignature("all_reduce", (("shape", (3,)), ("op", "sum"))), OpSignature("barrier")
SEND, RECEIVE = OpSignature("send", (("elements", 4),)), OpSignature("receive", (("elements", 4),))


def run(*ops_of_ranks, topo=None):
    """Programs on the groups `data`, `tensor` and `world`."""
    topo = topo or topology([("data", len(ops_of_ranks))], len(ops_of_ranks))
    modes = ("data", "tensor")
    programs = [
        CallProgram(
            tuple(ops),
            {"world": (range(topo.world_size), "")}
            | {m: (topo.dense.group(rank, (m,)), "") for m in modes},
        )
        for rank, ops in enumerate(ops_of_ranks)
    ]
    return check(programs, topo)


def world(*calls, blocks=True, label=""):
    return Collective("world", calls, blocks, label)


def send(peer, **facts):
    return ProgramMessage(OpSignature("send", tuple(facts.items()) or SEND.facts), peer)


def receive(peer, **facts):
    return ProgramMessage(OpSignature("receive", tuple(facts.items()) or RECEIVE.facts), peer)


def test_one_order_in_every_group_passes_and_is_counted():
    over = [Collective("data", (SUM,)), Collective("tensor", (SUM, BARRIER)), world(BARRIER)]
    report = run(over, over, over, over, topo=GRID).check()
    assert {(k.name, k.num_groups, k.num_ranks, k.num_calls) for k in report.kinds} == {
        ("data", 2, 2, 2),
        ("tensor", 2, 2, 4),
        ("global", 1, 4, 1),
    }


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (OpSignature("all_reduce", (("shape", (4,)), ("op", "sum"))), "they differ in shape"),
        (OpSignature("all_reduce", (("shape", (3,)), ("op", "max"))), "they differ in op"),
        (BARRIER, r"is all_reduce \(shape \[3\] op sum\) on rank 0 \(data 0\), but barrier on"),
    ],
)
def test_members_that_differ_in_one_call_are_both_named(other, told):
    """Runs of calls that meet as one are opened, so that the number is that of the call."""
    finding = run([world(BARRIER, SUM, label="5F1")], [world(BARRIER, other, label="5F2")]).finding
    assert finding.kind == "disagreement" and finding.ranks == (0, 1)
    with pytest.raises(CommError, match=told):
        run([world(BARRIER, SUM)], [world(BARRIER, other)]).check()
    assert "call 2 of group data (ranks 0, 1)" in str(finding)
    assert "at 5F1" in str(finding) and "at 5F2" in str(finding)


def test_two_groups_in_different_orders_are_a_circle():
    """Each group sees one order; together they wait for each other."""
    one = [Collective("tensor", (SUM,)), Collective("data", (SUM,))]
    other = one[::-1]
    finding = run(one, other, other, one, topo=GRID).finding
    assert finding.kind == "cycle" and len(finding.ranks) >= 2
    assert "rank 0 (data 0 tensor 0) waits in call 1 of group tensor (ranks 0, 1)" in str(finding)


def test_calls_under_way_on_two_groups_have_one_launch_order():
    """Nobody waits between them, but a device that runs one after another would."""
    one = [Collective(mode, (SUM,), blocks=False) for mode in ("tensor", "data")]
    there, back = [*one, WaitAll()], [*one[::-1], WaitAll()]
    finding = run(there, back, back, there, topo=GRID).finding
    assert finding.kind == "launch order" and set(finding.ranks) == {0, 1, 2, 3}
    assert str(finding).count("stack of rank") >= 4
    assert "has issued call 1 of group tensor (ranks 0, 1), all_reduce" in str(finding) or (
        "waits in call 1 of group tensor (ranks 0, 1), all_reduce" in str(finding)
    )
    assert run(there, there, there, there, topo=GRID).ok
    # one rank apart from the others makes no circle
    assert run(there, back, back, back, topo=GRID).ok
    # waited for in between, the orders of each group are all that counts
    apart = [one[0], WaitAll(), one[1], WaitAll()]
    assert run(apart, apart, there, there, topo=GRID).ok


def test_a_way_longer_than_pythons_stack_is_told():
    """Each rank waits for a message of the next, the last one for the first."""
    size = 1500
    ring = [[Messages("world", (receive((r + 1) % size),))] for r in range(size)]
    finding = run(*ring).finding
    assert finding.kind == "cycle" and len(finding.ranks) == size


def test_sends_are_not_buffered():
    both = run([Messages("world", (send(1),)), Messages("world", (receive(1),))],
               [Messages("world", (send(0),)), Messages("world", (receive(0),))])  # fmt: skip
    assert both.finding.kind == "cycle" and set(both.finding.ranks) == {0, 1}
    assert "waits in send (elements 4) to rank 1 (data 1) on group data" in str(both.finding)
    assert run([Messages("world", (send(1), receive(1)))],
               [Messages("world", (send(0), receive(0)))]).ok  # fmt: skip


def test_a_message_behind_a_collective_of_its_group_waits_for_it():
    """One stream a group, as NCCL has it: the bucket of a tied weight before the last message."""
    early = [world(SUM, blocks=False), Messages("world", (send(0),)), WaitAll()]
    late = [Messages("world", (receive(1),)), world(SUM, blocks=False), WaitAll()]
    finding = run(late, early).finding
    assert finding.kind == "cycle"
    assert "to which rank 1 (data 1) comes after a call that is not done" in str(finding)
    assert "rank 1 (data 1) has issued call 1 of group data" in str(finding)
    apart = [Messages("data", (receive(1),)), *late[1:]], [early[0], Messages("data", (send(0),))]
    programs = [CallProgram(tuple(ops), {"world": ((0, 1), ""), "data": ((0, 1), "own")})
                for ops in apart]  # fmt: skip
    finding = check(programs, topology([("data", 2)], 2)).finding
    assert finding.kind == "launch order", "two groups, but they may share a device"


def test_what_a_rank_that_returned_did_not_do_is_missing():
    finding = run([world(SUM)], [world(SUM)], []).finding
    assert finding.kind == "missing" and finding.ranks[0] == 2
    assert "which rank 2 (data 2) has not entered, and it has returned" in str(finding)
    for ops in ([Messages("world", (send(1),))], [world(SUM, blocks=False)]):
        assert run(ops, []).finding.kind == "missing"
    assert run([world(SUM, blocks=False)], [world(SUM)]).ok


def test_both_ends_of_a_message_must_agree():
    finding = run([Messages("world", (send(1, elements=4),))],
                  [Messages("world", (receive(0, elements=5),))]).finding  # fmt: skip
    assert finding.kind == "disagreement"
    assert "rank 0 (data 0) has posted send (elements 4) to rank 1 (data 1)" in str(finding)


def test_groups_are_called_by_their_axes():
    topo = topology([("data", 2), ("pipe", 3), ("tensor", 2)], 12)
    mesh = topo.dense
    assert group_name(topo, tuple(mesh.group(5, ("pipe", "tensor")))) == "pipe+tensor"
    assert group_name(topo, (0, 4)) == "part of pipe"
    assert group_name(topo, range(12)) == "global" and group_name(topo, (3,)) == "alone"
    assert rank_name(topo, 9) == "rank 9 (data 1 pipe 1 tensor 1)"
    one_long = topology([("data", 1), ("pipe", 3), ("tensor", 1)], 3)
    assert group_name(one_long, range(3)) == "pipe"


def test_a_long_name_moves_the_columns_of_all():
    topo = topology([("data", 2), ("pipe", 4)], 8)
    names = ("part of data+pipe", 1, 4, 1, 0), ("data", 4, 2, 5, 1)
    lines = str(LintReport(topo, None, tuple(GroupKind(*name) for name in names))).splitlines()
    assert lines == [
        "part of data+pipe  1 group of 4   1 collective, 0 messages, orders agree",
        "data               4 groups of 2  5 collectives, 1 message, orders agree",
    ]

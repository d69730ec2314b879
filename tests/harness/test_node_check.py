"""The check of nodes before the first step: on ranks that stand for nodes, one of which is slow,
computes or copies wrong, or has a slow link; and its judgement of measured times.
"""

import time

import pytest
import torch
import torch.distributed as dist

from torchdistpackage.harness import measure
from torchdistpackage.harness.gpu_facts import GpuFacts
from torchdistpackage.harness.node_check import NodeCheck, check_nodes, rounds_of
from torchdistpackage.harness.node_verdict import RankSpeed, bad_nodes

SECONDS = 0.8
HOST = torch.device("cpu")
PROBLEM = "the node check failed on rank {0} on n{0}, which "


def checked(fault: str, hosts: list[str], seconds: float = SECONDS) -> NodeCheck:
    """The check where rank 1 has a fault, or a pair of ranks a slow link."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        multiply, copy, call = torch.mm, torch.Tensor.copy_, measure.tdp_call
        if rank == 1 and fault == "slow matmul":

            def slow(*args, **kwargs):
                time.sleep(0.01)
                return multiply(*args, **kwargs)

            patch.setattr(torch, "mm", slow)
        if rank == 1 and fault == "wrong matmul":

            def wrong(*args, out):
                multiply(*args, out=out)
                out[7, 9] += 1
                return out

            patch.setattr(torch, "mm", wrong)
        if rank == 1 and fault in ("slow copy", "wrong copy"):

            def altered(target, source, *args, **kwargs):
                found = copy(target, source, *args, **kwargs)
                if target.numel() >= 2**16:
                    time.sleep(0.005 if fault == "slow copy" else 0)
                    target[5] += fault == "wrong copy"
                return found

            patch.setattr(torch.Tensor, "copy_", altered)

        def late(operation, x, member):
            found = call(operation, x, member)
            if not (1 in member.ranks if fault == "slow links" else member.ranks == (0, 1)):
                return found

            def go():
                time.sleep(0.1)
                return found()

            return go

        if fault in ("slow links", "slow link"):
            patch.setattr(measure, "tdp_call", late)
        facts = (lambda: GpuFacts(findings=("GPU 0: hot",))) if fault == "slow matmul" else None
        return check_nodes(hosts[rank], HOST, seconds, facts)


FAULTS = {
    "slow matmul": "is slow: a matmul takes ",
    "wrong matmul": "computes wrong results: a matmul of whole numbers got ",
    "slow copy": "is slow: a copy in memory takes ",
    "wrong copy": "computes wrong results: a copy in memory got ",
    "slow links": "is slow: message to another node takes ",
}
EXTRA = ("slow copy", "wrong copy", "slow links")


@pytest.mark.parametrize(
    "fault", [pytest.param(x, marks=[pytest.mark.full] if x in EXTRA else []) for x in FAULTS]
)
def test_the_node_with_a_fault_is_named_alone_on_all_ranks(ranks, fault):
    checks = ranks(3).run(checked, fault, ["n0", "n1", "n2"])
    assert len(set(checks)) == 1
    (bad,) = checks[0].bad
    assert (bad.host, bad.rank) == ("n1", 1)
    assert checks[0].problem.startswith(PROBLEM.format(1) + FAULTS[fault])
    assert checks[0].problem.endswith("leave out n1")
    if fault == "slow matmul":
        assert "(GPU 0: hot)" in bad.reason
        assert checks[0].notes == ("n0: GPU 0: hot", "n2: GPU 0: hot")


@pytest.mark.parametrize(
    "hosts",
    [["n0", "n1", "n2"], pytest.param(["n0", "n0", "n0"], marks=pytest.mark.full)],
    ids=["three", "one"],
)
def test_healthy_nodes_are_silent(ranks, hosts):
    assert ranks(3).run(checked, "", hosts) == [NodeCheck()] * 3


@pytest.mark.full
@pytest.mark.parametrize("number", [2, 3])
def test_a_slow_link_between_two_nodes_names_none_of_them(ranks, number):
    hosts = ["n0", "n1", "n2"][:number]
    assert ranks(number).run(checked, "slow link", hosts) == [NodeCheck()] * number


@pytest.mark.full
def test_fifty_checks_on_a_busy_machine_name_no_healthy_node(ranks):
    hosts = ["n0", "n1", "n2", "n3"]
    checks = [ranks(4).run(checked, "", hosts, 1.0)[0] for _ in range(50)]
    assert [check.problem for check in checks] == [""] * 50


def speed(rank: int, host: str, ms: float, device: str = "H100", wrong: str = "") -> RankSpeed:
    return RankSpeed(rank, host, device, {"a matmul": ms / 1e3}, wrong)


def test_of_two_nodes_the_slower_is_named_if_their_devices_are_alike():
    two = [speed(0, "a", 2.0), speed(1, "b", 6.0)]
    (bad,) = bad_nodes(two, {(0, 1): 1.0}, ["a", "b"])
    assert bad.host == "b"
    assert bad.reason == ("is slow: a matmul takes 6 ms, 3.0 times the 2 ms of the other node")
    assert not bad_nodes([two[0], speed(1, "b", 6.0, "A100")], {(0, 1): 1.0}, ["a", "b"])
    assert not bad_nodes([two[0], speed(1, "b", 2.9)], {(0, 1): 1.0}, ["a", "b"])


def test_a_wrong_result_comes_before_a_slow_one_and_each_node_once():
    speeds = [
        speed(0, "a", 2.0),
        speed(1, "b", 9.0),
        speed(2, "c", 2.0, wrong="a matmul of whole numbers got 3"),
        speed(3, "d", 2.0),
        speed(4, "b", 8.0),
    ]
    bad = bad_nodes(speeds, {}, [x.host for x in speeds])
    assert [(x.host, x.rank) for x in bad] == [("c", 2), ("b", 1)]
    assert NodeCheck(tuple(bad)).problem == (
        "the node check failed on rank 2 on c, which computes wrong results: a matmul of whole "
        "numbers got 3; leave out c,b\n"
        "  and on rank 1 on b, which is slow: a matmul takes 9 ms, 4.5 times the 2 ms of the "
        "median of 4 nodes"
    )


def test_each_node_meets_every_other_or_eight_of_many():
    assert rounds_of(["a", "a", "b", "b", "c", "c"]) == [
        ((2, 4), (3, 5)),
        ((0, 4), (1, 5)),
        ((0, 2), (1, 3)),
    ]
    assert rounds_of(["a", "a"]) == []
    many = rounds_of([f"n{i}" for i in range(100)])
    assert len(many) == 8
    assert all(len({rank for pair in part for rank in pair}) == 100 for part in many)

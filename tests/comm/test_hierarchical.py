"""All-reduce by way of the nodes: the sum of a flat one, whatever the nodes and the length.

Chunks are so short here that a few hundred elements make several.
"""

import time
from collections.abc import Hashable, Sequence

import pytest
import torch
import torch.distributed as dist

from torchdistpackage.comm import primitives as p
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.group_state import state_of
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.transport import hierarchical
from torchdistpackage.errors import CommError

pytestmark = pytest.mark.own_transport("gloo's sums over nodes first")

CHUNK_BYTES = 256
PLACES = [
    ([0, 1, 2, 3], [0, 0, 1, 1]),
    ([1, 2, 4, 5], ["a", "b", "b", "a"]),
    ([0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 1]),
    pytest.param([0, 1, 2, 3, 4, 5], [0, 1, 2, 2, 1, 0], marks=pytest.mark.full),
]
LENGTHS = [0, 1, 17, 32, 33, 63, 64, 65, 127, 1025]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.complex64]


def by_node(ranks: Sequence[int], nodes: Sequence[Hashable]) -> tuple[p.Group, hierarchical.Start]:
    group = Groups(dist.get_rank()).of(ranks, use="of the test")
    start = hierarchical.hierarchical_all_reduce(group, nodes, chunk_bytes=CHUNK_BYTES)
    assert start is not None
    return group, start


def sums(ranks: list[int], nodes: list) -> None:
    if dist.get_rank() not in ranks:
        return
    group, start = by_node(ranks, nodes)
    for dtype in DTYPES:
        for num in LENGTHS if dtype is torch.float64 else LENGTHS[-2:]:
            data = [((torch.arange(num) + 3 * i) % 8).to(dtype) for i in range(group.size())]
            x = data[group.rank()].clone()
            assert start(x, group, p.SUM).wait() is x
            assert torch.equal(x, sum(data[1:], data[0])), (dtype, num)
    p.barrier(group)


@pytest.mark.few(1)
@pytest.mark.parametrize(("members", "nodes"), PLACES, ids=str)
def test_it_is_the_sum_over_all_ranks(ranks, members, nodes):
    ranks(max(members) + 1).run(sums, members, nodes)


def many() -> None:
    """Several under way at once, other calls between, waited for in another order or never."""
    group, start = by_node([0, 1, 2, 3], [0, 0, 1, 1])
    me = group.rank()
    flats = [torch.full((500 + k,), float(me + k)) for k in range(8)]
    begun = []
    for x in flats:
        begun.append(start(x, group, p.SUM))
        if len(begun) % 3 == me % 3:
            time.sleep(0.01)
        assert p.all_reduce(torch.ones(1), group) == 4
    begun[2] = None
    for k in (7, 0, 1, 6, 3, 5, 4):
        assert (begun[k].wait() == 6 + 4 * k).all()
    assert p.all_gather(torch.ones(1), group).sum() == 4  # now also what nobody waited for is done
    assert (flats[2] == 6 + 4 * 2).all()


def test_several_go_on_at_once(ranks):
    ranks(4).run(many)


def spread() -> float:
    """Every rank has the same bits, though thirds are not exact in binary."""
    group, start = by_node([0, 1, 2, 3], [0, 0, 1, 1])
    data = [torch.rand(999, generator=torch.Generator().manual_seed(i)) / 3 for i in range(4)]
    x = start(data[group.rank()].clone(), group, p.SUM).wait()
    everywhere = p.all_gather(x[None], group)
    assert (everywhere == x).all()
    return (x - sum(each.double() for each in data)).abs().max().item()


def test_ranks_agree_to_the_bit(ranks):
    assert max(ranks(4).run(spread)) < 3 * 2**-24 * 4 / 3, "three sums of at most 4 / 3"


def others() -> None:
    """What is no large sum goes flat; all of them stand in the record as one call."""
    group, start = by_node([0, 1, 2, 3], [0, 0, 1, 1])
    rank, num = dist.get_rank(), state_of(group).issued
    assert (start(torch.full((500,), float(rank)), group, p.MAX).wait() == 3).all()
    assert (start(torch.full((CHUNK_BYTES // 8,), 1.0), group, p.SUM).wait() == 4).all()
    assert (start(torch.ones(500), group, p.SUM).wait() == 4).all()
    assert state_of(group).issued == state_of(group).done == num + 3
    mine = [e for e in recorder.snapshot()["calls"] if e["operation"] == "all_reduce"]
    assert [entry["shape"] for entry in mine[-3:]] == [[500], [CHUNK_BYTES // 8], [500]]
    other = Groups(rank).of([0, 1, 2, 3], use="another")
    with pytest.raises(CommError, match=r"was made for ranks \(0, 1, 2, 3\), not for"):
        start(torch.ones(500), other, p.SUM)


def test_what_else_is_reduced_goes_flat(ranks):
    ranks(4).run(others)


def flat_is_as_good() -> list[bool]:
    world, alone = dist.group.WORLD, Groups(dist.get_rank()).of([dist.get_rank()])
    with pytest.raises(CommError, match="3 names for the 4 ranks"):
        hierarchical.hierarchical_all_reduce(world, [0, 0, 1])
    found = [
        hierarchical.hierarchical_all_reduce(world, nodes)
        for nodes in ([0, 0, 0, 1], [0, 1, 2, 3], [5] * 4, None)
    ]
    return [start is None for start in (*found, hierarchical.hierarchical_all_reduce(alone, [0]))]


def test_there_is_none_where_nodes_are_uneven_or_one_or_of_one_rank(ranks):
    """All ranks of the pool are on one host, which is what None asks for."""
    assert ranks(4).run(flat_is_as_good) == [[True] * 5] * 4


def absent() -> str:
    """The last rank does not come; the limit was set after the groups were made."""
    group, start = by_node([0, 1, 2, 3], [0, 0, 1, 1])
    p.barrier(group)
    p.set_timeout(group, 0.5)
    if dist.get_rank() == 3:
        time.sleep(1.5)
        return ""
    begun = [start(torch.ones(500), group, p.SUM) for _ in range(2)]
    texts = []
    for pending in begun:
        with pytest.raises(CommError) as caught:
            pending.wait()
        texts.append(str(caught.value))
    return texts[0]


def test_who_does_not_come_is_an_error_on_all_others(ranks):
    for text in ranks(4).run(absent)[:3]:
        assert text.startswith("all_reduce over ranks (0, 1, 2, 3) failed (number "), text


def planted(where: str) -> list[str]:
    """Our thread raises what nobody expects, or never hears that a step has ended."""
    group, start = by_node([0, 1, 2, 3], [0, 0, 1, 1])
    p.set_timeout(group, 0.5)

    def fail(*args) -> None:
        raise ValueError("planted")

    kind, name = {
        "add": (hierarchical._Chunk, "add"),
        "hand_out": (hierarchical._Chunk, "hand_out"),
        "silence": (hierarchical._HierarchicalAllReduce, "_tell"),
    }[where]
    texts, before = [], getattr(kind, name)
    setattr(kind, name, (lambda *args: None) if where == "silence" else fail)
    num = 1 if where == "silence" else 2
    begun, began_s = [start(torch.ones(500), group, p.SUM) for _ in range(num)], time.monotonic()
    for pending in begun:
        with pytest.raises(CommError) as caught:
            pending.wait()
        texts.append(str(caught.value))
    assert time.monotonic() - began_s < 0.5 + hierarchical.GRACE_S + 1
    setattr(kind, name, before)
    return texts


@pytest.mark.parametrize("where", ["add", "hand_out", "silence"])
def test_whatever_goes_wrong_on_its_thread_ends_the_wait(ranks, where):
    for texts in ranks(4).run(planted, where):
        said = "no chunk arrived for 1.5 s" if where == "silence" else "ValueError: planted"
        assert all(said in text for text in texts), texts

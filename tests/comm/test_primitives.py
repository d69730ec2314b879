"""Raw collectives: every dtype, even or not, waited for or begun, against what ranks predict."""

import pytest
import torch
import torch.distributed as dist

from torchdistpackage.comm import primitives as p
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.p2p import receive, send, start_receive, start_send
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError

MOVED = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.complex64, torch.complex128),
]
SUMMED = [dtype for dtype in MOVED if dtype is not torch.float8_e4m3fn]


def data(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """(rows, 3) small whole numbers that say who made them; of complex ones both parts differ."""
    x = torch.arange(rows * 3).reshape(rows, 3) % 5 + rank
    if dtype is torch.bool:
        return x % 2 == 1
    return (x + 1j * (x + 1)).to(dtype) if dtype.is_complex else x.to(dtype)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, not contiguous."""
    return torch.stack([x, x], -1)[..., 0]


def mine_of(lists: list[list[int]]) -> dist.ProcessGroup:
    ranks = next(ranks for ranks in lists if dist.get_rank() in ranks)
    return Groups(dist.get_rank()).of(ranks)


def sums(lists: list[list[int]]) -> None:
    group, rank = mine_of(lists), dist.get_rank()
    ranks = p.ranks_of(group)
    sizes = [2 * i for i in range(len(ranks))]  # the first has nothing
    for dtype in SUMMED:
        parts = [data(r, 4, dtype) for r in ranks]
        total = sum(parts[1:], parts[0])
        for x in (data(rank, 4, dtype), strided(data(rank, 4, dtype))):
            assert p.all_reduce(x, group) is x and torch.equal(x, total), dtype
        x = data(rank, 4, dtype)
        assert torch.equal(p.start_all_reduce(x, group).wait(), total), dtype

        rows = sum(sizes)
        parts = [data(r, rows, dtype) for r in ranks]
        total = sum(parts[1:], parts[0]).split(sizes)[group.rank()]
        mine = data(rank, rows, dtype)
        assert torch.equal(p.reduce_scatter(strided(mine), group, sizes), total), dtype
        assert torch.equal(p.reduce_scatter(mine, group, sizes, async_op=True).wait(), total), dtype
        assert torch.equal(mine, data(rank, rows, dtype)), "the input is left as it was"


def moves(lists: list[list[int]]) -> None:
    group, rank = mine_of(lists), dist.get_rank()
    ranks, me = p.ranks_of(group), group.rank()
    sizes = [2 * i for i in range(len(ranks))]
    for dtype in MOVED:

        def same(got: torch.Tensor, expected: torch.Tensor, dtype=dtype) -> None:
            assert got.dtype == dtype and got.shape == expected.shape
            assert torch.equal(
                got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
            ), dtype

        whole = torch.cat([data(r, 2, dtype) for r in ranks])
        same(p.all_gather(strided(data(rank, 2, dtype)), group), whole)
        whole = torch.cat([data(r, n, dtype) for r, n in zip(ranks, sizes, strict=True)])
        same(p.all_gather(data(rank, sizes[me], dtype), group, sizes), whole)
        same(p.all_gather(data(rank, sizes[me], dtype), group, sizes, True).wait(), whole)

        even = torch.cat([data(r, 2 * len(ranks), dtype)[2 * me : 2 * me + 2] for r in ranks])
        same(p.all_to_all(strided(data(rank, 2 * len(ranks), dtype)), group), even)
        # rank r gives i rows of its own to the i-th
        sent, rows = list(range(len(ranks))), sum(range(len(ranks)))
        uneven = torch.cat([data(r, rows, dtype).split(sent)[me] for r in ranks])
        got = p.all_to_all(data(rank, rows, dtype), group, sent, [me] * len(ranks), True)
        same(got.wait(), uneven)

        for source in ranks:
            for x in (data(rank, 2, dtype), strided(data(rank, 2, dtype)), data(rank, 0, dtype)):
                same(p.broadcast(x, group, source), data(source, len(x), dtype))
        scalar = data(rank, 1, dtype)[0, 0].clone()
        same(
            p.broadcast(scalar, group, async_op=True).wait().reshape(1),
            data(ranks[0], 1, dtype)[0, :1],
        )


def messages(lists: list[list[int]]) -> None:
    """A ring of messages, each begun before any is waited for."""
    group, rank = mine_of(lists), dist.get_rank()
    ranks, me = p.ranks_of(group), group.rank()
    after, before = ranks[(me + 1) % len(ranks)], ranks[me - 1]
    for dtype in MOVED:
        room = strided(torch.zeros(2, 3).to(dtype))
        begun = [start_receive(room, group, before), start_send(data(rank, 2, dtype), group, after)]
        for pending in begun:
            pending.wait()
        expected = data(before, 2, dtype)
        assert torch.equal(room.clone().view(torch.uint8), expected.view(torch.uint8)), dtype
    if me < 2:
        peer, x = ranks[1 - me], torch.tensor(float(rank))
        if me == 0:
            send(x, group, peer)
        else:
            assert receive(x, group, peer).item() == peer


GROUPS = [(2, [[0, 1]]), (4, [[1, 3], [0, 2]]), (4, [[1, 2, 3], [0]])]


@pytest.mark.parametrize(("world_size", "lists"), GROUPS, ids=str)
@pytest.mark.parametrize("body", [sums, moves], ids=["sums", "moves"])
def test_all_dtypes_arrive_and_add_up(ranks, world_size, lists, body):
    ranks(world_size).run(body, lists)


@pytest.mark.parametrize(("world_size", "lists"), GROUPS[:2], ids=str)
def test_messages_of_all_dtypes_go_round(ranks, world_size, lists):
    ranks(world_size).run(messages, lists)


def lazily_negated() -> torch.Tensor:
    """The imaginary part of a conjugate is a view that negates when it is read."""
    x = (torch.ones(2) + 3j * torch.ones(2)).conj().imag
    assert x.is_neg() and p.all_reduce(x, dist.group.WORLD).tolist() == [-6, -6]
    return p.all_gather(x, dist.group.WORLD)


def test_lazy_signs_arrive(ranks):
    assert [x.tolist() for x in ranks(2).run(lazily_negated)] == [[-6] * 4] * 2


def odd_strides() -> None:
    """A dim of length 1 may have any stride, also 0, and counts as contiguous."""
    group, rank = dist.group.WORLD, dist.get_rank()
    for x in (torch.ones(()).expand(1), torch.ones(5, 3).t()[:1, :1], torch.ones(1).expand(1, 1)):
        assert p.all_gather(x + 0 if rank else x, group).sum() == 2
        assert p.reduce_scatter(x.expand(2, *x.shape[1:]).clone(), group).sum() == 2


def test_strides_of_length_one_do_not_matter(ranks):
    ranks(2).run(odd_strides)


def mixed_up() -> str:
    """Rank 0 gathers what rank 1 sums: neither gets the other's numbers."""
    group = Groups(dist.get_rank()).of([0, 1, 2])
    if dist.get_rank() == 2:
        return ""
    pair = Groups(dist.get_rank()).of([0, 1])
    p.set_timeout(pair, 0.5)
    with pytest.raises(CommError) as caught:
        if dist.get_rank():
            p.reduce_scatter(torch.full((4,), 100.0), pair)
        else:
            p.all_gather(torch.full((2,), 7.0), pair)
    assert group.size() == 3
    return str(caught.value)


@pytest.mark.own_transport("tells calls apart by gloo's tags")
def test_ranks_in_different_calls_do_not_take_one_for_the_other(ranks):
    first, second, _ = ranks(3).run(mixed_up)
    assert first.startswith("all_gather over") and second.startswith("reduce_scatter over")


def dropped() -> None:
    """What is begun and never waited for does not break the calls after it."""
    group = dist.group.WORLD
    for num in (2, 2**20):
        for _ in range(3):
            p.all_gather(torch.ones(num), group, async_op=True)
            p.reduce_scatter(torch.ones(2 * num), group, async_op=True)
        assert p.all_gather(torch.full((num,), 3.0), group).sum() == 6 * num


def test_what_nobody_waits_for_breaks_nothing(ranks):
    ranks(2).run(dropped)


def narrow_sum() -> torch.Tensor:
    x = torch.full((4, 1), 256.0 if dist.get_rank() == 0 else 1.0, dtype=torch.bfloat16)
    return p.reduce_scatter(x, dist.group.WORLD)


@pytest.mark.own_transport("gloo's messages are added in float32, NCCL adds in the dtype")
def test_narrow_floats_are_added_in_float32(ranks):
    """256 + 1 + 1 + 1 is 256 in steps of bf16, which has no 257, and 260 (259, rounded) at once."""
    assert {float(x) for x in ranks(4).run(narrow_sum)} == {260.0}


def refusals() -> list[str]:
    world, rank = dist.group.WORLD, dist.get_rank()
    x = torch.ones(3, 2)
    calls = [
        lambda: p.reduce_scatter(x, world),
        lambda: p.all_gather(x, world, [3, 4]) if rank else p.all_gather(x, world, [4, 3]),
        lambda: p.all_gather(x, world, [3, 3, 3]),
        lambda: p.reduce_scatter(x, world, [2, 2]),
        lambda: p.reduce_scatter(x, world, [4, -1]),
        lambda: p.all_to_all(x, world, [1, 2]),
        lambda: p.all_to_all(x, world, [1, 2], [3]),
        lambda: p.all_gather(torch.tensor(1.0), world),
        lambda: p.all_reduce(x.to(torch.float8_e4m3fn), world),
        lambda: p.reduce_scatter(x[:2].to(torch.float8_e4m3fn), world),
        lambda: p.all_reduce(torch.ones(1).expand(3), world),
        lambda: p.all_reduce(x.to(torch.complex64), world, p.MAX),
        lambda: p.all_reduce(x.long(), world, p.AVG),
        lambda: p.broadcast(x, world, 2),
        lambda: send(x, world, rank),
        lambda: receive(x, world, 5),
    ]
    said = []
    for call in calls:
        with pytest.raises(CommError) as caught:
            call()
        said.append(str(caught.value))
    return said


REFUSALS = [
    "has 3 elements, which 2 ranks cannot share evenly",
    " give 4 to this rank, number ",
    "for a group of 2 ranks",
    " add up to 4;",
    "for a group of 2 ranks",
    "both send_sizes and receive_sizes",
    "for a group of 2 ranks",
    "without dims has no rows",
    "float8_e4m3fn cannot be reduced; convert it to bfloat16",
    "float8_e4m3fn cannot be reduced; convert it to bfloat16",
    "shape (3,) whose elements share memory",
    "complex64 cannot be ordered",
    "int64 cannot be averaged",
    "rank 2, which is not in the group of ranks (0, 1)",
    "not another rank of the group",
    "not another rank of the group",
]
"""What is said of each of these calls."""


def test_bad_input_is_refused_before_anything_is_sent(ranks):
    for said in ranks(2).run(refusals):
        assert [text for text, told in zip(REFUSALS, said, strict=True) if text not in told] == []


def alone() -> None:
    """Groups of one: nothing is sent, and what comes back is what went in."""
    tpc.setup_process_groups([("data", 2), ("tensor", 1)])
    group, x = tpc.get_group("tensor"), torch.ones(3)
    for same in (p.all_reduce, p.all_gather, p.reduce_scatter, p.all_to_all, p.broadcast):
        assert same(x, group) is x
    assert p.all_gather(x, group, async_op=True).wait() is x
    assert p.gather_objects("me", group) == ["me"] and p.broadcast_object(3, group) == 3
    p.barrier(group)


def test_groups_of_one_send_nothing(ranks):
    ranks(2).run(alone)

"""torchshard.distributed as its page describes it, in groups that are smaller than the world."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import torchdistpackage.compat.torchshard as ts
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import LaunchError, LayoutError, TopologyError


def groups_of(group_size: int, expected: int) -> None:
    ts.distributed.init_process_group(group_size)
    assert ts.distributed.is_initialized()
    rank = dist.get_rank()
    assert ts.distributed.get_rank() == rank % expected
    assert ts.distributed.get_world_size() == ts.distributed.get_group_size() == expected
    first = rank // expected * expected
    assert tpc.get_ranks_in_group("tensor") == list(range(first, first + expected))
    assert ts.distributed.get_group() is tpc.get_group("tensor")
    assert tpc.get_dp_size() == 4 // expected
    with pytest.raises(LaunchError, match=f"groups of {expected} ranks are there already"):
        ts.distributed.init_process_group(group_size)
    ts.distributed.destroy_process_group()
    ts.distributed.destroy_process_group()
    assert not ts.distributed.is_initialized() and dist.is_initialized()


@pytest.mark.parametrize(("group_size", "expected"), [(-1, 4), (1, 1), (2, 2), (9, 4)])
def test_groups_are_neighbours_within_the_world(ranks, group_size, expected):
    ranks(4).run(groups_of, group_size, expected)


def refused() -> None:
    for size, text in ((3, "does not divide the 4 ranks"), (0, "group_size is 0"), (-2, "is -2")):
        with pytest.raises(TopologyError, match=text):
            ts.distributed.init_process_group(size)
    here = ts.distributed
    x = torch.ones(4)
    for call in (
        *(here.get_group, here.get_rank, here.get_world_size, here.get_group_size),
        *(lambda f=f: f(x) for f in (here.scatter, here.gather, here.reduce, here.copy)),
        *(lambda f=f: f(x) for f in (here._reduce, here._split, here._gather)),
    ):
        with pytest.raises(LaunchError, match="not initialised; call torchshard"):
            call()
    assert x.tolist() == [1] * 4
    dist.destroy_process_group()
    with pytest.raises(LaunchError, match=r"call torch\.distributed\.init_process_group"):
        here.init_process_group(2)


def test_bad_sizes_and_use_before_groups_are_refused(ranks):
    ranks(4).run(refused)


def collectives(group_size: int) -> None:
    ts.distributed.init_process_group(group_size)
    rank, mine = dist.get_rank(), ts.distributed.get_rank()
    members = tpc.get_ranks_in_group("tensor")
    whole = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)
    for dim in (0, 1, -1):
        x = whole.clone().requires_grad_()
        part = ts.distributed.scatter(x, dim)
        assert torch.equal(part, whole.chunk(group_size, dim)[mine])
        assert ts.get_parallel_dim(part) == dim
        ts.register_parallel_dim(part, None)  # else a sum over what is split is refused
        (part * (1 + mine)).sum().backward()
        expected = torch.cat([torch.full_like(part, 1.0 + i) for i in range(group_size)], dim)
        assert torch.equal(x.grad, expected)

        x = (whole + rank).requires_grad_()
        joined = ts.distributed.gather(x, dim)
        assert torch.equal(joined, torch.cat([whole + r for r in members], dim))
        assert ts.get_parallel_dim(joined) is None
        weights = torch.arange(joined.numel(), dtype=torch.float64).reshape(joined.shape)
        (joined * weights).sum().backward()
        assert torch.equal(x.grad, weights.chunk(group_size, dim)[mine])
        assert not ts.distributed._split(x, dim).requires_grad
        assert torch.equal(ts.distributed._split(whole, dim), part)
        assert torch.equal(ts.distributed._gather(whole + rank, dim), joined)
    assert torch.equal(ts.distributed.scatter(input=whole, dim=0), ts.distributed.scatter(whole, 0))
    assert torch.equal(ts.distributed.copy(input=whole), ts.distributed.copy(tensor=whole))
    for same in (ts.distributed.scatter, ts.distributed.gather):
        assert same(whole, None) is whole

    x = torch.tensor([1.0 + rank], dtype=torch.float64, requires_grad=True)
    copied = ts.distributed.copy(x)
    (copied * (1 + mine) + x).sum().backward()  # the incoming gradient is expanded, and shared
    assert copied.tolist() == x.tolist()
    assert x.grad.tolist() == [sum(range(1, group_size + 1)) + 1]


@pytest.mark.parametrize("group_size", [1, 2])
def test_collectives_and_their_gradients(ranks, group_size):
    ranks(4).run(collectives, group_size)


def reductions() -> None:
    ts.distributed.init_process_group(2)
    rank, members = dist.get_rank(), tpc.get_ranks_in_group("tensor")
    for dtype in (torch.int64, torch.float32, torch.complex64):
        x = torch.tensor([1, rank]).to(dtype)
        assert ts.distributed.reduce(x) is x and x.tolist() == [2, sum(members)]
        assert ts.distributed._reduce(x) is x and x.tolist() == [4, 2 * sum(members)]

    x = torch.tensor([1.0 + rank], dtype=torch.float64, requires_grad=True)
    total = ts.distributed.reduce(x)
    assert total is not x and x.tolist() == [1.0 + rank] and total.tolist() == [2.0 + sum(members)]
    (total * (3 + rank)).sum().backward()
    assert x.grad.tolist() == [3 + rank]
    with torch.no_grad():
        assert ts.distributed.reduce(x) is x and x.tolist() == [2.0 + sum(members)]
    with pytest.raises(LayoutError, match="2 ranks cannot share evenly"):
        ts.distributed.scatter(torch.ones(3))
    with pytest.raises(LayoutError, match="no dim 1"):
        ts.distributed.gather(torch.ones(3), 1)


def test_reduce_writes_where_autograd_does_not_look(ranks):
    ranks(4).run(reductions)


def test_all_ways_to_import_it():
    import torchdistpackage.compat.torchshard.distributed as by_path
    from torchdistpackage.compat import torchshard
    from torchdistpackage.compat.torchshard import distributed

    assert torchshard is ts and distributed is by_path is ts.distributed
    assert "distributed" in dir(ts)

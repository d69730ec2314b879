"""tplib's names do what its page says, also where its own code did not."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.tells import facts_pattern
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.compat import tplib
from torchdistpackage.errors import CommError, LaunchError, LayoutError, TopologyError


def before_and_after() -> None:
    for call in (
        *(tplib.get_tp_group, tplib.get_tp_rank, tplib.get_tp_world_size, tplib.get_tp_src_rank),
        *(lambda: tplib.tp_all_reduce(torch.ones(1)), lambda: tplib.tp_gather(torch.ones(1))),
    ):
        with pytest.raises(LaunchError, match="not initialised; call init_model_parallel"):
            call()
    with pytest.raises(LaunchError, match=r"call init_dist_env\(\) first"):
        tplib.get_local_rank()
    assert not tplib.model_parallel_is_initialized()
    for wrong, text in ((3, "does not divide the 4 ranks"), (0, "tp_size is 0"), (8, "8 ranks")):
        with pytest.raises(TopologyError, match=text):
            tplib.init_model_parallel(wrong)
    with pytest.raises(LaunchError, match="backend='mpi'"):
        tplib.init_model_parallel(2, "mpi")
    assert not tplib.model_parallel_is_initialized()

    tplib.init_model_parallel(tp_size=2)
    assert tplib.model_parallel_is_initialized()
    with pytest.raises(LaunchError, match="groups of 2 ranks are there already"):
        tplib.init_model_parallel(2)
    tplib.ensure_init(2)
    with pytest.raises(TopologyError, match=r"ensure_init\(4\), but .* have 2 ranks"):
        tplib.ensure_init(4)

    tplib.destroy_model_parallel()
    tplib.destroy_model_parallel()
    assert not tplib.model_parallel_is_initialized() and dist.is_initialized()
    tplib.ensure_init(4, "nccl")  # the printed default, which leaves the choice to the devices
    assert tplib.get_tp_world_size() == 4
    tplib.destroy_dist_env()
    tplib.destroy_dist_env()
    assert not dist.is_initialized()
    for call in (lambda: tplib.init_model_parallel(1), lambda: tplib.broadcast(torch.ones(1))):
        with pytest.raises(LaunchError, match=r"not initialised; call init_dist_env\(\) first"):
            call()


def test_groups_come_and_go_and_their_absence_is_clear(ranks):
    ranks(4).run(before_and_after)


def dist_env(world_size: int) -> None:
    rank = dist.get_rank()
    if world_size > 1:
        with pytest.raises(LaunchError, match=r"world_size=9\), but .* world_size"):
            tplib.init_dist_env(world_size=9)
    tplib.init_dist_env(world_size=world_size, rank=rank)  # joined already: nothing to do
    assert tplib.get_local_rank() == rank, "all ranks are on this host"
    assert tplib.get_cpu_world_group().size() == world_size
    tplib.init_dist_env(local_rank=0)
    assert tplib.get_local_rank() == 0
    tplib.destroy_dist_env()
    if world_size == 1:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        tplib.init_dist_env()
        tplib.init_model_parallel()
        assert tplib.tp_all_reduce(torch.ones(1)).tolist() == [1]
        assert tplib.tp_all_gather(torch.ones(2, 1)).shape == (2, 1)
        assert tplib.tp_gather(torch.ones(2, 1)).shape == (2, 1)
        assert tplib.broadcast_tensor_dict({"x": 1}) == {"x": 1}
        with pytest.raises(CommError, match="rank 1, which is not in the group"):
            tplib.broadcast_obj_list([1], src=1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_joining_is_done_once_and_one_process_is_a_world(ranks, world_size):
    ranks(world_size).run(dist_env, world_size)


def collectives() -> None:
    """Tensor groups [0, 1] and [2, 3], two data groups beside them."""
    tplib.init_model_parallel(2)
    rank, ranks = dist.get_rank(), tpc.get_ranks_in_group("tensor")
    assert ranks == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert (tplib.get_tp_rank(), tplib.get_tp_src_rank()) == (rank % 2, ranks[0])
    assert tplib.get_tp_group() is tpc.get_group("tensor")
    assert tpc.get_ranks_in_group("data") == [rank % 2, rank % 2 + 2]

    x = torch.full((3, 2), float(rank)).t()  # not contiguous
    assert tplib.tp_all_reduce(x) is x and x.tolist() == [[float(sum(ranks))] * 3] * 2
    parts = [torch.arange(6.0).reshape(2, 3).t() + r for r in ranks]
    mine = parts[rank % 2]
    for dim in (-1, 0, 1):
        assert torch.equal(tplib.tp_all_gather(mine, dim), torch.cat(parts, dim))
        for dst in (0, 1):
            got = tplib.tp_gather(mine, dst, dim)
            if tplib.get_tp_rank() == dst:
                assert torch.equal(got, torch.cat(parts, dim))
            else:
                assert got is None
    with pytest.raises(CommError, match=facts_pattern("position 2", "2 ranks")):
        tplib.tp_gather(mine, dst=2)
    with pytest.raises(LayoutError, match="no dim 2"):
        tplib.tp_all_gather(mine, 2)

    weight = torch.tensor([1.0 + rank], dtype=torch.float64, requires_grad=True)
    total = tplib.tp_all_reduce(weight * 2)
    joined = tplib.tp_all_gather(weight)
    assert total.tolist() == [2.0 * (2 + sum(ranks))] and weight.tolist() == [1.0 + rank]
    (total * 3 + (joined * torch.tensor([5.0, 7.0])).sum()).backward()
    assert weight.grad.tolist() == [6.0 + (5.0, 7.0)[rank % 2]]


def test_collectives_stay_in_the_tensor_group(ranks):
    ranks(4).run(collectives)


def broadcasts() -> None:
    tplib.init_model_parallel(2)
    rank, group = dist.get_rank(), tplib.get_tp_group()
    source = tplib.get_tp_src_rank() + 1
    x = torch.tensor([rank])
    assert tplib.broadcast(x, source, group) is x and x.tolist() == [source]
    assert tplib.broadcast(torch.tensor([rank])).tolist() == [0], "all ranks"
    values = [rank, "x"]
    assert tplib.broadcast_obj_list(values, source, group) is values and values == [source, "x"]
    given = {"a": torch.tensor(2.5, dtype=torch.bfloat16), "b": {"c": source}}
    got = tplib.broadcast_tensor_dict(given if rank == source else None, source, group)
    assert got == given and got["a"].dtype is torch.bfloat16
    assert tplib.broadcast_common(source, group) == (2, group)
    assert tplib.broadcast_common() == (4, dist.group.WORLD)
    for wrong in (4, (source + 1) % 4):
        with pytest.raises(CommError, match=f"rank {wrong}, which is not in the group"):
            tplib.broadcast_common(wrong, group)
        for call, value in (
            (tplib.broadcast, torch.ones(1)),
            (tplib.broadcast_obj_list, [1]),
            (tplib.broadcast_tensor_dict, {}),
        ):
            with pytest.raises(CommError, match=f"rank {wrong}, which is not in the group"):
                call(value, wrong, group)
    for no_group in ("nobody", dist.GroupMember.NON_GROUP_MEMBER, 3):
        with pytest.raises(CommError, match="group"):
            tplib.broadcast(torch.ones(1), 0, no_group)

    odd = tplib.create_group_and_assign([1, 3], "gloo", "_ODD")
    assert (odd is not None) == (rank % 2 == 1)
    if odd is not None:
        assert tplib.broadcast(torch.tensor([rank]), 3, odd).tolist() == [3]


def test_a_source_is_a_global_rank_of_the_group(ranks):
    ranks(4).run(broadcasts)

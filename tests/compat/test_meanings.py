"""Meanings of earlier names that no other test holds: `surface.yaml` says which name has which."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn, optim
from torchdistpackage.dist.process_topo import ProcessTopology

from torchdistpackage import (
    Bf16ZeroOptimizer,
    NaiveDDP,
    NativeScalerPP,
    create_moe_dp_hooks,
    is_using_pp,
    tpc,
)
from torchdistpackage.ddp.naive_ddp import MoEDP
from torchdistpackage.topology.mesh import topology

SHORT = {"tp": "tensor", "pp": "pipe", "dp": "data", "mp": "model"}
LONG = {"tensor": "tensor", "pipeline": "pipe", "data": "data", "model": "model"}


def test_the_short_names_of_tpc_say_what_the_long_ones_do():
    """Of 3 x 2 x 2 ranks, all different in size or place."""
    world = topology([("data", 3), ("pipe", 2), ("tensor", 2)], 12)
    for rank in range(12):
        with tpc.using(world, rank):
            for short, mode in SHORT.items():
                group = tpc.get_ranks_in_group(mode)
                assert getattr(tpc, f"get_{short}_rank")() == group.index(rank)
                assert getattr(tpc, f"get_{short}_size")() == len(group)
            for name, mode in LONG.items():
                group = tpc.get_ranks_in_group(mode)
                assert getattr(tpc, f"is_first_in_{name}_group")() == (rank == group[0])
                assert getattr(tpc, f"is_last_in_{name}_group")() == (rank == group[-1])
            assert tpc.all_dp_ranks() == tpc.all_ranks("data")
            assert is_using_pp() and isinstance(tpc, ProcessTopology)
            assert ProcessTopology().get_ranks_in_group("data") == [
                rank % 4 + 4 * i for i in range(3)
            ]
        with tpc.using(topology([("data", 12)], 12), rank):
            assert not is_using_pp()


def by_hand() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    net = NaiveDDP(nn.Linear(3, 2).double())
    first = copy.deepcopy(net.module)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(rank)
    net.broadcast_params()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), first.parameters(), strict=True))

    xs = [torch.randn(4, 3, dtype=torch.float64) for _ in range(2)]
    net.module(xs[0]).sum().backward()  # past the wrapper, as a pipeline calls it
    own = net.module.weight.grad.clone()
    net.sync_comm()
    total = own.clone()
    dist.all_reduce(total)
    torch.testing.assert_close(net.module.weight.grad, total / size)

    expert = nn.Parameter(torch.full((2,), float(rank), dtype=torch.float64))
    hooks = create_moe_dp_hooks({"expert": expert}, dist.group.WORLD, 0)
    assert type(hooks) is MoEDP and expert.tolist() == [0, 0]
    (expert * (rank + 1)).sum().backward()
    hooks.reduce_gradients()
    assert expert.grad.tolist() == [sum(range(1, size + 1)) / size] * 2
    hooks.remove()

    model = nn.Linear(64, 64)
    optimizer = Bf16ZeroOptimizer(optim.Adam(model.parameters(), lr=0.1))
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05]
    kept = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    assert kept == sum(p.numel() for p in model.parameters()) / size, "shared out evenly"
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())

    scaler = NativeScalerPP(init_scale=2.0**7)
    again = NativeScalerPP()
    again.load_state_dict(scaler.state_dict())
    assert again.state_dict() == scaler.state_dict() and again.state_dict()["scale"] == 2.0**7


def test_what_the_wrappers_offer_by_hand(ranks):
    ranks(2).run(by_hand)

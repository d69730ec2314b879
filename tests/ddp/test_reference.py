"""The references against arithmetic by hand and one process: all others are held against them."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from torchdistpackage.ddp.reference import ReferenceDDP, ReferenceZero1
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer


def means() -> None:
    rank = dist.get_rank()
    net = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in ("all", "one", "none")})
    with torch.no_grad():
        for layer in net.values():
            layer.weight.fill_(rank + 5)
    mean = ReferenceDDP(net)
    assert all(bool((p == 5).all()) for p in net.parameters()), "all start as the first rank"
    x = torch.full((1, 2), rank + 1.0)
    loss = net["all"](x).sum() + (net["one"](x).sum() if rank == 2 else 0)
    loss.backward()
    mean.average()
    assert torch.equal(net["all"].weight.grad, torch.full((1, 2), 2.0))
    assert torch.equal(net["one"].weight.grad, torch.full((1, 2), 1.0))
    assert net["none"].weight.grad is None


def test_it_is_the_mean_in_which_a_missing_gradient_counts_zero(ranks):
    ranks(3).run(means)


def zero_1() -> None:
    torch.manual_seed(0)
    sharded, alone = (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(2))
    truth = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    for net in (sharded, alone):
        net.load_state_dict(truth.state_dict())
    for net in (sharded, alone, truth):
        net.double()
    make = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    reference = ReferenceZero1(sharded.parameters(), make)
    zero = ZeroOptimizer(make(alone.parameters()), module=alone)
    optimizer = make(truth.parameters())
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        batch = torch.randn(3, 5, 3, generator=draw, dtype=torch.float64)
        for net in (sharded, alone):
            net(batch[dist.get_rank()]).square().mean().backward()
        truth(batch.flatten(0, 1)).square().mean().backward()
        for one in (reference, zero, optimizer):
            one.step()
            one.zero_grad()
        for p, q, r in zip(
            sharded.parameters(), alone.parameters(), truth.parameters(), strict=True
        ):
            torch.testing.assert_close(p, r, rtol=0, atol=1e-12)
            torch.testing.assert_close(q, p, rtol=0, atol=1e-12)
    assert reference.shard.numel() == -(-21 // 3)


def test_zero_1_is_the_plain_optimizer_and_zero_optimizer(ranks):
    ranks(3).run(zero_1)

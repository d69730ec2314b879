"""The specification against arithmetic by hand: it is what all others are held against."""

import torch
import torch.distributed as dist
from torch import nn

from torchdistpackage.ddp.specification import Specification


def means() -> None:
    rank = dist.get_rank()
    net = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in ("all", "one", "none")})
    with torch.no_grad():
        for layer in net.values():
            layer.weight.fill_(rank + 5)
    mean = Specification(net)
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

"""Parameters that some ranks, or some microbatches, do not use: R21."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp.one_process import DIM, PER_RANK
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.errors import CommError


class Choosy(nn.Module):
    """Uses the layers it is told to; with none, its output depends on no parameter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor, use: list[int]) -> Tensor:
        for i in use:
            x = x + torch.tanh(self.layers[i](x))
        return x


def unused_patterns(seed: int, rounds: int) -> None:
    """Each rank and microbatch uses its own layers: the mean counts zeros for the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = Choosy().double()
    one = copy.deepcopy(model)
    ddp = NaiveDDP(model, bucket_cap_mb=0.0004, num_grad_acc_iter=2)
    order: list[int] = []
    ddp.reducer.on_launch = order.append
    draw = torch.Generator().manual_seed(seed)
    for _ in range(rounds):
        ddp.zero_grad()
        one.zero_grad()
        chosen = (torch.rand(2, size, 4, generator=draw) < 0.4).tolist()
        x = torch.randn(2, size, PER_RANK, DIM, generator=draw, dtype=torch.float64)
        order.clear()
        for micro in range(2):
            for r in range(size):
                use = [i for i in range(4) if chosen[micro][r][i]]
                loss = one(x[micro, r], use).square().mean() / size
                if loss.requires_grad:
                    loss.backward()
                if r == rank:
                    ddp(x[micro, r], use).square().mean().backward()
        assert order == list(range(ddp.reducer.num_buckets))
        for (name, p), q in zip(one.named_parameters(), ddp.module.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=1e-12)


@pytest.mark.late_in_full
@pytest.mark.few(1)
@pytest.mark.parametrize(("seed", "rounds"), [(0, 30), (0, 100), (1, 100)])
def test_random_patterns_of_use_neither_hang_nor_differ(ranks, seed, rounds):
    ranks(3).run(unused_patterns, seed, rounds)


def strict_names_the_unused() -> None:
    ddp = NaiveDDP(Choosy().double(), strict=True)
    x = torch.ones(2, DIM, dtype=torch.float64)
    ddp(x, [0, 1, 2, 3]).sum().backward()
    use = [0, 1, 3] if dist.get_rank() == 1 else [0, 1, 2, 3]
    with pytest.raises(CommError, match=r"2 of 8 parameters .*layers\.2\.bias, layers\.2\.weight"):
        ddp(x, use).sum().backward()


def test_strict_names_what_some_rank_did_not_use_on_every_rank(ranks):
    ranks(2).run(strict_names_the_unused)

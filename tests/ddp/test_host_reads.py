"""A steady step reads no tensor value on the host, and one that must reads once."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.host_reads import HostReads
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.optim.clip import clip_grad_norm_
from torchdistpackage.optim.scaler import GradScaler

DIM, NUM, STEPS = 4, 6, 5
SMALL_MIB = 0.0002
"""A bucket for each layer."""


class Routed(nn.Module):
    """Of layers in two dtypes the first `num_used` are used on this rank."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(NUM))
        self.layers[1].double()

    def forward(self, x: Tensor, num_used: int) -> Tensor:
        for layer in self.layers[:num_used]:
            x = layer(x.to(layer.weight.dtype)).float()
        return x


def steady(num_used: list[int], clips: bool, wide: bool) -> dict[str, int]:
    """Reads of one NaiveDDP step after the first ones, in which buckets are fitted."""
    ddp = NaiveDDP(Routed(), bucket_cap_mb=SMALL_MIB)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = GradScaler(enabled=wide, init_scale=2.0)
    for _ in range(STEPS):
        with HostReads() as reads:
            optimizer.zero_grad()
            loss = ddp(torch.ones(2, DIM), num_used[dist.get_rank()]).square().mean()
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                clip_grad_norm_(ddp.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    used = [p.grad is not None for p in ddp.module.layers.parameters()]
    assert used == [True] * 2 * max(num_used) + [False] * 2 * (NUM - max(num_used))
    return dict(reads.found)


def places(found: dict[str, int]) -> list[str]:
    return sorted(line.partition(":")[0] for line, n in found.items() for _ in range(n))


@pytest.mark.parametrize("clips", [False, True])
def test_a_step_that_uses_all_reads_nothing(ranks, clips):
    assert ranks(2).run(steady, [NUM, NUM], clips, False) == [{}, {}]


def test_what_one_rank_did_not_use_costs_it_one_read(ranks):
    """However many parameters and buckets, of two dtypes; the others have no doubt."""
    first, second = ranks(2).run(steady, [NUM, 1], True, False)
    assert first == {} and places(second) == ["ddp/bucket_comm.py"]


def test_what_nobody_used_costs_one_read(ranks):
    for found in ranks(2).run(steady, [3, 2], False, False):
        assert places(found) == ["ddp/bucket_comm.py"]


def test_a_scaled_step_reads_its_decision_once(ranks):
    for found in ranks(2).run(steady, [NUM, NUM], True, True):
        assert places(found) == ["optim/scaler.py"]

"""A steady step of ZeRO reads no tensor value on the host, but once where a parameter is unused."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn, optim

from tests.ddp.zero.beside_one_process import DIM, TINY
from tests.host_reads import HostReads
from torchdistpackage.comm.creation import world
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.optim.clip import clip_grad_norm_
from torchdistpackage.optim.scaler import GradScaler

STAGES = [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "reshard_after_forward": True}]
stages = pytest.mark.parametrize("options", STAGES, ids=["1", "2", "3", "3-resharded"])


class Chosen(nn.Module):
    """Six parameters of it are used by no rank, and six by another than this one."""

    def __init__(self, *, unused: bool):
        super().__init__()
        self.used = nn.Sequential(nn.Linear(DIM, 9), nn.Tanh(), nn.Linear(9, DIM))
        self.ways = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(9 if unused else 0))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        first = 3 * (rank % 2)
        for way in self.ways[first : first + 3]:
            x = way(x)
        return self.used(x)


def steady(how: str, options: dict, unused: bool = False) -> Counter[str]:
    """What a fourth step reads."""
    torch.manual_seed(1)
    net = Chosen(unused=unused)
    inner = optim.AdamW(
        net.parameters(), fused=True
    )  # the others read their step count, on the CPU
    optimizer = ZeroOptimizer(inner, net, bucket_cap_mb=TINY, **options)
    scaler = GradScaler(group=world()) if how == "scaled" else None

    def step() -> None:
        loss = net(torch.ones(2, DIM), world().rank()).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if how == "clipped":
            clip_grad_norm_(optimizer, 1.0, group=world())
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with HostReads() as reads:
        step()
    return reads.found


@pytest.mark.few(4)
@stages
@pytest.mark.parametrize("how", ["plain", "clipped"])
def test_a_steady_step_reads_nothing(pool, how, options):
    assert pool(2).run(steady, how, options, transport="late") == [{}] * 2


@stages
def test_of_a_scaled_step_only_the_scaler_reads_whether_it_counts(pool, options):
    for found in pool(2).run(steady, "scaled", options, transport="late"):
        assert [where.split(":")[0] for where in found] == ["optim/scaler.py"]
        assert sum(found.values()) == 1


@pytest.mark.few(3)
@stages
@pytest.mark.parametrize("how", ["plain", "clipped"])
def test_any_number_of_unused_parameters_is_one_read(pool, how, options):
    if options.get("reshard_after_forward"):
        pytest.skip("there all ranks run the same submodules")
    for found in pool(2).run(steady, how, options, True, transport="late"):
        assert [where.split(":")[0] for where in found] == ["ddp/zero/grad_buffer.py"]
        assert sum(found.values()) == 1

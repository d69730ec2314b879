"""NativeScalerPP: scaling, clipping and the step in one call, on all ranks alike."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.compat.torchdistpackage.mixed_precision import NativeScalerPP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.double()

    def forward(self, x):
        return self.body(x)


def data(step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 5, dtype=torch.float64, generator=draw)


def one_process(mode: str, bad: int) -> list[torch.Tensor]:
    """What torch alone makes of all the data, without the bad step."""
    net = Toy()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        net(data(step)).square().mean().backward()
        if mode == "norm":
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        else:
            nn.utils.clip_grad_value_(net.parameters(), 0.01)
        if step != bad:
            optimizer.step()
    return [p.detach() for p in net.parameters()]


def with_zero(mode: str, stage: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    net = Toy()
    optimizer = ZeroOptimizer(torch.optim.AdamW(net.named_parameters(), lr=0.1), net, stage=stage)
    scaler = NativeScalerPP(init_scale=2.0**10)
    for step in range(3):
        optimizer.zero_grad()
        loss = net(data(step).chunk(size)[rank]).square().mean()
        if step == 1 and rank == size - 1:
            loss = loss * float("inf")
        limit = 0.05 if mode == "norm" else 0.01
        scaler(loss, optimizer, clip_grad=limit, clip_mode=mode, parameters=net.parameters())
    optimizer.finish()
    for mine, truth in zip(net.parameters(), one_process(mode, bad=1), strict=True):
        torch.testing.assert_close(mine.detach(), truth, rtol=0, atol=1e-7)
    assert scaler.state_dict()["scale"] == 2.0**9


@pytest.mark.parametrize(
    ("mode", "stage"),
    [("norm", 1), ("value", 2), pytest.param("norm", 2, marks=pytest.mark.full)],
)
def test_shards_are_scaled_clipped_and_skipped_as_one_process_would(ranks, mode, stage):
    """The gradients of the bad step are those of one rank; its sum goes to all owners."""
    ranks(2).run(with_zero, mode, stage)


def stages() -> None:
    """A pipeline whose backwards somebody else ran, of a loss that only the last stage had."""
    tpc.setup_process_groups([("pipe", 2)])
    whole, rank = Toy(), dist.get_rank()
    mine = copy.deepcopy(whole.body[: 2 if rank == 0 else None][2 * rank :])
    scaler, loss_scale = NativeScalerPP(), 2.0**16
    optimizer = torch.optim.SGD(mine.parameters(), lr=1.0)
    whole(data(0)).square().mean().backward()
    twins = whole.body[2 * rank : 2 * rank + 1].parameters()
    for p, twin in zip(mine.parameters(), twins, strict=True):
        p.grad = twin.grad * loss_scale
    expected = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    assert scaler(None, optimizer, need_update=False) is None
    norm = scaler(None, optimizer, clip_grad=0.01, parameters=mine.parameters())
    torch.testing.assert_close(norm, expected)
    twins = whole.body[2 * rank : 2 * rank + 1].parameters()
    for p, twin in zip(mine.parameters(), twins, strict=True):
        torch.testing.assert_close(p.detach(), (twin - 0.01 * twin.grad / expected).detach())


def test_stages_of_a_pipeline_clip_by_one_norm(ranks):
    ranks(2).run(stages)


def refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    with pytest.raises(ValueError, match="clip_mode is 'agc'"):
        NativeScalerPP()(None, optimizer, clip_mode="agc")


def test_a_mode_that_is_none_is_refused(pool):
    pool(1).run(refused)

"""In a loop of one's own: what ZeRO holds is saved so that it loads with ZeRO or without."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchdistpackage.checkpoint.load import load
from torchdistpackage.checkpoint.parts import Params
from torchdistpackage.checkpoint.save import save
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.layout.layout import Layout
from torchdistpackage.topology.mesh import topology


class Momentum(torch.optim.SGD):
    """A class of one's own, which therefore gets whole parameters."""


OPTIMIZERS = {
    "cut": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "whole": lambda ps: Momentum(ps, lr=0.1, momentum=0.9),
}


def model(salt: int, memory_format: torch.memory_format) -> nn.Module:
    """Odd sizes, a scalar, a frozen parameter, and a kernel whose dims lie otherwise in memory."""
    torch.manual_seed(salt)
    m = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(20, 7), nn.Linear(7, 3))
    m.register_parameter("gain", nn.Parameter(torch.tensor(1.5)))
    m = m.double().to(memory_format=memory_format)
    m[3].bias.requires_grad_(False)
    return m


def step(m: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=draw)
    optimizer.zero_grad()
    (m(x) * m.gain).square().sum().backward()
    optimizer.step()


def made(salt: int, how: str, stage: int, layout=torch.contiguous_format) -> tuple[nn.Module, Any]:
    m = model(salt, layout)
    plain = OPTIMIZERS[how]([p for p in m.parameters() if p.requires_grad])
    return m, ZeroOptimizer(plain, m, stage=stage) if stage else plain


def common(m: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    params: Params = {n: (p, Layout(n, tuple(p.shape))) for n, p in m.named_parameters()}
    world = topology((("data", dist.get_world_size()),), dist.get_world_size())
    return {
        "params": params,
        "topology": world,
        "rank": dist.get_rank(),
        "optimizer": optimizer,
    }


def write(folder: str, how: str, stage: int) -> None:
    m, optimizer = made(1, how, stage, torch.channels_last)
    for number in (1, 2):
        step(m, optimizer, number)
    save(folder, step=2, tokens=0, **common(m, optimizer))


def read(folder: str, how: str, stage: int) -> dict[str, Tensor]:
    """Parameters after one step more."""
    m, optimizer = made(9, how, stage)
    step(m, optimizer, 7)
    load(f"{folder}/step_000002", **common(m, optimizer))
    step(m, optimizer, 3)
    if stage:
        optimizer.finish()
    return {n: p.detach().clone() for n, p in m.named_parameters()}


def straight(how: str) -> dict[str, Tensor]:
    m, optimizer = made(1, how, 0)
    for number in (1, 2, 3):
        step(m, optimizer, number)
    return {n: p.detach() for n, p in m.named_parameters()}


CHANGES = [((2, 1), (1, 0)), ((1, 0), (3, 1)), ((3, 2), (2, 3)), ((2, 3), (3, 1))]
SMALL_SET = [("cut", *CHANGES[0]), ("cut", *CHANGES[1]), ("whole", *CHANGES[2])]


@pytest.mark.parametrize(
    ("how", "before", "after"),
    [
        pytest.param(how, *pair, marks=[] if (how, *pair) in SMALL_SET else pytest.mark.full)
        for how in OPTIMIZERS
        for pair in CHANGES
    ],
)
def test_zero_of_any_size_and_stage_goes_on_from_any_other(ranks, tmp_path, how, before, after):
    """(ranks, stage), stage 0 being the plain optimizer."""
    ranks(before[0]).run(write, str(tmp_path), how, before[1])
    truth = ranks(1).run(straight, how)[0]
    for found in ranks(after[0]).run(read, str(tmp_path), how, after[1]):
        for name, parameter in truth.items():
            torch.testing.assert_close(found[name], parameter, rtol=1e-10, atol=1e-12, msg=name)

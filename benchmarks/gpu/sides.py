"""A small model trained in each of the package's ways, as one function that makes a step.

Small enough that a step's kernels fit into the queue of launches: a full one would make the
host wait, which says nothing about the code.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.gpu.here import Here
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.optim.clip import clip_grad_norm_
from torchdistpackage.parallel.pipeline.pipeline import Pipeline

WIDTH, ROWS, CAP_MB = 256, 64, 0.3
"""The cap makes several buckets of the model."""
Step = Callable[[], object]


class Net(nn.Module):
    """With three parameters that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
        self.used = nn.Sequential(*layers)
        self.unused = nn.ParameterList(torch.zeros(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def model(here: Here, dtype: torch.dtype = torch.float32, *, unused: bool = False) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    return (net if unused else net.used).to(here.device, dtype)


def inputs(here: Here, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=draw).to(here.device, dtype)


def adamw(net: nn.Module, **options: object) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True, **options)


def naive(here: Here, *, dtype=torch.float32, clip=False, unused=False) -> Step:
    net = NaiveDDP(model(here, dtype, unused=unused), bucket_cap_mb=CAP_MB)
    return _step(net, adamw(net), inputs(here, dtype), clip=clip)


def zero(here: Here, stage: int, *, clip=False, **options: object) -> Step:
    net = model(here)
    optimizer = ZeroOptimizer(adamw(net), net, stage=stage, bucket_cap_mb=CAP_MB, **options)
    return _step(net, optimizer, inputs(here), clip=clip)


def pipeline(here: Here) -> Step:
    """All stages here: four microbatches, as without neighbours. Needs tpc."""
    net = model(here)
    x, optimizer = inputs(here), adamw(net)
    pipe = Pipeline(net, loss=lambda y: y.square().mean(), num_microbatches=4, schedule="1f1b")

    def step() -> object:
        optimizer.zero_grad()
        loss = pipe.step(x)
        optimizer.step()
        return loss

    return step


def _step(net: nn.Module, optimizer, x: Tensor, *, clip: bool) -> Step:
    def step() -> object:
        optimizer.zero_grad()
        loss = net(x).float().square().mean()
        loss.backward()
        if clip:
            held = optimizer if isinstance(optimizer, ZeroOptimizer) else net.parameters()
            clip_grad_norm_(held, 1.0)
        optimizer.step()
        return loss

    return step


SIDES: dict[str, Callable[[Here], Step]] = {
    "NaiveDDP": naive,
    "NaiveDDP, bf16 parameters": lambda here: naive(here, dtype=torch.bfloat16),
    "NaiveDDP, clipped": lambda here: naive(here, clip=True),
    "NaiveDDP, unused parameters": lambda here: naive(here, unused=True),
    "ZeRO 1": lambda here: zero(here, 1),
    "ZeRO 2": lambda here: zero(here, 2),
    "ZeRO 3": lambda here: zero(here, 3),
    "ZeRO 1, clipped": lambda here: zero(here, 1, clip=True),
}
"""Of which no step may make the host wait."""

"""Training programs of NaiveDDP and ZeRO that are the same on every rank; each returns tensors."""

from functools import partial

import torch
from torch import Tensor, nn

from torchdistpackage.ddp.comm_hooks import PowerSGD, bf16_compress
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer

NUM_STEPS = 3


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(
        *(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()),
        nn.Linear(64, 4),
    )
    return body.to(dtype)


def batch(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ddp(powersgd: bool = False, **options) -> list[Tensor]:
    if powersgd:
        options["comm_hook"] = PowerSGD(rank=2)
    net = NaiveDDP(model(torch.float32), bucket_cap_mb=0.004, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for i in range(NUM_STEPS):
        optimizer.zero_grad()
        net(batch(i)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def zero(stage: int, num_micro: int = 1, dtype: torch.dtype = torch.float32, **options):
    net = model(dtype)
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
    optimizer = ZeroOptimizer(
        inner, net, stage=stage, bucket_cap_mb=0.004, num_grad_acc_iter=num_micro, **options
    )
    for i in range(NUM_STEPS):
        for j in range(num_micro):
            net(batch(10 * i + j, dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    return [p.detach().clone() for p in net.parameters()]


PROGRAMS = {
    "ddp": ddp,
    "ddp-sync": partial(ddp, sync=True),
    "ddp-bf16-wire": partial(ddp, comm_hook=bf16_compress),
    "ddp-powersgd": partial(ddp, powersgd=True),
    "zero1": partial(zero, 1),
    "zero2": partial(zero, 2),
    "zero3": partial(zero, 3),
    "zero3-reshard": partial(zero, 3, reshard_after_forward=True),
    "zero1-wire": partial(zero, 1, wire_dtype=torch.bfloat16),
    "zero2-wire": partial(zero, 2, wire_dtype=torch.bfloat16),
    "zero1-bf16": partial(zero, 1, dtype=torch.bfloat16),
    "zero2-bf16": partial(zero, 2, dtype=torch.bfloat16),
    "zero3-bf16": partial(zero, 3, dtype=torch.bfloat16),
    "zero1-micro": partial(zero, 1, num_micro=2),
    "zero2-micro": partial(zero, 2, num_micro=2),
    "zero1-whole": partial(zero, 1, whole=True),
    "zero2-offload": partial(zero, 2, offload=True),
    "zero1-no-overlap": partial(zero, 1, overlap=False),
}

"""Who is compared: ways to train one model on two ranks, each built from its own replica.

A side is named as in the tables. What it needs of a step beyond forward, backward, `step` and
`zero_grad` is in `Trained`, so that one loop times all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.data_parallel.bars import EARLIER
from benchmarks.data_parallel.models import Case
from torchdistpackage.compat.torchdistpackage.mixed_precision import Bf16ZeroOptimizer
from torchdistpackage.ddp.auto import data_parallel
from torchdistpackage.ddp.comm_hooks import bf16_compress
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer

BEST_CAP_MB = 4
"""torch DDP's bucket, with views. 1, 2, 4 and 8 are alike within noise where the link is fast, 8 is
behind where it is slow (`--parts caps`)."""

FP32, BF16 = 1e-5, 2e-2
"""How far a loss may be from torch DDP's, relative, by what travels on the wire."""


@dataclass
class Trained:
    """average: between backward and step. finish: waits for what the last step left under way,
    None where nothing is."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Callable[[], object] = lambda: None
    finish: Callable[[], object] | None = None


@dataclass(frozen=True)
class Side:
    """build: of a fresh replica. tolerance: of its losses, None where they are its own.
    share: bytes on the wire, of those in fp32. warm_up_steps: until torch's DDP has rebuilt its
    buckets; NaiveDDP has chosen its own after three. yields: gloo's threads are as our comm
    leaves them, and not as torch does."""

    build: Callable[[nn.Module, Case], Trained]
    tolerance: float | None = FP32
    share: float = 1.0
    warm_up_steps: int = 2
    yields: bool = True


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def alone(model: nn.Module, case: Case) -> Trained:
    return Trained(model, adamw(model.parameters()))


def per_parameter(model: nn.Module, case: Case) -> Trained:
    def average() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)

    return Trained(model, adamw(model.parameters()), average)


def torch_ddp(model: nn.Module, case: Case, *, cap_mb: float | None = None, hook=None) -> Trained:
    """cap_mb: None leaves torch's own choice, without views."""
    if cap_mb is None:
        model = DistributedDataParallel(model)
    else:
        model = DistributedDataParallel(model, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return Trained(model, adamw(model.parameters()))


def bf16_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """torch's own bf16_compress_hook refuses gloo, and does this."""
    wire = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(wire, async_op=True)
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


def torch_zero(model: nn.Module, case: Case) -> Trained:
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=BEST_CAP_MB, gradient_as_bucket_view=True
    )
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-4, fused=True
    )
    return Trained(wrapped, optimizer)


def fsdp2(model: nn.Module, case: Case) -> Trained:
    """Parameters stay whole between forward and backward, which is its faster way here."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in case.blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return Trained(model, adamw(model.parameters()))


def naive(model: nn.Module, case: Case, **options: object) -> Trained:
    wrapped = NaiveDDP(model, **options)
    return Trained(wrapped, adamw(wrapped.parameters()))


def zero(model: nn.Module, case: Case, **options: object) -> Trained:
    optimizer = ZeroOptimizer(adamw(model.parameters()), model, **options)
    return Trained(model, optimizer, finish=optimizer.finish)


def earlier(model: nn.Module, case: Case) -> Trained:
    """The earlier package's name, over an optimizer alone; stage 2."""
    optimizer = Bf16ZeroOptimizer(adamw(model.parameters()), overlap_comm=True)
    return Trained(model, optimizer, finish=optimizer.finish)


def chosen(model: nn.Module, case: Case) -> Trained:
    batch = case.draw(torch.Generator().manual_seed(0))
    trained, optimizer = data_parallel(
        model, adamw(model.parameters()), lambda net: case.loss(net, *batch)
    )
    shares = isinstance(optimizer, ZeroOptimizer)
    return Trained(trained, optimizer, finish=optimizer.finish if shares else None)


ALONE = "no communication"
_torch = partial(Side, yields=False)
_best_cap = partial(torch_ddp, cap_mb=BEST_CAP_MB)
_zero_bf16 = partial(zero, stage=1, wire_dtype=torch.bfloat16)
_bf16_hook = partial(torch_ddp, cap_mb=BEST_CAP_MB, hook=bf16_hook)
SIDES = {
    ALONE: Side(alone, tolerance=None),
    "all-reduce per parameter": _torch(per_parameter),
    "torch DDP": _torch(torch_ddp),
    "torch DDP, best cap": _torch(_best_cap),
    "torch DDP, best cap, our threads": Side(_best_cap),
    "torch DDP, bf16 hook": _torch(_bf16_hook, BF16, share=0.5),
    "torch DDP, bf16 hook, our threads": Side(_bf16_hook, BF16, share=0.5),
    "torch DDP + ZeroRedundancy": _torch(torch_zero),
    "FSDP2": _torch(fsdp2),
    "NaiveDDP": Side(naive, warm_up_steps=4),
    "NaiveDDP, bf16 wire": Side(
        partial(naive, comm_hook=bf16_compress), BF16, share=0.5, warm_up_steps=4
    ),
    "ZeRO-1": Side(partial(zero, stage=1)),
    "ZeRO-2": Side(partial(zero, stage=2)),
    EARLIER: Side(earlier),
    "ZeRO-3": Side(partial(zero, stage=3)),
    "ZeRO, chosen": Side(chosen, warm_up_steps=4),
    "ZeRO-1, bf16 wire": Side(_zero_bf16, BF16, share=0.5),
}
CAPS = {f"torch DDP, {cap} MiB": _torch(partial(torch_ddp, cap_mb=cap)) for cap in (1, 2, 4, 8)}

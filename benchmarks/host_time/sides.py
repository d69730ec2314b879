"""Who is compared: a step by this package, by torch's own machinery, and without any.

All tensors are tiny, so that a step is what its Python and its dispatch take. Within a part the
first side is the bare loop, the second torch's, and the others are ours.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.tensor_parallel.sides import Case, by_hand, dtensor, make_plain, ours
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.parallel.pipeline.pipeline import Pipeline

Step = Callable[[], object]

WIDTH, NUM_LAYERS, ROWS = 8, 8, 4
BLOCK = Case(dim=16, heads=2, seq_len=4, batch=1, calls=1)
NUM_MICROBATCHES = 8
CPU = torch.device("cpu")


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), fused=True)


# -- data parallel -------------------------------------------------------------------------------


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Zero, forward, backward, update of one batch."""
    x = torch.randn(ROWS, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def bare_training() -> Step:
    model = chain()
    return training(model, adamw(model))


def torch_ddp() -> Step:
    model = DistributedDataParallel(chain(), gradient_as_bucket_view=True)
    return training(model, adamw(model))


def fsdp2(reshards: bool) -> Step:
    mesh, model = dist.init_device_mesh("cpu", (dist.get_world_size(),)), chain()
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
    return training(model, adamw(model))


def naive_ddp() -> Step:
    model = NaiveDDP(chain())
    return training(model, adamw(model))


def zero(stage: int) -> Step:
    model = chain()
    return training(model, ZeroOptimizer(adamw(model), model, stage=stage))


# -- one block, tensor parallel ------------------------------------------------------------------


def block(make: Callable[[Case, bool], Callable[[Tensor], Tensor]], sequence: bool) -> Step:
    """Forward and backward of one block."""
    called = make(BLOCK, sequence)
    rows = BLOCK.seq_len // (dist.get_world_size() if sequence else 1)
    x = torch.randn(rows, BLOCK.batch, BLOCK.dim)
    factor = torch.randn_like(x)

    def step() -> None:
        called(x.detach().requires_grad_()).backward(factor)

    return step


def plain_block(case: Case, sequence: bool) -> Callable[[Tensor], Tensor]:
    return make_plain(case)


# -- a step of a schedule, in microbatches -------------------------------------------------------


def stages_of(placement: tuple[int, ...]) -> dict[int, nn.Module]:
    """This rank's stages, by number, of equal length."""
    layers, length = chain(), NUM_LAYERS // len(placement)
    return {
        s: layers[s * length : (s + 1) * length]
        for s, rank in enumerate(placement)
        if rank == dist.get_rank()
    }


def batch() -> Tensor:
    return torch.randn(NUM_MICROBATCHES * ROWS, WIDTH)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def bare_microbatches(placement: tuple[int, ...]) -> Step:
    """This rank's stages alone, on what it draws itself."""
    stages, x = list(stages_of(placement).values()), torch.randn(ROWS, WIDTH)

    def step() -> None:
        for _ in range(NUM_MICROBATCHES):
            for stage in stages:
                y = x.detach().requires_grad_()
                (stage(y).square().mean() / NUM_MICROBATCHES).backward()

    return step


def torch_pipeline(placement: tuple[int, ...], schedule: Callable) -> Step:
    stages, x = stages_of(placement), batch()
    made = [PipelineStage(stage, s, len(placement), CPU) for s, stage in stages.items()]
    given = made[0] if schedule in (Schedule1F1B, ScheduleGPipe) else made
    runtime = schedule(given, NUM_MICROBATCHES, loss_fn=mean_square)
    args = (x,) if 0 in stages else ()
    options = {"target": x} if len(placement) - 1 in stages else {}
    return lambda: runtime.step(*args, **options)


def pipeline(placement: tuple[int, ...], schedule: str) -> Step:
    stages, x = stages_of(placement), batch()
    pipe = Pipeline(
        list(stages.values()),
        loss=mean_square,
        schedule=schedule,
        num_microbatches=NUM_MICROBATCHES,
        chunks=len(placement) // 2,
        group=dist.group.WORLD,
        check=False,
    )
    args = (x,) if 0 in stages else ()
    targets = x if len(placement) - 1 in stages else None
    return lambda: pipe.step(*args, targets=targets)


def schedules() -> dict[str, dict[str, Callable[[], Step]]]:
    two, loop, vee = (0, 1), (0, 1, 0, 1), (0, 1, 1, 0)
    peers = {
        "gpipe": (two, ScheduleGPipe),
        "1f1b": (two, Schedule1F1B),
        "interleaved": (loop, ScheduleInterleaved1F1B),
        "interleaved-zb": (loop, ScheduleInterleavedZeroBubble),
        "zb-v": (vee, ScheduleZBVZeroBubble),
    }
    return {
        f"microbatch of {name}": {
            "bare": partial(bare_microbatches, placement),
            "torch.distributed.pipelining": partial(torch_pipeline, placement, peer),
            "Pipeline": partial(pipeline, placement, name),
        }
        for name, (placement, peer) in peers.items()
    }


PARTS: dict[str, dict[str, Callable[[], Step]]] = {
    "step of data parallel": {
        "bare": bare_training,
        "DistributedDataParallel": torch_ddp,
        "NaiveDDP": naive_ddp,
    },
    "step of ZeRO 1 and 2": {
        "bare": bare_training,
        "FSDP2, whole between": partial(fsdp2, False),
        "ZeRO-1": partial(zero, 1),
        "ZeRO-2": partial(zero, 2),
    },
    "step of ZeRO 3": {
        "bare": bare_training,
        "FSDP2": partial(fsdp2, True),
        "ZeRO-3": partial(zero, 3),
    },
    "block": {
        "bare": partial(block, plain_block, False),
        "DTensor": partial(block, dtensor, False),
        "by hand": partial(block, by_hand, False),
        "ours": partial(block, ours, False),
    },
    "block, sequence parallel": {
        "bare": partial(block, plain_block, False),
        "DTensor": partial(block, dtensor, True),
        "by hand": partial(block, by_hand, True),
        "ours": partial(block, ours, True),
    },
    **schedules(),
}
"""Part -> side -> how it is made, on each rank."""

"""ArcFace by torchshard's names: the margin head split by class, the backbone data parallel.

    python examples/torchshard_arcface.py 1000000 32 3            classes, batch, steps; two ranks
    python examples/torchshard_arcface.py 1000 256 60 float64     and the dtype
    torchrun --nproc-per-node 4 examples/torchshard_arcface.py    or as many as torchrun makes

A sample is the binary code of its class, with noise. One process and the ranks learn the same.
"""

import math
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import torchdistpackage.compat.torchshard as ts
from torchdistpackage import NaiveDDP, run_or_launch, setup_distributed

BITS, WIDTH, MARGIN, SCALE = 20, 128, 0.2, 16.0


class ArcFace(nn.Module):
    def __init__(self, classes: int, dim: int | None):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(BITS, 256), nn.PReLU(), nn.Linear(256, WIDTH))
        self.head = ts.nn.ParallelLinear(WIDTH, classes, bias=False, dim=dim)
        ts.register_ddp_parameters_to_ignore(self)  # each rank's part of the head is its own

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        x, first = self.backbone(x), 0
        if self.head.dim is not None:
            x = ts.distributed.copy(ts.distributed.gather(x, dim=0))
            first = ts.distributed.get_rank() * len(self.head.weight)
        cos = F.linear(F.normalize(x), F.normalize(self.head.weight))
        rows = ((target >= first) & (target < first + cos.shape[1])).nonzero().squeeze(1)
        here = rows, target[rows] - first  # targets that are among my classes
        sin = (1 - cos[here].square()).clamp_min(1e-6).sqrt()
        phi = cos[here] * math.cos(MARGIN) - sin * math.sin(MARGIN)  # cos(angle + margin)
        logits = SCALE * cos.index_put(here, torch.where(cos[here] > 0, phi, cos[here]))
        ts.register_parallel_dim(logits, self.head.dim)
        return cos, ts.nn.functional.parallel_cross_entropy(logits, target)


def train(classes: int = 1000, batch: int = 256, steps: int = 60, dtype: str = "float32") -> None:
    torch.set_default_dtype(getattr(torch, dtype))
    rank, world_size, *_ = setup_distributed()
    ts.distributed.init_process_group(group_size=-1)

    def draw(number: int, parts: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        target = torch.randint(classes, (batch,), generator=generator)
        bits = (target.unsqueeze(1) >> torch.arange(BITS)) & 1
        x = 2.0 * bits - 1 + 0.3 * torch.randn(bits.shape, generator=generator)
        return x.chunk(parts)[rank], target

    def learn(parts: int, dim: int | None) -> None:
        torch.manual_seed(0)  # the split head starts as slices of the whole one
        model = ArcFace(classes, dim)
        if dim is not None:  # a rank's gradient is its samples' share of one mean: they add up
            model = NaiveDDP(model, process_group=dist.group.WORLD, reduce_op="sum")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        seen = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        seen.start()
        for number in range(steps):
            _, loss = model(*draw(number, parts))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number == min(steps, 3) - 1:  # later steps hold no more
                seen.stop()
        events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
        held = torch.tensor([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
        peak = held.cumsum(0).max().item() + sum(p.nbytes for p in model.parameters())
        x, target = draw(-1, parts)  # samples not seen before
        cos = ts.distributed.gather(model(x, target)[0].detach(), dim)
        accuracy = (cos.argmax(1) == target).float().mean().item()
        said = f"loss {loss.item():.5f}, accuracy {accuracy:.3f}, {peak / 2**20:.2f} MiB a rank"
        if rank == 0:
            print(f"{classes} classes, {parts} ranks: {said}")

    if rank == 0:
        learn(1, None)
    learn(world_size, -1)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_or_launch(train, *map(int, sys.argv[1:4]), *sys.argv[4:], num_procs=2)

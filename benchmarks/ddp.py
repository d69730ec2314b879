"""NaiveDDP beside torch's DistributedDataParallel on two ranks over loopback, whole steps.

A step is forward, backward, mean over the ranks, SGD. The limits, in the same rounds: the step of
one rank that talks to nobody (no data parallelism can be faster), and that plus one all-reduce of
all gradients at its end (what overlap has to beat). Losses of all must agree to 1e-5.
"""

from functools import partial

import torch
import torch.distributed as dist
from common import arguments, in_turns, local, rows, show, slowest, write
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchdistpackage.comm import primitives
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.models.gpt import GPT
from torchdistpackage.models.gpt_layout import GPTShape

SHAPE = GPTShape(layers=4, dim=256, heads=4, vocab=2048, seq_len=64)
SIDES = {
    "alone: no communication": lambda m: m,
    "alone + one all-reduce": lambda m: m,
    "NaiveDDP, 4 MiB": lambda m: NaiveDDP(m, bucket_cap_mb=4),
    "NaiveDDP, default": NaiveDDP,
    "torch DDP, 4 MiB views": lambda m: DistributedDataParallel(
        m, bucket_cap_mb=4, gradient_as_bucket_view=True
    ),
    "torch DDP, default": DistributedDataParallel,
}


def mlp() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))


def gpt() -> nn.Module:
    return GPT(SHAPE, dtype=torch.float32)


def mlp_loss(model: nn.Module, draw: torch.Generator) -> Tensor:
    return model(torch.randn(256, 1024, generator=draw)).square().mean()


def gpt_loss(model: nn.Module, draw: torch.Generator) -> Tensor:
    ids = torch.randint(SHAPE.vocab, (8, SHAPE.seq_len), generator=draw)
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.t().flatten())


CASES = {"mlp": (mlp, mlp_loss), "gpt": (gpt, gpt_loss)}


def rank_main(case: str, rounds: int) -> dict[str, list[float]]:
    rank = setup_distributed()[0]
    tpc.setup_process_groups([("data", 2)])
    make, loss_of = CASES[case]
    sides, draws, losses = {}, {}, {}

    def step(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss = loss_of(model, draws[name])
        loss.backward()
        if name == "alone + one all-reduce":
            grads = [p.grad for p in model.parameters()]
            flat = torch.cat([g.flatten() for g in grads])
            primitives.all_reduce(flat, dist.group.WORLD).div_(2)
            for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                g.copy_(part.view_as(g))
        optimizer.step()
        losses.setdefault(name, []).append(loss.item())

    for name, wrap in SIDES.items():
        torch.manual_seed(0)
        model = wrap(make())
        draws[name] = torch.Generator().manual_seed(rank)
        sides[name] = partial(step, name, model, torch.optim.SGD(model.parameters(), lr=0.1))
    times = in_turns(sides, rounds, primitives.barrier)
    expected = torch.tensor(losses["torch DDP, default"])
    for name, found in losses.items():
        alike = torch.allclose(torch.tensor(found), expected, rtol=1e-5, atol=0)
        assert alike or name.startswith("alone: "), f"{name}: losses {found}, not {expected}"
    tpc.destroy()
    leave()
    return times


def main() -> None:
    options = arguments(__doc__)
    results = {case: rows(slowest(local(rank_main, case, options.rounds))) for case in CASES}
    for case, table in results.items():
        best = min((row["median"], name) for name, row in table.items() if name[:5] == "torch")
        show(case, table, "ms per step", best[1])
    write(options.json, {"unit": "ms per step", "results": results})


if __name__ == "__main__":
    main()

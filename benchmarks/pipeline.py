"""Our 1F1B executor beside torch.distributed.pipelining's on two ranks over loopback.

`tiny` (eight 8x8 linears, four a rank) has next to no compute: what is left is the cost of a
microbatch's four messages and of the runtime. `real` (eight 512x512 linears with batch 32) shows
what that cost means beside compute. The limits, in the same rounds: half of one process's work
without messages, and the bare messages (a tensor to and fro, as often, in the schedule's order).
Gradients of all sides must be equal bit for bit. Times are of the slower rank.
"""

from functools import partial

import torch
import torch.distributed as dist
from common import arguments, in_turns, local, rows, show, slowest, write
from torch import nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.schedule.generate import build

CASES = {"tiny": (8, 4, 10), "real": (512, 32, 2)}


def chain(dim: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(dim, dim) for _ in range(8)))


def rank_main(case: str, num_microbatches: int, rounds: int) -> dict[str, list[float]]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = setup_distributed()[0]
    dim, batch, steps = CASES[case]
    group, cpu, m = dist.group.WORLD, torch.device("cpu"), num_microbatches
    x = torch.randn(m * batch, dim, generator=torch.Generator().manual_seed(1))
    cuts = x.chunk(m)
    ours, theirs = (chain(dim)[4 * rank : 4 * rank + 4] for _ in range(2))
    whole = chain(dim)
    executor = Executor(build("1f1b", 2, m), group, device=cpu)
    stage = PipelineStage(theirs, rank, 2, cpu)
    peer = Schedule1F1B(stage, m, loss_fn=lambda y, _: y.square().mean(), scale_grads=False)

    def forward(i: int, received):
        y = ours(cuts[i] if rank == 0 else received)
        return y.square().mean() if rank else y

    def torchs_step() -> None:
        peer.step(x) if rank == 0 else peer.step(target=x)

    def alone() -> None:
        for cut in cuts:
            whole(cut).square().mean().backward()

    def messages() -> None:
        sent, room = torch.zeros(batch, dim), torch.zeros(batch, dim)
        for _ in range(m):
            order = ("send", "receive") if rank == 0 else ("receive", "send")
            for what in order:
                dist.send(sent, 1 - rank) if what == "send" else dist.recv(room, 1 - rank)

    def repeated(module: nn.Module, step) -> None:
        for _ in range(steps):
            module.zero_grad()
            step()

    sides = {
        "ours": partial(repeated, ours, lambda: executor.run(forward)),
        "torch Schedule1F1B": partial(repeated, theirs, torchs_step),
        "one process, no messages": partial(repeated, whole, alone),
        "messages alone, one by one": partial(repeated, whole, messages),
    }
    times = in_turns(sides, rounds, primitives.barrier)
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad), "the gradients of the two differ"
    leave()
    return {name: [t / steps / m for t in measured] for name, measured in times.items()}


def main() -> None:
    options = arguments(__doc__)
    results = {}
    for case in CASES:
        for m in (4, 16):
            table = rows(slowest(local(rank_main, case, m, options.rounds)), 1e6)
            name = f"{case}, {m} microbatches"
            show(name, table, "us per microbatch", "torch Schedule1F1B")
            results[name] = table
    write(options.json, {"unit": "us per microbatch", "results": results})


if __name__ == "__main__":
    main()

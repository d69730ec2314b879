"""What the executor allocates between two computations, beside torch's schedules."""

import statistics
import tracemalloc

import torch
import torch.distributed as dist
from torch import nn

from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.schedule.generate import build

M, DIM = 24, 8


def bytes_per_microbatch(step, stage: nn.Module) -> float:
    """Median over the steady state of what Python allocates from one forward to the next.

    The most that is held at once above the start of the interval: what is freed in it counts too.
    """
    taken: list[int] = []

    def at_forward(*_: object) -> None:
        now, peak = tracemalloc.get_traced_memory()
        taken.append(peak - start[0])
        tracemalloc.reset_peak()
        start[0] = now

    for _ in range(2):
        step()
    hook = stage.register_forward_pre_hook(at_forward)
    start = [0]
    tracemalloc.start()
    step()
    tracemalloc.stop()
    hook.remove()
    return statistics.median(taken[M // 4 : -M // 4])


def allocations() -> tuple[float, float]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, cpu = dist.get_rank(), torch.device("cpu")
    x = torch.randn(M * 4, DIM)
    cuts = x.chunk(M)
    ours, theirs = (nn.Linear(DIM, DIM) for _ in range(2))
    executor = Executor(build("1f1b", 2, M), dist.group.WORLD, device=cpu)
    loss = lambda y, _: y.square().mean()  # noqa: E731
    peer = Schedule1F1B(PipelineStage(theirs, rank, 2, cpu), M, loss_fn=loss, scale_grads=False)

    def forward(s, i, received):
        y = ours(received if s else cuts[i])
        return loss(y, None) if s else y

    return (
        bytes_per_microbatch(lambda: executor.run(forward), ours),
        bytes_per_microbatch(lambda: peer.step(x) if rank == 0 else peer.step(target=x), theirs),
    )


def test_a_microbatch_allocates_at_most_a_quarter_of_what_torchs_does(ranks):
    for ours, theirs in ranks(2).run(allocations):
        assert 0 < ours <= theirs / 4, (ours, theirs)

"""What the executor allocates between two computations, beside torch's schedules."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.pipeline.held import bytes_per_microbatch
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.schedule.generators import build

M, DIM = 24, 8


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
        bytes_per_microbatch(lambda: executor.run(forward), ours, M),
        bytes_per_microbatch(lambda: peer.step(x) if rank == 0 else peer.step(target=x), theirs, M),
    )


@pytest.mark.own_transport("measures memory, of which the late transport holds copies")
def test_a_microbatch_allocates_at_most_a_quarter_of_what_torchs_does(ranks):
    for ours, theirs in ranks(2).run(allocations):
        assert 0 < ours <= theirs / 4, (ours, theirs)

"""What a rank holds at once does not grow with the number of microbatches."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.schedule.generate import build

DIM, ROWS = 256, 128


def most_bytes(name: str, m: int) -> int:
    """Of all tensors alive in some forward of the last of three runs; storages counted once."""
    torch.manual_seed(0)
    stage = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
    x, most = torch.randn(ROWS, DIM), 0
    executor = Executor(build(name, 2, m), dist.group.WORLD, device=torch.device("cpu"))

    def forward(s, i, received):
        nonlocal most
        y = stage(received if s else x)
        tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor]
        storages = [t.untyped_storage() for t in tensors]
        most = max(most, sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
        return y.square().mean() if s else y

    for _ in range(3):
        most = 0
        executor.run(forward)
    return most


def both(name: str) -> tuple[int, int]:
    return most_bytes(name, 12), most_bytes(name, 48)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_live_tensors_do_not_grow_with_microbatches(ranks, name):
    for few, many in ranks(2).run(both, name):
        assert many <= few + ROWS * DIM * 4 // 2, (few, many)

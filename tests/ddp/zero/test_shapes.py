"""Parameters of any shape: without dims, without elements, and nothing else but those."""

import pytest
import torch
from torch import Tensor, nn

from tests.ddp.zero.beside_one_process import DIM, TINY, compare
from torchdistpackage.comm.creation import world
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.ddp.zero.shard_bounds import SLICE_BYTES

STAGES = [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "reshard_after_forward": True}]


class Scaled(nn.Module):
    def __init__(self, *, layer: bool):
        super().__init__()
        torch.manual_seed(1)
        self.none, self.scale = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.tensor(1.5))
        self.layer = nn.Linear(DIM, 1) if layer else nn.Identity()
        self.no_rows = nn.Parameter(torch.zeros(0, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale + self.none.sum() + (x @ self.no_rows.T).sum()


def train(options: dict) -> None:
    for layer in (True, False):
        for size in (TINY, 25):
            build = lambda layer=layer: Scaled(layer=layer).double()  # noqa: E731
            compare(build, world(), bucket_cap_mb=size, **options)


@pytest.mark.few(2)
@pytest.mark.parametrize("options", STAGES, ids=["1", "2", "3", "3-resharded"])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_training_is_that_of_one_process(ranks, size, options):
    ranks(size).run(train, options)


class Odd(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = [(97, 13), (13,), (31, 97), (31,), (1,)]
        self.weights = nn.ParameterList([torch.randn(size) for size in sizes])


def aligned(dtype: torch.dtype, wire: torch.dtype | None, whole: bool) -> list[int]:
    net = Odd().to(dtype)
    zero = ZeroOptimizer(
        torch.optim.AdamW(net.parameters()),
        net,
        bucket_cap_mb=0.01,
        wire_dtype=wire,
        whole=whole,
    )
    for bucket in zero._buckets:
        for flat in (bucket.parameters.flat, bucket.bucket_comm.gradients.flat):
            mine = bucket.layout.mine(flat)
            from_begin = mine.data_ptr() - flat.data_ptr()
            assert from_begin % SLICE_BYTES == 0 and mine.nbytes % SLICE_BYTES == 0
            itemsize = min(x.itemsize for x in (dtype, flat.dtype, wire or flat.dtype))
            assert from_begin // flat.itemsize * itemsize % SLICE_BYTES == 0, "on the wire too"
    return [sum(s.tensor.numel() for s in zero.shards), sum(p.numel() for p in net.parameters())]


@pytest.mark.few(2)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_every_slice_begins_and_ends_at_128_bytes(ranks, size, whole):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for wire in (None, torch.bfloat16):
            found = ranks(size).run(aligned, dtype, wire, whole)
            assert sum(held for held, _ in found) == found[0][1]

"""Parameters of any shape: without dims, without elements, and nothing else but those."""

import pytest
import torch
from torch import Tensor, nn

from tests.ddp.zero.beside_one_process import DIM, TINY, compare
from torchdistpackage.comm.world import world

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


@pytest.mark.parametrize("options", STAGES, ids=["1", "2", "3", "3-resharded"])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_training_is_that_of_one_process(ranks, size, options):
    ranks(size).run(train, options)

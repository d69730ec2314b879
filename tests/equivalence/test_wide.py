"""What goes on in float32 by itself is compared to 1e-9 too, so a small mistake in it shows."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.models.coverage import settings
from torchdistpackage import NaiveDDP, tpc
from torchdistpackage.equivalence.wide import float64_within
from torchdistpackage.models.transformers_meta import on_meta
from torchdistpackage.testing import ParityModel, prove


class RootMeanSquare(nn.Module):
    """A norm that goes on in float32, as those of transformers, and is `factor` times as large."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        single = x.to(torch.float32)
        return (single * single.square().mean(-1, True).rsqrt() * self.factor).to(x.dtype)


def build(wrong: float) -> ParityModel:
    net = nn.Sequential(nn.Linear(8, 8), RootMeanSquare(), nn.Linear(8, 1)).double()
    if tpc.rank == 1:
        net[1].factor += wrong
    model, optimizer = NaiveDDP(net), torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return ParityModel(net, step, optimizer)


def batch(number: int, index: int, num: int) -> Tensor:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return x.chunk(num)[index]


@pytest.mark.parametrize("wrong", [0.0, 1e-6])
def test_a_mistake_smaller_than_the_rounding_of_float32_allows_is_named(pool, wrong: float):
    report = prove(partial(build, wrong), batch, [{"data": 2}], pool=pool)
    assert report.is_right == (wrong == 0), str(report)
    if report.first is not None:
        assert report.first[1].module == "1"


def test_torch_is_as_before_also_after_an_exception():
    with pytest.raises(ZeroDivisionError), float64_within():
        assert torch.ones(1, dtype=torch.float32).float().dtype is torch.float64
        _ = 1 / 0
    assert torch.ones(1).float().dtype is torch.float32
    assert torch.float is torch.float32 is not torch.float64


def test_parameters_that_a_class_makes_in_float32_are_float64_in_a_run_of_float64():
    model = on_meta(settings("xlnet"), torch.float64)
    assert {x.dtype for x in model.parameters()} == {torch.float64}

"""Float8 products: those of the rounded factors, split or not, and a loss that goes down alike."""

import pytest
import torch
import torch.nn.functional as F

from tests.each import each
from tests.tells import facts_pattern
from tests.train import parity
from torchdistpackage.comm import collectives, primitives
from torchdistpackage.errors import ConfigError
from torchdistpackage.parallel.tensor.float8 import (
    E4M3,
    float8_linear,
    rounded_rows,
    scaled_product,
    use_float8,
)
from torchdistpackage.parallel.tensor.linear import ColumnLinear, ParallelMlp

CPU = torch.device("cpu")


def restored(x: torch.Tensor) -> torch.Tensor:
    rows, factor = rounded_rows(x)
    assert rows.dtype is E4M3
    return rows.double() * factor.double()


def test_rows_keep_their_largest_element_and_three_bits_of_the_others():
    x = torch.randn(7, 32) * torch.logspace(-6, 6, 7).unsqueeze(1)
    x[3] = 0
    back = restored(x)
    torch.testing.assert_close(back.abs().amax(1), x.double().abs().amax(1), rtol=1e-6, atol=0)
    apart = (back - x).abs() / x.double().abs().amax(1, keepdim=True).clamp(min=1e-30)
    assert apart.max() <= 2**-4 and not back[3].any()


def test_products_and_gradients_are_those_of_the_rounded_factors():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 32), torch.randn(16, 32)
    bias, grad = torch.randn(16), torch.randn(2, 5, 16)
    given = [t.requires_grad_() for t in (x, weight, bias)]
    y = float8_linear(*given)
    flat, of_y = x.detach().flatten(0, 1), grad.flatten(0, 1)
    expected = restored(flat) @ restored(weight.detach()).t() + bias.detach()
    torch.testing.assert_close(y.detach().flatten(0, 1).double(), expected, rtol=1e-5, atol=1e-5)
    of_x, of_weight, of_bias = torch.autograd.grad(y, given, grad)
    wanted = restored(of_y) @ restored(weight.detach().t()).t()
    torch.testing.assert_close(of_x.flatten(0, 1).double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_weight, of_y.t() @ flat)
    torch.testing.assert_close(of_bias, of_y.sum(0))
    with torch.no_grad():
        plain = F.linear(x, weight, bias)
        apart = float((y - plain).norm() / plain.norm())
    assert 0.001 < apart < 0.05, "rounded, and not by much"


def split_column(sequence_parallel: bool) -> None:
    group = primitives.world()
    torch.manual_seed(1)
    whole, x = torch.randn(32, 32), torch.randn(4, 2, 32)
    layer = ColumnLinear(32, 32, bias=False, sequence_parallel=sequence_parallel, group=group)
    rank = group.rank()
    with torch.no_grad():
        layer.weight.copy_(whole.chunk(2)[rank])
    assert use_float8(layer, CPU) == [""]
    mine = x.chunk(2)[rank] if sequence_parallel else x
    y = layer(mine)
    # a row of x and a row of the weight are whole on a rank, so the cut changes no number
    expected = scaled_product(x.view(-1, 32), whole).view(4, 2, 32).chunk(2, -1)[rank]
    torch.testing.assert_close(y.detach(), expected, rtol=1e-6, atol=1e-6)
    mlp = ParallelMlp(32, 64, sequence_parallel=sequence_parallel, group=group)
    assert use_float8(mlp, CPU) == ["up", "down"]
    mine = mine.clone().requires_grad_()
    out = mlp(mine)
    out.square().sum().backward()
    assert out.shape == mine.shape and mine.grad is not None and bool(mine.grad.isfinite().all())
    if not sequence_parallel:
        first, second = collectives.gather(out.detach(), 0, group).chunk(2)
        assert torch.equal(first, second)


def test_split_layers_multiply_in_float8(ranks):
    ranks(2).run(each, split_column, [(False,), (True,)])


def test_features_that_do_not_fit_and_models_without_layers_are_refused(ranks):
    ranks(1).run(refused)


def refused() -> None:
    layer = ColumnLinear(24, 32, group=primitives.world())
    with pytest.raises(ConfigError, match=facts_pattern("16", "1 weights", "(32, 24)")):
        use_float8(layer, CPU)
    with pytest.raises(ConfigError, match="no ColumnLinear or RowLinear"):
        use_float8(torch.nn.Linear(16, 16), CPU)


RUN = [
    *("model.layers=2", "model.dim=32", "model.heads=2", "data.seq_len=32", "train.steps=200"),
    *("data.global_batch=8", "pipeline.microbatches=1", "train.eval_batches=1"),
    *("parallel.data=1", "precision.dtype=bf16"),
]


def curve(extra: list[str]) -> list[float]:
    run = parity.trainer([*RUN, *extra])
    losses = [run.train_step(step).wait().loss for step in range(1, 201)]
    run.close()
    return losses


@pytest.mark.full
@pytest.mark.own_transport("trains on one rank")
def test_the_loss_of_200_steps_is_within_two_percent_of_that_of_bf16(ranks):
    (plain,) = ranks(1).run(curve, [], timeout_s=500)
    (narrow,) = ranks(1).run(curve, ["precision.fp8=linear"], timeout_s=500)
    assert plain != narrow
    assert sum(narrow[-20:]) == pytest.approx(sum(plain[-20:]), rel=0.02)
    assert plain[-1] < 0.8 * plain[0], "it learns"

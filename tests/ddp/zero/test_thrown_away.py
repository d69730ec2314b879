"""What counts as a gradient when something out of the ordinary came between, and in which order."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from tests.ddp.zero.beside_one_process import DIM, adamw
from tests.ddp.zero.test_safety import backward, expect_same, net, plainly, some, train, wrap
from tests.ddp.zero.test_stages import stages
from torchdistpackage.ddp.zero import param_buffer as sent_by
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import LayoutError


def thrown_away(options: dict) -> None:
    model, plain, xs = net(), net(), some(3)
    zero, truth = wrap(model, options), adamw(plain)
    plainly(plain, truth, [xs[0], xs[2]])
    train(model, zero, xs[:1])
    backward(model, xs[1])
    zero.reducer.finish()
    zero.inner.zero_grad()
    train(model, zero, xs[2:])
    zero.finish()
    expect_same(model, plain)


@stages
def test_sums_set_to_none_are_not_added_to(ranks, options):
    ranks(2).run(thrown_away, options)


def held_back(options: dict) -> None:
    """A backward that counts, one that only accumulates, and a step."""
    model, plain, xs = net(), net(), some(2)
    zero, truth = wrap(model, options), adamw(plain)
    for x in xs:
        plain(x).square().mean().backward()
    truth.step()
    backward(model, xs[0])
    with zero.reducer.no_sync():
        backward(model, xs[1])
    zero.step()
    zero.finish()
    expect_same(model, plain)


@stages
def test_a_backward_without_sum_may_follow_one_with(ranks, options):
    ranks(2).run(held_back, options)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise RuntimeError("on its way")


def failed() -> None:
    """Its last buckets had left, the first had not."""
    model, plain, xs = net(), net(), some(3)
    zero, truth = wrap(model, {}), adamw(plain)
    plainly(plain, truth, [xs[0], xs[2]])
    train(model, zero, xs[:1])
    backward(model, xs[1])  # whose sums count when the next one fails
    handle = model[0].register_forward_hook(lambda m, args, y: Fails.apply(y))
    with pytest.raises(RuntimeError, match="on its way"):
        backward(model, xs[1])
    handle.remove()
    train(model, zero, xs[2:])
    zero.finish()
    expect_same(model, plain)


def test_a_backward_that_fails_takes_all_sums_with_it(ranks):
    ranks(2).run(failed)


def gathers(finished: bool) -> list[int]:
    model = net()
    zero = wrap(model, {})
    train(model, zero, some(1))
    backward(model, some(1)[0])
    order: list[int] = []
    real = sent_by.ParamBuffer.send
    ours = {id(bucket.parameters): b for b, bucket in enumerate(zero._buckets)}

    def send(self) -> None:
        order.append(ours[id(self)])
        real(self)

    sent_by.ParamBuffer.send = send
    try:
        if finished:
            zero.reducer.finish()
        zero.step()
    finally:
        sent_by.ParamBuffer.send = real
    zero.finish()
    return order


def gathered_alike() -> None:
    order = gathers(True)
    assert len(order) > 2
    assert order == gathers(False)


def test_gathers_begin_in_one_order_whoever_waited_before(ranks):
    ranks(2).run(gathered_alike)


class Rotated(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.angles = nn.Parameter(torch.randn(DIM, 5, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.randn(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.angles).abs() * self.scale


def complex_parameter(options: dict) -> None:
    model, plain, xs = Rotated(), Rotated(), some(3)
    zero, truth = wrap(model, options), adamw(plain)
    plainly(plain, truth, xs)
    train(model, zero, xs)
    zero.finish()
    expect_same(model, plain)


@stages
def test_complex_parameters(ranks, options):
    ranks(2).run(complex_parameter, options)


def without_module() -> None:
    with pytest.raises(
        ValueError, match="stage 3 frees and gathers parameters while a module runs"
    ):
        ZeroOptimizer(adamw(net()), stage=3)


def test_stage_3_needs_the_module_whose_use_gathers(ranks):
    ranks(1).run(without_module)


def scripted() -> None:
    """It reads parameters without asking whether they are there."""
    model, plain, xs = net(), net(), some(3)
    with warnings.catch_warnings(action="ignore"):  # torch has newer ways
        model[2] = torch.jit.trace(model[2], torch.zeros(1, 9, dtype=torch.float64))
    with pytest.raises(LayoutError, match=r"1 modules made by torch.jit .*: 2; use stage 1"):
        wrap(model, {"stage": 3})
    zero, truth = wrap(model, {}), adamw(plain)
    plainly(plain, truth, xs)
    train(model, zero, xs)
    expect_same(model, plain)
    assert not zero._overlap


def test_around_scripted_modules_nothing_is_on_its_way(ranks):
    ranks(2).run(scripted)

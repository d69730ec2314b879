"""What would disconnect an optimizer from its module, or keep both for ever, and is not let."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp.zero.beside_one_process import DIM, TINY, adamw, batches
from tests.ddp.zero.test_stages import STAGES, stages
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import CommError, LayoutError


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(DIM, 9), nn.Tanh(), nn.Linear(9, 9), nn.Linear(9, 2)).double()


def wrap(model: nn.Module, options: dict) -> ZeroOptimizer:
    return ZeroOptimizer(adamw(model), model, bucket_cap_mb=TINY, **options)


def backward(model: nn.Module, x: Tensor) -> None:
    model(x.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, xs: list[Tensor]) -> None:
    for x in xs:
        backward(model, x)
        optimizer.step()
        optimizer.zero_grad()


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, xs: list[Tensor]) -> None:
    for x in xs:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def expect_same(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12, msg=name)


def some(steps: int) -> list[Tensor]:
    return list(batches(steps, dist.get_world_size()))


# -- wrapped again -------------------------------------------------------------------------


def wrapped_again(options: dict, how: str) -> None:
    model, plain, xs = net(), net(), some(6)
    truth, first = adamw(plain), wrap(model, options)
    plainly(plain, truth, xs)
    train(model, first, xs[:3])
    state = first.state_dict()
    if how == "removed":
        first.remove()
        with pytest.raises(LayoutError, match="was removed from its 6 parameters"):
            first.step()
    else:
        first.finish()
        with pytest.raises(LayoutError, match=r"^6 of 6 parameters have an owner .*: 0.weight"):
            wrap(model, options)
        del first
    second = wrap(model, options)
    second.load_state_dict(state)
    train(model, second, xs[3:])
    second.remove()
    expect_same(model, plain)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    backward(model, xs[0])  # as any module
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["removed", "dropped"])
@stages
def test_a_module_can_be_wrapped_again(ranks, options, how):
    ranks(2).run(wrapped_again, options, how)


def wrapped_twice() -> None:
    model = net()
    ddp = NaiveDDP(model)
    with pytest.raises(LayoutError, match=r"a NaiveDDP: 0.weight"):
        wrap(model, {})
    del ddp
    wrap(model, {})


def test_what_naive_ddp_owns_is_refused(ranks):
    ranks(2).run(wrapped_twice)


def wrapped_after() -> None:
    model = net()
    zero = wrap(model, {})
    with pytest.raises(CommError, match=r"parameters belong to a ZeroOptimizer.*: 0.weight"):
        NaiveDDP(model)
    zero.remove()
    train(NaiveDDP(model), adamw(model), some(1))


def test_what_it_owns_itself_is_refused_by_naive_ddp(ranks):
    ranks(2).run(wrapped_after)


# -- other memory, other objects -----------------------------------------------------------


def by_vector(model: nn.Module) -> None:
    parameters = list(model.parameters())
    vector = nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(vector, parameters)


def by_data(model: nn.Module) -> None:
    model[3].bias.data = model[3].bias.data.clone()


def by_dtype(model: nn.Module) -> None:
    model.to(torch.float32).to(torch.float64)


def disconnected(options: dict, how: Callable) -> None:
    model, xs = net(), some(2)
    zero = wrap(model, options)
    train(model, zero, xs[:1])
    zero.finish()
    how(model)
    with pytest.raises(LayoutError, match=r"^parameter 3.bias .* other memory"):
        train(model, zero, xs[1:])


def all_disconnected(options: dict) -> None:
    for how in (by_vector, by_data, by_dtype):
        disconnected(options, how)


@pytest.mark.few(2)
@stages
def test_other_memory_is_noticed_before_a_step(ranks, options):
    ranks(2).run(all_disconnected, options)


def assigned(part: bool) -> None:
    model, xs = net(), some(2)
    zero = wrap(model, {})
    train(model, zero, xs[:1])
    target = model[2] if part else model
    state = {key: value.clone() for key, value in target.state_dict().items()}
    with pytest.raises(LayoutError, match=f"parameter {'2' if part else '0'}.weight .* assign"):
        target.load_state_dict(state, assign=True)
        zero.step()


@pytest.mark.parametrize("part", [False, True])
def test_other_objects_are_noticed(ranks, part):
    ranks(2).run(assigned, part)


# -- dropped -------------------------------------------------------------------------------


def dropped() -> None:
    for options in [*STAGES, {"stage": 1, "overlap": False}]:
        model = net()
        zero = wrap(model, options)
        train(model, zero, some(2))
        zero.finish()
        expect_freed(weakref.ref(model), weakref.ref(zero), lambda m=model, z=zero: None)
        del model, zero
    model = NaiveDDP(net())
    train(model, adamw(model), some(2))
    expect_freed(weakref.ref(model))


_expected: list = []


def expect_freed(*refs) -> None:
    _expected.extend(r for r in refs if isinstance(r, weakref.ref))


def all_freed() -> None:
    _expected.clear()
    dropped()
    gc.collect()
    assert len(_expected) == 11
    assert [r() for r in _expected] == [None] * 11


def test_what_is_dropped_is_freed(ranks):
    ranks(2).run(all_freed)

"""A parameter that is elsewhere: whoever reads it waits, whoever only looks at it does not."""

import copy
import pickle

import pytest
import torch
from torch import nn

from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.ddp.zero.param_buffer import (
    UngatheredParameter,
    mark_gathered,
    mark_ungathered,
)


class Kept:
    """Brings at once, and counts."""

    def __init__(self) -> None:
        self.asked = 0

    def wait_gathered(self, parameter: nn.Parameter) -> None:
        self.asked += 1
        mark_gathered(parameter, nn.Parameter)


X = torch.ones(2, 3)
READS = {
    "forward": lambda m, w: m(X),
    "by hand": lambda m, w: X @ w.t(),
    "in a list": lambda m, w: torch.cat([w, w]),
    "by keyword": lambda m, w: torch.nn.functional.linear(X, weight=w),
    "foreach": lambda m, w: torch._foreach_norm([w]),
    "item": lambda m, w: w[0, 0].item(),
    "data": lambda m, w: w.data,
    "detach": lambda m, w: w.detach(),
    "state_dict": lambda m, w: m.state_dict(),
    "deepcopy": lambda m, w: copy.deepcopy(m),
    "pickle": lambda m, w: pickle.dumps(m),
    "address": lambda m, w: w.data_ptr(),
    "dtype": lambda m, w: m.double(),
    "text": lambda m, w: repr(w),
    "function": lambda m, w: torch.autograd.grad(m(X).sum(), w),
}
LOOKS = {
    "shape": lambda m, w: (w.shape, w.size(), w.numel(), w.dim(), w.ndim, len(w), w.stride()),
    "kind": lambda m, w: (w.dtype, w.device, w.is_cuda, w.is_leaf, w.requires_grad, w.is_complex()),
    "gradient": lambda m, w: (w.grad, setattr(w, "grad", None)),
    "zero_grad": lambda m, w: m.zero_grad(),
    "freeze": lambda m, w: m.requires_grad_(True),
    "identity": lambda m, w: (
        w in {w},
        w in [w],
        isinstance(w, nn.Parameter),
        list(m.parameters()),
    ),
    "repr of the module": lambda m, w: repr(m),
}


def absent_linear() -> tuple[nn.Linear, Kept]:
    module, source = nn.Linear(3, 2), Kept()
    mark_ungathered(module.weight, source)
    return module, source


@pytest.mark.parametrize("name", READS)
def test_who_reads_brings(name: str):
    module, source = absent_linear()
    READS[name](module, module.weight)
    assert source.asked == 1
    assert type(module.weight) is nn.Parameter
    assert not vars(module.weight)


@pytest.mark.parametrize("name", LOOKS)
def test_who_only_looks_does_not(name: str):
    module, source = absent_linear()
    LOOKS[name](module, module.weight)
    assert source.asked == 0
    assert type(module.weight) is UngatheredParameter


def test_copies_are_plain_parameters():
    module, _ = absent_linear()
    assert type(copy.deepcopy(module).weight) is nn.Parameter
    module, _ = absent_linear()
    assert type(pickle.loads(pickle.dumps(module)).weight) is nn.Parameter  # noqa: S301


def test_a_parameter_class_of_ones_own_comes_back():
    class Own(nn.Parameter):
        pass

    module = nn.Linear(3, 2)
    module.weight = Own(module.weight.detach())

    class Source:
        def wait_gathered(self, parameter: nn.Parameter) -> None:
            mark_gathered(parameter, Own)

    mark_ungathered(module.weight, Source())
    module(X)
    assert type(module.weight) is Own


class Returned(nn.Module):
    """A submodule that returns its parameter, and the product with it."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3).double())

        def forward(self) -> torch.Tensor:
            return self.weight

    def __init__(self):
        super().__init__()
        self.table = self.Table()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.table().t()


def returned_parameter() -> None:
    one, model = Returned(), Returned()
    reference = torch.optim.SGD(one.parameters(), lr=0.1)
    optimizer = ZeroOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3, reshard_after_forward=True
    )
    for _ in range(3):
        for net, opt in ((one, reference), (model, optimizer)):
            opt.zero_grad()
            net(X.double()).square().sum().backward()
            opt.step()
    torch.testing.assert_close(model.table.weight.detach(), one.table.weight.detach())
    assert not model.table.weight._backward_hooks


def test_a_parameter_that_a_module_returns_collects_no_hooks(ranks):
    ranks(2).run(returned_parameter)

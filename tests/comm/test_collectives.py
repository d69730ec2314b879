"""Every collective is right, and its backward is its transpose, as often as one likes.

Over every dim, even and uneven, on groups that are not the world and do not start at rank 0.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.comm.collective_cases import (
    LAYOUTS,
    OPERATIONS,
    REPLICATED_INPUT,
    REPLICATED_OUTPUT,
    Case,
    cases,
    my_group,
    world_of,
)
from torchdistpackage.comm import primitives
from torchdistpackage.comm.debug_checks import checked_calls

every_operation = pytest.mark.parametrize("name", OPERATIONS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def summed(value: Tensor, group: dist.ProcessGroup, replicated: bool) -> Tensor:
    """Over the ranks; what is one thing on all of them counts once."""
    total = primitives.all_reduce(value.detach().clone(), group)
    return total / group.size() if replicated else total


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a.conj() * b).sum().real


def scattered_in_memory(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def right_and_transposed(layout: str, name: str, dtype: torch.dtype) -> None:
    group = my_group(layout)
    n, index = group.size(), group.rank()
    for case in cases(name, n):
        xs = [case.draw(i, dtype=dtype) for i in range(n)]
        x = scattered_in_memory(xs[index]).requires_grad_()
        out = case.call(x, group)
        torch.testing.assert_close(out, case.plain(xs, index), rtol=0, atol=1e-12, msg=str(case))

        y = case.draw_for(out, index)
        dot(y, out).backward()
        assert torch.equal(x.detach(), xs[index]), f"{case} has written to its input"
        forward = summed(dot(y, out), group, name in REPLICATED_OUTPUT)
        backward = summed(dot(x.grad, x), group, name in REPLICATED_INPUT)
        torch.testing.assert_close(forward, backward, rtol=1e-12, atol=1e-12, msg=str(case))


def right_when_checked(layout: str, name: str) -> None:
    with checked_calls():
        right_and_transposed(layout, name, torch.float64)


@pytest.mark.full
@every_operation
def test_debug_mode_finds_nothing_where_nothing_is(ranks, name):
    ranks(4).run(right_when_checked, "three", name)


@pytest.mark.few(20)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@every_layout
@every_operation
def test_each_is_right_and_its_backward_is_its_transpose(ranks, layout, name, dtype):
    ranks(world_of(layout)).run(right_and_transposed, layout, name, dtype)


STEP = 1e-5


class Loss:
    """A loss of all ranks together, curved, so that gradients of gradients are not zero."""

    def __init__(self, case: Case, group: dist.ProcessGroup):
        self.case, self.group = case, group

    def mine(self, x: Tensor) -> Tensor:
        out = self.case.call(x, self.group)
        return (self.case.draw_for(out, self.group.rank()) * out.sin()).sum()

    def of_all(self, x: Tensor) -> float:
        return float(summed(self.mine(x), self.group, self.case.name in REPLICATED_OUTPUT))

    def gradient(self, x: Tensor, *, create_graph: bool = False) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(self.mine(x), x, create_graph=create_graph)[0]


def gradients_are_those_of_small_steps(layout: str, name: str, every: int) -> None:
    group = my_group(layout)
    n, index = group.size(), group.rank()
    for case in cases(name, n):
        loss, x = Loss(case, group), case.draw(index)
        gradient = loss.gradient(x)
        # a replicated input is one thing, so all ranks step together; else one after the other
        for who in range(1) if name in REPLICATED_INPUT else range(n):
            i_step = name in REPLICATED_INPUT or who == index
            for cell in range(who, case.draw(who).numel(), every):
                step = torch.zeros_like(x)
                if i_step:
                    step.view(-1)[cell] = STEP
                slope = (loss.of_all(x + step) - loss.of_all(x - step)) / (2 * STEP)
                if i_step:
                    assert abs(float(gradient.reshape(-1)[cell]) - slope) < 1e-8, (case, cell)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("layout", "every"),
    [("pairs", 5), *(pytest.param(name, 1, marks=pytest.mark.full) for name in ("pairs", "three"))],
)
@every_operation
def test_gradients_are_those_of_small_steps(ranks, layout, every, name):
    """`every`: of how many cells one is stepped."""
    ranks(4).run(gradients_are_those_of_small_steps, layout, name, every)


def gradients_of_gradients_are_those_of_small_steps(layout: str, name: str) -> None:
    group = my_group(layout)
    for case in cases(name, group.size()):
        loss, index = Loss(case, group), group.rank()
        x, way = case.draw(index).requires_grad_(), case.draw(index, seed=50)
        gradient = loss.gradient(x, create_graph=True)
        second = torch.autograd.grad((gradient * way).sum(), x)[0]
        ahead = loss.gradient(x.detach() + STEP * way)
        behind = loss.gradient(x.detach() - STEP * way)
        slope = (ahead - behind) / (2 * STEP)
        assert summed(second.abs().sum(), group, False) > 0.1, case
        torch.testing.assert_close(second, slope, rtol=0, atol=1e-7, msg=str(case))


@pytest.mark.few(8)
@every_layout
@every_operation
def test_gradients_of_gradients_are_those_of_small_steps(ranks, layout, name):
    ranks(world_of(layout)).run(gradients_of_gradients_are_those_of_small_steps, layout, name)

"""Products of rows with the matrices of their experts are those of a loop over rows, float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.parallel.expert.one_process import CLOSE, drawn
from torchdistpackage.parallel.expert import products
from torchdistpackage.parallel.expert.dispatch import Dispatch

DIM, HIDDEN = 4, 6
BLOCKS = [[0, 4, 1], [0, 7, 0], [0, 0, 5]]
"""(ranks, experts): one expert is idle, one has rows of one rank alone."""


@pytest.mark.parametrize("activation", [F.silu, torch.nn.SiLU(), F.gelu], ids=str)
@pytest.mark.parametrize("frozen", [None, 0, 1, 2])
def test_experts_in_turn(monkeypatch, activation, frozen):
    """Also where an expert's rows are several pieces, and where some gradients are not asked for;
    an idle expert has a gradient of zeros."""
    monkeypatch.setattr(products, "_ROWS", 3)
    nobody: Any = None  # nothing is sent
    blocks = torch.tensor(BLOCKS)
    num = int(blocks.sum())
    plan = Dispatch(nobody, torch.arange(num), num, 1, (), tuple(map(sum, BLOCKS)), blocks)
    owners = [e for row in BLOCKS for e, n in enumerate(row) for _ in range(n)]
    rows, first, second = (
        drawn(i, *size)
        for i, size in enumerate([(num, DIM), (3, 2 * HIDDEN, DIM), (3, DIM, HIDDEN)])
    )
    given = [x.requires_grad_(i != frozen) for i, x in enumerate((rows, first, second))]
    wanted = [x for x in given if x.requires_grad]
    y = products.gated_mlps(rows, plan, first, second, activation)
    expected = []
    for row, e in zip(rows, owners, strict=True):
        gate, up = (first[e] @ row).chunk(2)
        expected.append(second[e] @ (activation(gate) * up))
    grad = drawn(5, num, DIM)
    torch.testing.assert_close(y, torch.stack(expected), **CLOSE)
    for got, want in zip(
        torch.autograd.grad(y, wanted, grad, retain_graph=True),
        torch.autograd.grad(torch.stack(expected), wanted, grad),
        strict=True,
    ):
        torch.testing.assert_close(got, want, **CLOSE)
    again = torch.autograd.grad(y, wanted, grad)
    assert frozen == 1 or not again[-1 if frozen == 2 else -2][0].any()


def test_experts_in_turn_of_no_row():
    nobody: Any = None
    plan = Dispatch(nobody, torch.arange(0), 0, 1, (), (0,), torch.zeros(1, 2, dtype=torch.int64))
    rows = torch.zeros(0, DIM, requires_grad=True)
    weights = [torch.randn(2, 2 * HIDDEN, DIM), torch.randn(2, DIM, HIDDEN)]
    for weight in weights:
        weight.requires_grad_()
    y = products.gated_mlps(rows, plan, *weights, F.silu)
    grads = torch.autograd.grad(y.sum(), [rows, *weights])
    assert y.shape == rows.shape and not any(grad.any() for grad in grads)

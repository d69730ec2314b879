"""Differences that are rounding, and those that only look like it."""

from dataclasses import replace

import pytest
import torch

from torchdistpackage.harness.parity.compare import first_difference
from torchdistpackage.harness.parity.record import ParityRecord

AXES = {"data": 2}


def record(**grads: float) -> ParityRecord:
    """A rank whose weight has gradients of size 1e-2 and whose bias of keys has rounding alone."""
    torch.manual_seed(0)
    weight = 1e-2 * torch.randn(4, 4, dtype=torch.float64)
    held = {"k.weight": weight, "k.bias": 1e-17 * torch.randn(4, dtype=torch.float64)}
    held |= {name.replace("_", "."): held[name.replace("_", ".")] + x for name, x in grads.items()}
    weights = {name: torch.ones_like(x) * ("bias" not in name) for name, x in held.items()}
    return ParityRecord({}, grads=held, initial=dict(held), weights=weights, losses=[1.0])


def moved(found: ParityRecord, by: float) -> ParityRecord:
    bias = found.weights["k.bias"] + by
    return replace(found, weights={**found.weights, "k.bias": bias})


@pytest.mark.parametrize(
    ("rank", "named"),
    [
        (record(k_bias=3e-17), None),
        (moved(record(k_bias=3e-17), 1e-10), None),
        (record(k_bias=1e-8), "gradients (k.bias)"),
        (record(k_weight=1e-9), "gradients (k.weight)"),
        (moved(record(), 1e-6), "weights after the steps (k.bias)"),
    ],
)
def test_rounding_of_a_gradient_that_is_zero_by_nature_is_no_difference(rank, named):
    ranks = [replace(x, initial=record().initial) for x in (record(), rank)]
    found = first_difference(record(), ranks, AXES)
    assert (found and found.what) == named

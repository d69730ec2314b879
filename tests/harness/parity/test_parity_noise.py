"""Differences that are rounding, and those that only look like it."""

from dataclasses import replace

import pytest
import torch

from torchdistpackage.equivalence.compare import first_difference
from torchdistpackage.equivalence.record import ParityRecord

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


@pytest.mark.parametrize("limit", [None, 1e-3], ids=["not clipped", "clipped"])
@pytest.mark.parametrize("wrong", [*"abc", None, "all"])
def test_a_wrong_gradient_is_named_where_the_step_clips_by_the_norm(limit, wrong):
    """One wrong gradient changes the norm, and so every gradient, the last module's first."""

    def held(factors: dict[str, float]) -> ParityRecord:
        draw = torch.Generator().manual_seed(0)
        grads = {
            f"{name}.weight": torch.randn(4, 4, generator=draw, dtype=torch.float64)
            * factors.get(name, 1.0)
            for name in "abc"
        }
        initial = {name: torch.zeros_like(x) for name, x in grads.items()}
        if limit is not None:
            norm = torch.linalg.vector_norm(torch.cat([x.flatten() for x in grads.values()]))
            grads = {name: x * (limit / (norm + 1e-6)) for name, x in grads.items()}
        return ParityRecord({}, grads=grads, initial=initial, losses=[1.0])

    factors = dict.fromkeys("abc" if wrong == "all" else wrong or "", 2.0)
    found = first_difference(held({}), [held(factors), held(factors)], AXES)
    expected = {"all": "c"}.get(wrong, wrong)
    what = expected and f"gradients ({expected}.weight)"
    if wrong == "all" and limit is not None:  # clipping divides the factor of all out again
        what = "what clipping multiplies gradients by"
    assert (found and found.what) == what

"""Warm-up and cosine, at the steps where they turn."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchdistpackage.train.update import warmup_cosine


def test_the_turning_points():
    at = lambda step: warmup_cosine(step, warmup_steps=4, num_steps=13, min_ratio=0.1)  # noqa: E731
    assert [at(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert at(4) == 1.0
    assert at(8) == pytest.approx(0.55)
    assert at(12) == pytest.approx(0.1) == at(100)


@given(st.integers(0, 20), st.integers(1, 50), st.floats(0, 1))
def test_the_factor_rises_then_falls_and_stays_between_its_ends(warmup, num_steps, ratio):
    factors = [
        warmup_cosine(s, warmup_steps=warmup, num_steps=num_steps, min_ratio=ratio)
        for s in range(num_steps)
    ]
    rising, falling = factors[:warmup], factors[warmup:]
    assert rising == sorted(rising) and all(0 < f <= 1 for f in rising)
    assert all(a >= b - 1e-12 for a, b in pairwise(falling))
    assert all(ratio - 1e-12 <= f <= 1 for f in falling)

"""The line through times at several sizes: exact, unmoved by odd points, never negative.

No torch.
"""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from torchdistpackage.harness.bench.profile import fit

SIZES = [2.0**i for i in range(10, 25)]


@given(st.floats(1e-7, 1e-2), st.floats(1e6, 1e12))
def test_points_on_a_line_give_the_line(latency_s, bytes_per_s):
    found = fit([(x, latency_s + x / bytes_per_s) for x in SIZES])
    assert found is not None and found.deviation < 1e-9
    for x in SIZES:
        assert found.time_s(x) == pytest.approx(latency_s + x / bytes_per_s, rel=1e-9)


@given(st.sets(st.integers(0, 14), max_size=5), st.floats(2, 1000))
def test_a_third_of_the_points_may_be_anything(odd, factor):
    """A mean would follow them; least squares would follow the largest sizes alone."""
    points = [(x, (1e-4 + x / 1e9) * (factor if i in odd else 1)) for i, x in enumerate(SIZES)]
    assume(not {13, 14} <= odd or len(odd) < 4)
    found = fit(points)
    assert found is not None and found.latency_s == pytest.approx(1e-4, rel=1e-6)
    assert found.bytes_per_s == pytest.approx(1e9, rel=1e-6)


@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-6, 10)), min_size=2, max_size=8))
def test_neither_part_is_negative_and_no_other_line_is_nearer(points):
    assume(len({x for x, _ in points}) > 1)
    found = fit(points)
    assert found is not None and found.latency_s >= 0
    assert found.bytes_per_s is None or found.bytes_per_s > 0

    def off(latency_s: float, per_byte_s: float) -> float:
        return sum(abs(t - latency_s - per_byte_s * x) / t for x, t in points) / len(points)

    best = off(found.latency_s, 1 / found.bytes_per_s if found.bytes_per_s else 0.0)
    if len({x for x, _ in points}) > 2:
        assert found.deviation == pytest.approx(best)
    else:
        assert found.deviation is None
    # a flat line may stand for a nearer one whose size term is noise
    slope = max(t / x for x, t in points) if found.bytes_per_s else 0.0
    longest = max(t for _, t in points)
    grid = [i / 12 for i in range(13)]
    assert all(best <= off(a * longest, b * slope) + 1e-9 for a, b in itertools.product(grid, grid))


def test_times_that_fall_with_size_are_a_latency_alone():
    found = fit([(1, 3.0), (2, 2.0), (3, 1.0)])
    assert found is not None and found.bytes_per_s is None
    assert found.time_s(10**9) == found.latency_s


def test_a_size_term_within_the_deviation_is_no_bandwidth():
    """293 us and 0.2 us for the largest size, told as 323 GB/s."""
    noisy = [(2**10, 293e-6), (2**12, 250e-6), (2**14, 330e-6), (2**16, 293.2e-6)]
    found = fit(noisy)
    assert found is not None and found.bytes_per_s is None
    assert found.latency_s == pytest.approx(293e-6, rel=1e-2)


@pytest.mark.parametrize("points", [[], [(5, 1.0)], [(5, 1.0), (5, 2.0)], [(0, 1.0), (5, 1.0)]])
def test_one_size_makes_no_line(points):
    assert fit(points) is None

"""The choice between the two designs, against what was measured of them."""

import pytest

from torchdistpackage.ddp.auto import (
    WORTH_IT,
    StepCost,
    all_reduced_s,
    scattered_s,
    scatters,
)

MIB = 2**20
MLP = StepCost(0.048, 0.090, 0.007, 33_600_000, 4 * MIB, exchange_s=0.034)
LONG = StepCost(0.330, 0.880, 0.012, 55_300_000, 13 * MIB, exchange_s=0.055)
SLOW, MIDDLE, FAST = 119e6, 478e6, 1300e6


@pytest.mark.parametrize(
    ("work", "bytes_per_s", "zero"),
    [(MLP, SLOW, True), (MLP, FAST, False), (LONG, MIDDLE, False), (LONG, FAST, False)],
)
def test_it_chooses_what_was_measured_to_be_faster(work: StepCost, bytes_per_s: float, zero: bool):
    assert scatters(work, bytes_per_s, 2) is zero


def test_on_a_slow_link_both_are_near_their_measured_times():
    """torch DDP at its best cap 0.359 s, ZeRO-1 0.327 s: two hosts joined by 1 Gbit/s."""
    assert all_reduced_s(MLP, SLOW) == pytest.approx(0.359, rel=0.07)
    assert scattered_s(MLP, SLOW, 2) == pytest.approx(0.315, rel=0.07)


def test_alone_there_is_nothing_to_share():
    assert not scatters(MLP, SLOW, 1)


def test_a_faster_link_never_makes_a_step_longer():
    rates = [10**e for e in range(6, 12)]
    for step_s in (
        [all_reduced_s(MLP, r) for r in rates],
        [scattered_s(MLP, r, 4) for r in rates],
    ):
        assert step_s == sorted(step_s, reverse=True)


def test_a_gain_within_the_doubt_is_left_alone():
    """At some rate both are equal; there, and a little below, the drop-in stays."""
    gains = {
        rate: 1 - scattered_s(MLP, rate, 2) / all_reduced_s(MLP, rate)
        for rate in (10**6 * n for n in range(50, 2000))
    }
    small = [rate for rate, gain in gains.items() if 0 < gain < WORTH_IT]
    assert small and not any(scatters(MLP, rate, 2) for rate in small)
    assert all(scatters(MLP, rate, 2) for rate, gain in gains.items() if gain > WORTH_IT)

"""Bytes and factors are those of nccl-tests, so our numbers may stand beside other people's.

No torch.
"""

from fractions import Fraction

import pytest

from torchdistpackage.comm.collective_table import COLLECTIVES
from torchdistpackage.errors import LayoutError

# doc/PERFORMANCE.md and the AlgBw/BusBw functions of nccl-tests, n = 2 to 8, as exact fractions.
TABLE = {
    "p2p": "1 1 1 1 1 1 1",
    "p2p_both": "1 1 1 1 1 1 1",
    "broadcast": "1 1 1 1 1 1 1",
    "all_reduce": "1 4/3 3/2 8/5 5/3 12/7 7/4",
    "all_gather": "1/2 2/3 3/4 4/5 5/6 6/7 7/8",
    "reduce_scatter": "1/2 2/3 3/4 4/5 5/6 6/7 7/8",
    "all_to_all": "1/2 2/3 3/4 4/5 5/6 6/7 7/8",
}

# What a rank gives and gets, over what is counted, in a group of 4.
BUFFERS = {
    "p2p": (1, 1),
    "p2p_both": (1, 1),
    "broadcast": (1, 1),
    "all_reduce": (1, 1),
    "all_gather": (Fraction(1, 4), 1),
    "reduce_scatter": (1, Fraction(1, 4)),
    "all_to_all": (1, 1),
}


def test_the_tables_here_hold_every_case():
    assert set(TABLE) == set(BUFFERS) == set(COLLECTIVES)
    assert all(case.name == name for name, case in COLLECTIVES.items())


@pytest.mark.parametrize("name", COLLECTIVES)
def test_bus_factors_are_those_of_the_nccl_tests(name):
    exact = [float(Fraction(text)) for text in TABLE[name].split()]
    assert [COLLECTIVES[name].bus_factor(n) for n in range(2, 9)] == pytest.approx(exact, rel=1e-15)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_group_of_one_has_no_bus(name):
    assert COLLECTIVES[name].bus_factor(1) == 0


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_larger_buffer_of_a_rank_is_what_counts(name):
    given, got = BUFFERS[name]
    case, counted = COLLECTIVES[name], 4096
    assert case.input_bytes(counted, 4) == given * counted
    assert case.output_bytes(counted, 4) == got * counted


def test_a_bandwidth_from_bytes_and_time():
    """4 ranks all-reduce 1e9 bytes in half a second: 2 GB/s, of which each link carries 3."""
    assert COLLECTIVES["all_reduce"].bus_bytes_per_s(1_000_000_000, 4, 0.5) == pytest.approx(3e9)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all"])
def test_bytes_that_no_parts_add_up_to_are_refused(name):
    with pytest.raises(LayoutError, match=f"{name}: 1001 bytes cannot be cut into 4 equal parts"):
        COLLECTIVES[name].input_bytes(1001, 4)

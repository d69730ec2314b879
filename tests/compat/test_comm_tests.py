"""The earlier package's bandwidth tests: what they return and refuse, on real ranks."""

import pytest

from tests.harness.measure.late_calls import DELAY_S, late_calls
from tests.tells import tells
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.compat.torchdistpackage import dist as classic_tests
from torchdistpackage.compat.torchdistpackage.dist import (
    test_all2all_balanced,
    test_collection,
)
from torchdistpackage.errors import CommError


def late() -> float:
    tpc.setup_process_groups([("data", 2)])
    with late_calls(classic_tests):
        return test_collection(8)[1]


def test_the_slowest_rank_of_an_iteration_counts(ranks):
    assert all(time_s > DELAY_S for time_s in ranks(2).run(late))


def classic() -> list[tuple[float, float]]:
    tpc.setup_process_groups([("data", 2), ("tensor", 2)])
    group = tpc.get_group("tensor")
    modes = ("all_reduce", "all_gather", "reduce_scatter")
    found = [test_collection(4096, mode, group) for mode in modes]
    return [*found, test_all2all_balanced(4096, group), test_collection(4096)]


def test_the_earlier_tests_return_bus_bandwidth_and_seconds_equal_on_all_ranks(ranks):
    results = ranks(4).run(classic)
    assert results[0] == results[1] and results[2] == results[3]
    for found in results:
        assert all(time_s > 0 for _, time_s in found)
        counted, factors = 4096 * 4 / 1e9, (1, 0.5, 0.5, 0.5, 1.5)
        wanted = [counted / time_s * f for (_, time_s), f in zip(found, factors, strict=True)]
        assert [bus for bus, _ in found] == pytest.approx(wanted)


def refused() -> list[str]:
    texts = []
    for call in (
        lambda: test_collection(7, "all_gather"),
        lambda: test_collection(0),
        lambda: test_collection(8, "gather"),
        lambda: test_all2all_balanced(9),
    ):
        with pytest.raises(CommError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_the_earlier_tests_refuse_what_cannot_be_shared(ranks):
    texts = ranks(2).run(refused)[0]
    assert tells(texts[0], "all_gather", "7 elements", "2 ranks", "use 1", "2 equal")
    assert "all_reduce of 0 elements" in texts[1] and "no mode 'gather'" in texts[2]
    assert "all_to_all of 9 elements" in texts[3]
    assert test_collection.__test__ is test_all2all_balanced.__test__ is False

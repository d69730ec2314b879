"""`MoELayer` on every layout is the loop over experts of one process, float64."""

import pytest

from tests.each import each
from tests.parallel.expert import one_process
from tests.parallel.expert.one_process import OPTIONS

DATA4, DATA2 = (("data", 4),), (("data", 2),)
BOTH, TENSOR = (("data", 2), ("tensor", 2)), (("data", 1), ("tensor", 2))
SPLIT = {"sequence_parallel": True}
SOME = ("uneven", "groups", "capacity", "padded", "global")
HOWS = ("ddp", "1", "2", "3")


def trained(cases: list) -> None:
    def body(*case):
        *args, last = case
        given = last if isinstance(last, dict) else {}
        one_process.train(*args, *(() if given else (last,)), **given)

    each(body, cases)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([(DATA2, 2, kind, "ddp") for kind in SOME], id="expert2"),
        pytest.param(
            [(TENSOR, 1, kind, "ddp", SPLIT) for kind in ("shared", "bias")], id="tensor2"
        ),
        pytest.param([(DATA2, 2, "uneven", stage) for stage in "23"], id="zero"),
        pytest.param(
            [(DATA2, 2, kind, "ddp") for kind in OPTIONS], id="expert2-all", marks=pytest.mark.full
        ),
        pytest.param(
            [(TENSOR, 1, kind, "ddp", SPLIT) for kind in OPTIONS],
            id="tensor2-all",
            marks=pytest.mark.full,
        ),
    ],
)
def test_experts_of_two_ranks_train_as_in_one_process(ranks, cases):
    ranks(2).run(trained, cases)


@pytest.mark.late_in_full
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            [
                (DATA4, 4, "uneven", "ddp"),
                (BOTH, 2, "shared", "ddp", SPLIT),
                (DATA4, 2, "bias", "3"),
                (DATA4, 4, "plain", "2", {"skewed": True}),
            ],
            id="some",
        ),
        pytest.param(
            [
                (DATA4, 2, "bias", "ddp"),
                (BOTH, 2, "capacity", "ddp", SPLIT),
                *((DATA4, 2, "shared", stage) for stage in "13"),
            ],
            id="more",
            marks=pytest.mark.full,
        ),
        pytest.param(
            [(DATA4, e, kind, how) for e in (1, 2, 4) for kind in OPTIONS for how in HOWS],
            id="data4",
            marks=pytest.mark.full,
        ),
        pytest.param(
            [(BOTH, 2, kind, "ddp", how) for kind in OPTIONS for how in ({"skewed": True}, SPLIT)],
            id="tensor2",
            marks=pytest.mark.full,
        ),
    ],
)
def test_experts_of_four_ranks_train_as_in_one_process(ranks, cases):
    """Some see routings that leave ranks without a token."""
    ranks(4).run(trained, cases, timeout_s=300)  # a hundred trainings, under the late transport

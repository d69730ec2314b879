"""Under every schedule all ranks make their calls in one order, with threads as ranks."""

import pytest

from tests.train.test_order import expect_agreement, plan_of
from torchdistpackage.config.types import SCHEDULES

ORDERS = [name for name in SCHEDULES if name not in ("1f1b", "custom")]
IN_ORDER = ("interleaved", "zb-v")
"""In the small set."""


@pytest.mark.few(2)
@pytest.mark.parametrize("case", ["pipe3", "data2xpipe2-tied", "pipe2xtensor2-sp-tied"])
@pytest.mark.parametrize(
    "schedule", [pytest.param(s, marks=[] if s in IN_ORDER else pytest.mark.full) for s in ORDERS]
)
def test_all_ranks_agree_under_every_schedule(schedule, case):
    expect_agreement(plan_of(case, f"pipeline.schedule={schedule}"))


@pytest.mark.full
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("schedule", ORDERS)
def test_under_zero_too(schedule, zero):
    expect_agreement(
        plan_of("data2xpipe2-tied", f"pipeline.schedule={schedule}", f"parallel.zero={zero}")
    )

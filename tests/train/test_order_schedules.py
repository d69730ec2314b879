"""Under every schedule all ranks make their calls in one order, on paper and with threads."""

import pytest

from tests.train.test_order import expect_calls_of_the_paper, plan_of
from torchdistpackage.config.types import SCHEDULES
from torchdistpackage.train.calls import static_report

ORDERS = [name for name in SCHEDULES if name not in ("1f1b", "custom")]
IN_ORDER = ("interleaved", "zb-v")
"""With threads in the small set."""


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("case", ["pipe3", "data2xpipe2-tied", "pipe2xtensor2-sp-tied"])
@pytest.mark.parametrize("schedule", ORDERS)
def test_on_paper_all_ranks_agree_under_every_schedule(schedule, case, zero):
    more = (f"pipeline.schedule={schedule}", f"parallel.zero={zero}", "model.layers=2")
    plan = plan_of(case, *more)
    for first in (True, False):
        assert static_report(plan, first=first).check().kinds


@pytest.mark.parametrize("case", ["pipe3", "data2xpipe2-tied"])
@pytest.mark.parametrize(
    "schedule", [pytest.param(s, marks=[] if s in IN_ORDER else pytest.mark.full) for s in ORDERS]
)
def test_the_real_step_makes_the_calls_of_the_paper_under_every_schedule(schedule, case):
    expect_calls_of_the_paper(plan_of(case, f"pipeline.schedule={schedule}"))

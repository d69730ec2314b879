"""A rank that stops is named by the others, in time; a bench that ends is as without a watch."""

import time

import pytest
import torch.distributed as dist

from tests.harness.test_absent import stop_for
from tests.tells import tells
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError
from torchdistpackage.harness.bench.request import Request
from torchdistpackage.harness.measure import MARGIN_S, watched

TIMEOUT_S = 2.0


def with_a_stopped_rank(stopped: int) -> tuple[str, float]:
    tpc.setup_process_groups([("data", 2), ("pipe", 2)])
    begun = 0

    def stop(cell) -> None:
        nonlocal begun
        begun += 1
        if tpc.rank == stopped and begun == 2:
            stop_for(TIMEOUT_S + 5)

    request = Request(("all_reduce",), (64, 4096), iterations=2, warmup=0, timeout_s=TIMEOUT_S)
    begin_s = time.monotonic()
    with pytest.raises(CommError) as caught:
        watched(request, stop)
    time_s = time.monotonic() - begin_s
    tpc.destroy()
    dist.destroy_process_group()  # a call may still wait in it
    return str(caught.value), time_s


@pytest.mark.full
def test_a_stopped_rank_is_named_with_operation_and_group_by_all_others(ranks):
    texts = ranks(4).run(with_a_stopped_rank, 3)
    for text, time_s in texts[:3]:
        assert tells(text, "all_reduce", "ranks [1, 3]", "64 bytes", "float32", "rank 3")
        assert f"did not come within {TIMEOUT_S:g} s; ranks 0, 1, 2 on " in text
        assert time_s < TIMEOUT_S + 5


def undisturbed() -> tuple[int, list[float], list[str]]:
    tpc.setup_process_groups([("data", 2)])
    limits, seen = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchdistpackage.comm.groups.set_timeout", lambda *a: limits.append(a[1]))
        request = Request(("p2p",), (4, 8), iterations=1, warmup=0, timeout_s=30)
        report = watched(request, lambda cell: seen.append(cell.operation))
    return len(report.rows), limits, seen


def test_a_bench_that_ends_has_its_report_on_all_ranks_and_the_backend_waits_longer(ranks):
    for num_rows, limits, seen in ranks(2).run(undisturbed):
        assert num_rows == 2 and {*limits} == {30 + MARGIN_S} and seen == ["p2p"] * 2

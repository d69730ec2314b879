"""Ranges are in torch's profile, by name, and end when a call raises."""

from __future__ import annotations

import asyncio
import functools
import re
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from torchdistpackage.tools.ranges import NVTXContext, cu_prof_start, cu_prof_stop, nvtx_decorator

pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11


def spans(recorded: profile) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for event in recorded.events():
        found.setdefault(event.name, []).append((event.time_range.start, event.time_range.end))
    return found


class Worker:
    @nvtx_decorator
    def work(self, n: int, *, fail: bool = False) -> int:
        """Adds one."""
        if fail:
            raise KeyError("failed")
        return n + 1

    @nvtx_decorator
    async def later(self) -> str:
        await asyncio.sleep(0)
        return "done"


def test_a_call_is_a_range_of_its_name():
    worker = Worker()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        assert worker.work(1) == 2
        with pytest.raises(KeyError, match="failed"):
            worker.work(1, fail=True)
        assert asyncio.run(worker.later()) == "done"
        assert nvtx_decorator(functools.partial(max, 2))(1) == 2
    found = spans(recorded)
    assert len(found["Worker.work"]) == 2 and len(found["Worker.later"]) == 1
    assert found["Worker.work"][0][1] <= found["Worker.work"][1][0], "the first ended"
    assert len(found["partial"]) == 1
    assert Worker.work.__doc__ == "Adds one." and Worker.work.__name__ == "work"


def test_a_block_is_a_range_and_is_timed(capsys: pytest.CaptureFixture[str]):
    context = NVTXContext("outer", record_time=True)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        with context:
            time.sleep(0.02)
            with NVTXContext("inner") as inner:
                torch.ones(2).add(1)
        with pytest.raises(ZeroDivisionError), NVTXContext("raises"):
            1 / 0  # noqa: B018
    found = spans(recorded)
    (outer,), (within,), _ = found["outer"], found["inner"], found["raises"]
    assert outer[0] <= within[0] <= within[1] <= outer[1]
    said = re.fullmatch(r"outer duration is ([\d.e-]+)\n", capsys.readouterr().out)
    assert said and 0.02 <= float(said[1]) < 5
    assert context.exit_time - context.start_time == pytest.approx(float(said[1]))
    assert inner.start_time is None and inner.exit_time is None


def test_a_block_may_be_entered_inside_itself():
    context = NVTXContext("twice")
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        with context:
            torch.ones(1)  # torch leaves out a range with one of its name alone inside
            with context:
                pass
        context(len)([])
    assert len(spans(recorded)["twice"]) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA's own profiler then")
def test_a_profile_that_the_program_starts_and_stops():
    cu_prof_start()
    with pytest.raises(RuntimeError, match="a profile is running; call cu_prof_stop"):
        cu_prof_start()
    Worker().work(1)
    recorded = cu_prof_stop()
    assert "Worker.work" in spans(recorded)
    with pytest.raises(RuntimeError, match="no profile is running"):
        cu_prof_stop()


def test_what_has_no_name_is_refused():
    with pytest.raises(TypeError, match="NVTXContext: the name is a int; pass a str"):
        NVTXContext(3)
    with pytest.raises(TypeError, match="nvtx_decorator: 3 is a int; pass a function"):
        nvtx_decorator(3)

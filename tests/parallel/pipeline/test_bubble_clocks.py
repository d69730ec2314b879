"""One run on two clocks, the CPU's and that of a stream: one bubble."""

import pytest
import torch

from tests.streams import Stream
from tests.streams import stream as stream  # a fixture
from torchdistpackage.comm import moments as clocks
from torchdistpackage.comm.moments import ComputeClock
from torchdistpackage.train.step_stats import busy_share

# of a last stage: wait for the first message, compute, wait, compute, cool down
WAIT_S, PIECES_S, COOL_S = (4.0, 1.0), (2.0, 3.0), 6.0


def run(clock: ComputeClock, pass_time) -> None:
    clock.restart()
    for wait_s, piece_s in zip(WAIT_S, PIECES_S, strict=True):
        pass_time(wait_s)
        with clock:
            pass_time(piece_s)
    pass_time(COOL_S)
    clock.stop()


@pytest.fixture
def on_cpu(monkeypatch) -> ComputeClock:
    """A clock of the CPU whose time is `now_s[0]`."""
    now_s = [50.0]
    monkeypatch.setattr(clocks, "_now_s", lambda: now_s[0])
    clock = ComputeClock(torch.device("cpu"))
    clock._now = clocks._now_s
    run(clock, lambda s: now_s.__setitem__(0, now_s[0] + s))
    return clock


def test_a_device_measures_the_bubble_of_the_cpu(stream: Stream, on_cpu: ComputeClock):
    device = ComputeClock(torch.device("cuda"))

    def pass_time(s: float) -> None:
        stream.now_s += s

    run(device, pass_time)
    ended_s = stream.now_s
    timing = device.timing()
    device.restart()  # the next step is issued before anybody reads
    stream.now_s += 1000
    assert stream.waits == [], "the host does not stop for it"
    for found in (on_cpu.timing(), timing):
        assert found.computed_s() == pytest.approx(sum(PIECES_S))
        assert found.elapsed_s() == pytest.approx(sum((*WAIT_S, *PIECES_S, COOL_S)))
        assert busy_share(found) == pytest.approx(5 / 16)
    assert max(stream.waits) == ended_s, "nobody waits for the next step"

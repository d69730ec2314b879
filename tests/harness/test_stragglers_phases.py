"""Times of phases on a clock that the test moves, and with stand-ins for the events of a device."""

import os
import threading
import time

import pytest
import torch

from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.harness.stragglers.compare import KEPT, Phases, cpu_wait_clock


@pytest.fixture
def clock(monkeypatch):
    """`clock.now_s` is the time; what was in the record before comes back."""

    class Clock:
        now_s = 100.0

        def __call__(self) -> float:
            return self.now_s

    clock = Clock()
    before = {name: getattr(recorder, name) for name in ("clock_s", "waited_s", "phase", "step")}
    yield clock
    for name, value in before.items():
        setattr(recorder, name, value)


def phases_on(clock) -> Phases:
    phases = Phases()
    phases.clock_s = clock
    return phases


def test_times_add_up_and_the_inner_phase_is_not_in_the_outer(clock):
    phases = phases_on(clock)
    phases.begin(7)
    for _ in range(2):
        with phases("messages"):
            clock.now_s += 1
            with phases("forward"):
                clock.now_s += 10
                with phases("forward"):
                    clock.now_s += 5
            clock.now_s += 2
    clock.now_s += 1000  # outside of all phases
    phases.end()
    times = phases.kept()[7]
    assert times["messages"] == pytest.approx(6)
    assert times["forward"] == pytest.approx(30)


def test_phases_that_are_only_made_change_nothing_for_others(clock):
    first, before = phases_on(clock), recorder.clock_s
    first.begin(1)
    second = Phases()
    assert recorder.clock_s is clock is not before
    with first("forward"):
        clock.now_s += 3
    first.end()
    assert first.kept()[1]["forward"] == pytest.approx(3), "on its own clock"
    second.begin(2)
    assert recorder.clock_s is second.clock_s


def test_waiting_for_others_does_not_count(clock):
    phases = phases_on(clock)
    phases.begin(1)
    with phases("forward"):
        clock.now_s += 3
        clock.now_s, recorder.waited_s = clock.now_s + 50, recorder.waited_s + 50
        clock.now_s += 4
    phases.end()
    assert phases.kept()[1]["forward"] == pytest.approx(7)


def test_a_hang_report_can_see_the_phase_and_the_step(clock):
    phases = phases_on(clock)
    phases.begin(12)
    seen = [(recorder.step, recorder.phase)]
    with phases("messages"):
        with phases("forward"):
            seen.append((recorder.step, recorder.phase))
        seen.append((recorder.step, recorder.phase))
    seen.append((recorder.step, recorder.phase))
    assert seen == [(12, ""), (12, "forward"), (12, "messages"), (12, "")]


def test_an_exception_leaves_its_phase(clock):
    phases = phases_on(clock)
    with pytest.raises(ValueError, match="no sample"), phases("data"):
        raise ValueError("no sample")
    assert recorder.phase == ""


def test_only_what_lies_between_begin_and_end_is_of_the_step(clock):
    phases = phases_on(clock)
    for step in range(1, KEPT + 3):
        phases.begin(step)
        with phases("data"):
            clock.now_s += step
        phases.end()
        with phases("forward"):  # a validation
            clock.now_s += 1000
    kept = phases.kept()
    assert list(kept) == list(range(3, KEPT + 3))
    for step, times in kept.items():
        assert times["data"] == pytest.approx(step)
        assert times.get("forward", 0) == 0


class Event:
    """A mark on a stream whose time is `Event.now_ms`; reached when the stream is there."""

    now_ms = 0.0
    reached_ms = 0.0

    def record(self) -> None:
        self.at_ms = Event.now_ms

    def query(self) -> bool:
        return self.at_ms <= Event.reached_ms

    def synchronize(self) -> None:
        assert self.query(), "this would stop the host"

    def elapsed_time(self, end: "Event") -> float:
        assert self.query() and end.query(), "this would stop the host"
        return end.at_ms - self.at_ms


def test_on_a_device_the_time_of_its_stream_counts_once_it_is_there(clock):
    Event.now_ms = Event.reached_ms = 0.0
    phases = Phases(torch.device("cuda"), Event)
    for step in (1, 2):
        phases.begin(step)
        with phases("messages"):
            Event.now_ms += 1
            with phases("forward"):
                Event.now_ms += 10
            Event.now_ms += 2
        with phases("optimizer"):
            Event.now_ms += 5
        phases.end()
        assert phases.on_device
    assert phases.kept() == {}, "the device has not begun"
    Event.reached_ms = 18.0
    assert list(phases.kept()) == [1]
    Event.reached_ms = 100.0
    assert list(phases.kept()) == [1, 2]
    for times in phases.kept().values():
        assert times["messages"] == pytest.approx(0.003)
        assert times["forward"] == pytest.approx(0.010)
        assert times["optimizer"] == pytest.approx(0.005)


def test_the_clock_of_a_thread_outlives_it():
    """Ranks may be threads, and the record asks the clock that the last of them has set."""
    clocks = []
    thread = threading.Thread(target=lambda: clocks.append(cpu_wait_clock()))
    thread.start()
    thread.join()
    time.sleep(0.05)  # the system forgets it a little after the join
    assert clocks[0]() == pytest.approx(time.monotonic(), abs=1)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_time_without_a_core_does_not_count_but_sleep_and_work_do():
    """Two threads on one core, of which the other never sleeps."""
    if cpu_wait_clock() is time.monotonic:
        pytest.skip("this system does not count how long a thread waits for a core")
    cores, busy = os.sched_getaffinity(0), os.fork()
    if not busy:
        os.sched_setaffinity(0, {min(cores)})
        while True:
            pass
    counted: list[tuple[float, float, float]] = []
    try:
        # the host of a virtual machine takes a core, too, and no thread is told; so a few times
        while len(counted) < 5 and not (counted and _is_shared(*counted[-1])):
            worker = threading.Thread(target=lambda: counted.append(_share_a_core(min(cores))))
            worker.start()
            worker.join()
    finally:
        os.kill(busy, 9)
        os.waitpid(busy, 0)
    assert _is_shared(*counted[-1]), counted


def _is_shared(wall_s: float, clock_s: float, cpu_s: float) -> bool:
    """Whether the core was, and our clock has what the thread had of it."""
    return wall_s > 1.3 * cpu_s and clock_s == pytest.approx(cpu_s, rel=0.2)


def _share_a_core(core: int) -> tuple[float, float, float]:
    """(seconds of the wall clock, of our clock, on the core) of some work."""
    os.sched_setaffinity(0, {core})
    clock = cpu_wait_clock()
    began = time.monotonic(), clock(), time.thread_time()
    while time.thread_time() - began[2] < 0.1:
        pass
    ended = time.monotonic(), clock(), time.thread_time()
    slept_from = clock()
    time.sleep(0.02)
    assert clock() - slept_from >= 0.019
    return tuple(b - a for a, b in zip(began, ended, strict=True))  # type: ignore[return-value]


def test_phases_between_steps_are_kept_time_by_time_without_waits_and_files(clock):
    phases = phases_on(clock)
    phases.begin(1)
    phases.end()
    for seconds in (1, 2):
        with phases("save"):
            clock.now_s += seconds
            with recorder.apart():
                clock.now_s += 100  # this rank's files
            with phases("callbacks"):
                clock.now_s += 1000  # of rank 0 alone
        with phases("validate"), phases("forward"):
            clock.now_s += 10 * seconds
    with phases("generate"):
        clock.now_s += 5
    kept = {name: list(times) for name, times in phases.between_steps.items()}
    assert kept == {"save": pytest.approx([1, 2]), "validate": pytest.approx([10, 20])}
    assert phases.kept() == {1: {}}

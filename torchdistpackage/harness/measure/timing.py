"""Seconds of calls that take turns: the host's where a call blocks, the device's where it queues.

Nothing but the call is inside a time. Before each one its ranks meet, so that none is timed waiting
for a late peer or behind a full queue. Where several units are busy at the same time all of them
meet, or they would drift apart and each be measured alone.

On a device the stream sleeps first, then come the meeting and the call, which are so issued before
either runs: no launch is inside a time, and sleeps of unlike length end in the meeting.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

Call = Callable[[], object]

HELD_S, LONGEST_S = 3e-4, 2e-2
"""How long a stream sleeps at first, and at most, where hosts take longer to issue a call."""


@dataclass
class CallTimes:
    """Of one call by iteration. host_s: what the host took to issue it; empty where it blocks."""

    seconds: list[float] = field(default_factory=list[float])
    host_s: list[float] = field(default_factory=list[float])


def in_turns(
    calls: Sequence[Call],
    together: Call,
    device: torch.device,
    *,
    iterations: int,
    warmup: int,
) -> list[CallTimes]:
    """For each call its times, of this rank.

    together: brings the ranks together, untimed. The order is turned from one iteration to the
    next, and `warmup` iterations go ahead that are not kept.
    """
    time_call = _DeviceTimer().time if device.type == "cuda" else _time_blocking
    times = [CallTimes() for _ in calls]
    order = list(range(len(calls)))
    for turn in range(-warmup, iterations):
        for i in order:
            time_call(calls[i], together, times[i] if turn >= 0 else CallTimes())
        order.append(order.pop(0))
    return times


def join_sync(together: Call, num_calls: int, *, iterations: int, warmup: int) -> None:
    """The meetings of `in_turns` with so many calls, for a rank that has none to time."""
    for _ in range(num_calls * (warmup + iterations)):
        together()


def _time_blocking(call: Call, together: Call, times: CallTimes) -> None:
    together()
    times.seconds.append(_host_s(call))


class _DeviceTimer:
    """By events on the current stream, which every call of ours makes wait for its result."""

    def __init__(self) -> None:
        self._cycles_per_s = _cycles_per_s()
        self._held_s = HELD_S

    def time(self, call: Call, together: Call, times: CallTimes) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(self._held_s * self._cycles_per_s))
        together()
        begin.record()
        times.host_s.append(_host_s(call))
        if begin.query():  # the device came to it while the host was still busy
            self._held_s = min(2 * self._held_s, LONGEST_S)
        end.record()
        end.synchronize()  # the next iteration starts on an empty queue
        times.seconds.append(begin.elapsed_time(end) / 1e3)


def _host_s(call: Call) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def _cycles_per_s() -> float:
    """Of torch's sleeping kernel."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 1_000_000
    torch.cuda._sleep(cycles)  # the first launch loads the kernel
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (begin.elapsed_time(end) / 1e3)

"""Seconds of calls that take turns: the host's where a call blocks, the device's where it queues.

One rule: nothing but the call is inside a time. Before each one the ranks that take part meet, so
that nobody is timed waiting for a late peer or behind a full queue. Where several units are busy
at the same time all of them meet, or they would drift apart and each be measured alone.
"""

import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


def in_turns(
    calls: Sequence[Call],
    together: Call,
    device: torch.device,
    *,
    iterations: int,
    warmup: int,
) -> list[list[float]]:
    """For each call its seconds by iteration, of this rank.

    together: brings the ranks together, untimed. The order is turned from one iteration to the
    next, and `warmup` iterations go ahead that are not kept.
    """
    watch = _device_s if device.type == "cuda" else _host_s
    times: list[list[float]] = [[] for _ in calls]
    order = list(range(len(calls)))
    for turn in range(-warmup, iterations):
        for i in order:
            together()
            seconds = watch(calls[i])
            if turn >= 0:
                times[i].append(seconds)
        order.append(order.pop(0))
    return times


def attend(together: Call, num_calls: int, *, iterations: int, warmup: int) -> None:
    """The meetings of `in_turns` with so many calls, for a rank that has none to time."""
    for _ in range(num_calls * (warmup + iterations)):
        together()


def _host_s(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _device_s(call: Call) -> float:
    """By events on the current stream, which every call of ours makes wait for its result."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()  # the next iteration starts on an empty queue
    return begin.elapsed_time(end) / 1e3

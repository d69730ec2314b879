"""Autograd has a thread for each device: gradients that come in two threads at once."""

import threading
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchdistpackage.ddp.bucket_comm import ReducerParts
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.scheduled_ready import LastBackwardPolicy

PATIENCE_S = 1.0


class Met(list):
    """How many gradients each bucket lacks. Whoever first looks at those of bucket 1 in the thread
    that sends lets the other thread complete it, and waits until that one is about to send it."""

    def __init__(self, counts: list[int], looked: threading.Event, sends: threading.Event):
        super().__init__(counts)
        self._looked, self._sends, self._sender = looked, sends, threading.current_thread()

    def __getitem__(self, b: int) -> int:
        if b == 1 and threading.current_thread() is self._sender and not self._looked.is_set():
            self._looked.set()
            self._sends.wait(PATIENCE_S)
        return super().__getitem__(b)


def two_threads() -> tuple[list[int], int]:
    """(buckets in the order in which they were launched, most launches at one time).

    This thread completes bucket 0, sends it and goes on to look at bucket 1; just then another
    completes that one."""
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    # the first bucket is that of the last parameter
    specs = [ParamSpec(f"w{i}", w, dist.group.WORLD) for i, w in enumerate(reversed(weights))]
    parts = ReducerParts(scheduled_ready=LastBackwardPolicy)
    reducer = Reducer(specs, cap_bytes=1, parts=parts)
    launched: list[int] = []
    looked, sends = threading.Event(), threading.Event()
    under_way, most = 0, 0

    def on_launch(b: int) -> None:
        nonlocal under_way, most
        launched.append(b)
        under_way += 1
        most = max(most, under_way)
        if threading.current_thread() is other:
            sends.set()
            looked.wait(PATIENCE_S)
            threading.Event().wait(0.1)  # in a launch the GIL is given up
        under_way -= 1

    def complete_second() -> None:
        looked.wait(PATIENCE_S)
        (weights[1] * 2).sum().backward()

    other = threading.Thread(target=complete_second)
    with reducer.scheduled() as steered, steered.last_backward():
        sum((w.sum() for w in weights), torch.zeros(())).backward()
    reducer.finish()  # from here on buckets leave early
    with reducer.scheduled() as steered, steered.last_backward():
        reducer.on_launch = on_launch
        reducer.pending_counts = Met(reducer.pending_counts, looked, sends)
        other.start()
        weights[0].sum().backward()
        other.join()
    reducer.finish()
    assert weights[1].grad.tolist() == [3.0] * 3
    return launched, most


def test_a_bucket_that_two_threads_could_send_leaves_once(ranks):
    assert ranks(1).run(two_threads) == [([0, 1], 1)]


def two_outputs() -> list[int]:
    """Backwards in which the reducer was armed: two threads come to outputs of one of them."""
    reducer = Reducer([ParamSpec("w", nn.Parameter(torch.ones(3)), dist.group.WORLD)], cap_bytes=1)
    armed: list[int] = []
    both = threading.Barrier(2)

    def arm(task: int, wait: bool) -> None:
        armed.append(task)
        with suppress(threading.BrokenBarrierError):  # the other one is held up, as it should be
            both.wait(PATIENCE_S)
        reducer._task = task

    def reach() -> None:
        with torch.no_grad():
            reducer.reached(-1, True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C, "_current_graph_task_id", lambda: 7)
        patch.setattr(reducer, "_arm", arm)
        threads = [threading.Thread(target=reach) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    reducer._task = -1
    return armed


def test_outputs_that_two_threads_reach_arm_once(ranks):
    assert ranks(1).run(two_outputs) == [[7]]

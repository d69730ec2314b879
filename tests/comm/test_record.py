"""The ring of calls: what stands in it while ranks talk, wait and fail."""

import gc
import json
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchdistpackage.comm import primitives
from torchdistpackage.comm.flight_recorder import SIZE, FlightRecorder, recorder
from torchdistpackage.comm.group_state import drop_states
from torchdistpackage.comm.p2p import receive, start_send
from torchdistpackage.comm.tpc import tpc


def talk() -> dict:
    tpc.setup_process_groups([("data", 2), ("tensor", 2)])
    data, tensor = tpc.get_group("data"), tpc.get_group("tensor")
    primitives.all_reduce(torch.ones(2, 3), data)
    primitives.all_reduce(torch.ones(5, dtype=torch.int64), data)
    pending = primitives.all_gather(torch.ones(4), tensor, async_op=True)
    recorder.phase, recorder.step = "forward", 7
    before = recorder.snapshot()["calls"][-1]["state"]
    pending.wait()
    peer = tpc.get_ranks_in_group("tensor")[1 - tpc.get_tp_rank()]
    begun = start_send(torch.ones(1), tensor, peer)
    receive(torch.ones(1), tensor, peer)
    begun.wait()
    return {"before": before, **recorder.snapshot(num=5)}


@pytest.mark.own_transport("what the record says of gloo's calls")
def test_a_snapshot_says_what_each_group_did(ranks):
    for rank, seen in enumerate(ranks(4).run(talk)):
        seen = json.loads(json.dumps(seen))
        assert (seen["step"], seen["phase"], seen["before"]) == (7, "forward", "issued")
        groups = {group["axis"]: group for group in seen["groups"]}
        assert groups["data"]["ranks"] == [rank % 2, rank % 2 + 2]
        assert groups["data"]["issued"] == groups["data"]["done"] == 2
        at = seen["groups"].index(groups["tensor"])
        peer = rank ^ 1
        assert seen["peers"] == [{"group": at, "peer": peer, "sent": 1, "received": 1}]
        told = [
            (c["operation"], c["sequence"], c["shape"], c["dtype"], c["peer"], c["state"])
            for c in seen["calls"]
        ]
        assert told == [
            ("all_reduce", 1, [2, 3], "float32", None, "done"),
            ("all_reduce", 2, [5], "int64", None, "done"),
            ("all_gather", 1, [4], "float32", None, "done"),
            ("send", 1, [1], "float32", peer, "done"),
            ("receive", 1, [1], "float32", peer, "done"),
        ]


def until(condition: Callable[[], bool]) -> bool:
    """It holds within 30 s."""
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def waiting(seen: Path) -> tuple[float, float] | None:
    """Rank 1 comes 0.3 s after another thread has seen that rank 0 waits."""

    def look() -> None:
        if until(lambda: [c["state"] for c in recorder.snapshot()["calls"]][-1:] == ["waiting"]):
            seen.touch()

    if dist.get_rank():
        assert until(seen.exists), "rank 0 was never seen waiting"
        time.sleep(0.3)
        primitives.all_reduce(torch.ones(1), dist.group.WORLD)
        return None
    looking = threading.Thread(target=look)
    looking.start()
    before, began = recorder.waited_s, time.monotonic()
    primitives.all_reduce(torch.ones(1), dist.group.WORLD)
    took_s = time.monotonic() - began
    looking.join()
    return recorder.waited_s - before, took_s


def test_who_waits_is_seen_from_outside_and_the_time_is_added_up(ranks, tmp_path):
    waited_s, took_s = ranks(2).run(waiting, tmp_path / "seen")[0]
    assert 0.2 < waited_s <= took_s


def ended_groups() -> int:
    """Groups that a user makes and ends, in which our calls were made."""
    for _ in range(3):
        group = dist.new_group([0, 1])
        primitives.all_reduce(torch.ones(1), group)
        dist.destroy_process_group(group)
    primitives.all_reduce(torch.ones(1), dist.new_group([0, 1]))
    return len(recorder.snapshot()["groups"])


def test_ended_groups_are_let_go(ranks):
    assert max(ranks(2).run(ended_groups)) <= 2


def let_go() -> bool:
    """Ended by its users, in a process that makes no other."""
    group = dist.new_group([0, 1])
    primitives.all_reduce(torch.ones(1), group)
    seen = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return seen() is None and len(recorder.snapshot()["groups"]) <= 1


@pytest.mark.own_transport("the double keeps its groups")
def test_the_record_keeps_no_group_alive(ranks):
    assert ranks(2).run(let_go) == [True, True]


def test_what_was_set_for_a_world_ends_with_it():
    recorder = FlightRecorder()
    plain = recorder.clock_s
    recorder.checks, recorder.clock_s = True, lambda: 0.0
    recorder.forget_all()
    assert recorder.checks is False and recorder.clock_s is plain


@pytest.mark.own_transport("what the record says of gloo's calls")
def test_the_ring_keeps_the_last_calls_and_forgets_ended_groups(ranks):
    ranks(1).run(keeps_the_last)


def keeps_the_last() -> None:
    recorder, world = FlightRecorder(), dist.group.WORLD
    for _ in range(SIZE + 3):
        recorder.end(recorder.begin("barrier", world, None), recorder.clock_s())
    seen = recorder.snapshot(num=10**6)
    assert [c["sequence"] for c in seen["calls"]] == list(range(4, SIZE + 4))
    assert seen["groups"] == [
        {"ranks": [0], "axis": "", "issued": SIZE + 3, "done": SIZE + 3},
    ]
    drop_states(world)
    assert recorder.snapshot()["calls"] == recorder.snapshot()["groups"] == []

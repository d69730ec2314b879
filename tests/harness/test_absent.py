"""A rank that is stopped, stuck or broken is named by all others in time, and holds up none."""

import os
import socket
import subprocess
import time
from functools import partial

import pytest
import torch.distributed as dist

from tests.harness.failing import fails
from torchdistpackage.comm import primitives
from torchdistpackage.comm.tpc import tpc

HOST = socket.gethostname()
LIMIT_S = 3.0


def stop_for(seconds: float) -> None:
    """SIGSTOP myself; a shell lets me go on."""
    pid = os.getpid()
    with subprocess.Popen(
        ["/bin/sh", "-c", f"kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"]
    ):
        time.sleep(0.2)


def stopped_first(rank: int, patch: pytest.MonkeyPatch) -> None:
    if dist.get_rank() == rank:
        stop_for(LIMIT_S + 1)


def stopped_within(rank: int, patch: pytest.MonkeyPatch) -> None:
    """The rank stops ahead of its second collective over the tensor group."""
    right = primitives.all_reduce
    calls = 0

    def all_reduce(x, group, *rest):
        nonlocal calls
        calls += group is tpc.get_group("tensor")
        if dist.get_rank() == rank and calls == 2:
            stop_for(LIMIT_S + 1)
        return right(x, group, *rest)

    patch.setattr(primitives, "all_reduce", all_reduce)


def timed(config, change, limit_s: float = LIMIT_S) -> tuple[str, float]:
    begin_s = time.monotonic()
    text = fails(config, change, timeout_s=limit_s)
    time_s = time.monotonic() - begin_s
    tpc.destroy()
    dist.destroy_process_group()  # nothing more can go over it
    return text, time_s


@pytest.mark.full  # tests/cli/test_comm.py has one of three
@pytest.mark.parametrize("rank", [1, 2])
def test_a_stopped_rank_is_named_by_all_in_time(ranks, rank):
    """Rank 0 keeps the pool's store: test_a_store_that_stopped_with_its_rank_is_named."""
    found = ranks(3).run(timed, (("data", 3),), partial(stopped_first, rank))
    others = [r for r in range(3) if r != rank]
    [text] = {text for text, _ in found}
    assert f"the roll call over the global group of 3 ranks: rank {rank}" in text
    assert f"did not come within 3 s; ranks {', '.join(map(str, others))} on {HOST} came" in text
    assert max(found[r][1] for r in others) < LIMIT_S + 1


def test_a_rank_that_stops_in_between_is_named_with_its_operation(ranks):
    """Rank 3 is stuck, its peer waits for it, and the others learn of it as well."""
    config = (("pipe", 2), ("tensor", 2))
    found = ranks(4).run(timed, config, partial(stopped_within, 3))
    [text] = {text for text, _ in found}
    assert (
        f"all_reduce of int64 over the tensor group of ranks [2, 3]: rank 3 on {HOST} did not "
        f"come within 3 s; rank 2 on {HOST} waited"
    ) in text
    assert text.startswith("1 check failed")
    # once the limit, and once more where a loaded machine is late to look; a hang takes a minute
    assert max(time_s for _, time_s in found[:3]) < 2 * LIMIT_S + 1


def raises_within(patch: pytest.MonkeyPatch) -> None:
    if dist.get_rank() == 2:

        def broken(x, group, *rest):
            raise RuntimeError("the card fell off the bus\nmore")

        patch.setattr(primitives, "reduce_scatter", broken)


def test_a_rank_that_fails_is_named_with_its_error_and_soon(ranks):
    """Its peers would wait for it for the whole limit, but hear of it."""
    found = ranks(3).run(timed, (("data", 3),), raises_within, 12.0)
    [text] = {text for text, _ in found}
    assert (
        f"reduce_scatter of float32 over the data group of ranks [0, 1, 2]: rank 2 on {HOST} "
        f"failed: the card fell off the bus\n"
    ) in text
    assert max(time_s for _, time_s in found) < 5


def store_kept_by_rank_0() -> tuple[str, float]:
    """Rank 0 stops, and with it the store, so nobody can be told anything."""
    port = [0]
    server = None
    if dist.get_rank() == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [server.port]
    dist.broadcast_object_list(port)
    dist.barrier()
    dist.destroy_process_group()
    store = server or dist.TCPStore("127.0.0.1", port[0], is_master=False, wait_for_workers=False)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    return timed((("data", 3),), partial(stopped_first, 0))


@pytest.mark.full
def test_a_store_that_stopped_with_its_rank_is_named(ranks):
    _, *found = ranks(3).run(store_kept_by_rank_0)
    for rank, (text, time_s) in enumerate(found, 1):
        assert f"rank {rank} on {HOST}: the store at 127.0.0.1:" in text
        assert "which rank 0 keeps (under torchrun its agent), does not answer" in text
        assert time_s < LIMIT_S + 1

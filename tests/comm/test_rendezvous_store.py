"""Meeting: ports, tokens and the roll call, with real processes and strangers on their ports."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.comm.starting import answering, bound, by_hand, in_step, meet, meet_within, two_nodes
from tests.tells import tells
from torchdistpackage.comm import primitives, rendezvous_store
from torchdistpackage.comm.runtime import find_free_port, join, leave
from torchdistpackage.environment.rendezvous import Rendezvous, detect
from torchdistpackage.errors import AbsentError


def test_a_step_meets_at_the_first_candidate_that_is_free(start):
    ports = detect(in_step(0, 3, 71)).ports
    with bound(ports[0]), socket.socket() as mute:
        mute.bind(("127.0.0.1", ports[1]))
        told = start(meet, [in_step(r, 3, 71) for r in range(3)])
    assert [t[:4] for t in told] == [(r, 3, ports[2], "localhost") for r in range(3)]


def test_another_jobs_store_is_passed_over_and_left_as_it_was(start):
    ports = detect(in_step(0, 2, 72)).ports
    other = dist.TCPStore("127.0.0.1", ports[0], 2, True, wait_for_workers=False)
    other.set("tdp/token", "another")
    other.set("token", "another")
    torchs = dist.TCPStore("127.0.0.1", ports[1], 2, True, wait_for_workers=False)
    told = start(meet, [in_step(r, 2, 72) for r in range(2)])
    assert [t[2] for t in told] == [ports[2]] * 2
    assert (other.num_keys(), torchs.num_keys()) == (2, 0)


def join_as_told(ports: tuple[int, ...], folder: Path) -> tuple[int, list[object]]:
    """Where a job of two ranks met, and who is in it; it ends once both jobs have met, as the
    second one may else meet at the first one's port."""
    rank, token = int(os.environ["TEST_RANK"]), os.environ["TEST_TOKEN"]
    joined = join(
        Rendezvous(rank, 2, rank, 2, 0, "127.0.0.1", ports, token, "test"), init_timeout_s=15
    )
    said = primitives.gather_objects((token, rank))
    (folder / f"{token}{rank}").touch()
    end_s = time.monotonic() + 30
    while len(list(folder.iterdir())) < 4:
        assert time.monotonic() < end_s, "the other job has not met"
        time.sleep(0.01)
    leave()
    return joined.port, said


def test_two_jobs_on_the_same_candidates_never_mix(start, tmp_path):
    ports = tuple(int(find_free_port()) for _ in range(3))
    told = start(
        join_as_told,
        [{"TEST_RANK": str(r), "TEST_TOKEN": t} for r in (1, 0) for t in ("a", "b")],
        ports,
        tmp_path,
    )
    at = {said[0][0]: port for port, said in told}
    assert at.keys() == {"a", "b"} and at["a"] != at["b"]
    for i, (port, said) in enumerate(told):
        token = "ab"[i % 2]
        assert said == [(token, 0), (token, 1)] and port == at[token]


def test_a_users_busy_port_is_refused_by_number_before_the_limit_by_all(start):
    """A server of another kind, and another job's store; nobody waits for the time limit."""
    theirs = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    theirs.set("token", "another")
    begin = time.monotonic()
    with answering(b"SSH-2.0-OpenSSH_9.2\r\n") as port:
        ports = (port, theirs.port)
        told = start(meet_within, [by_hand(r, 2, port) for port in ports for r in range(2)], 20)
    assert time.monotonic() - begin < 15
    for i, answer in enumerate(told):
        assert f"port {ports[i // 2]}" in answer.error and "taken" in answer.error
        assert "MASTER_PORT" in answer.error
    assert "another job" in told[3].error


def test_missing_ranks_are_named_within_the_time_limit(start):
    port = find_free_port()
    begin = time.monotonic()
    told = start(meet_within, [by_hand(r, 3, port) for r in (0, 2)], 2.0)
    assert 2 <= time.monotonic() - begin < 7
    assert tells(told[0].error, "1", "3 ranks", "rank 1", "within 2")
    assert tells(told[1].error, "1", "3 ranks", "rank 1", "within 2")
    assert "I am rank 2" in told[1].error


def test_missing_ranks_are_named_with_their_hosts_where_slurm_tells(start):
    told = start(meet_within, [two_nodes(r, 73) for r in (0, 1)], 2.0)
    for answer in told:
        assert tells(answer.error, "2", "4 ranks", "ranks 2", "n9", "3", "n9", "within 2")


def late(folder: Path, limit_s: float, sleep_s: float) -> tuple[str, float]:
    """What this rank is told, and how long after both have started, which takes seconds itself."""
    (folder / os.environ["RANK"]).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)
    begin = time.monotonic()
    if os.environ["RANK"] == "0":
        time.sleep(sleep_s)
    with pytest.raises(AbsentError) as met:
        meet_within(limit_s)
    return str(met.value), time.monotonic() - begin


def test_a_rank_0_that_comes_late_leaves_no_more_time_than_agreed(start, tmp_path):
    """Rank 0 alone would wait until 2.5 s + 5 s."""
    port = find_free_port()
    env = [by_hand(r, 3, port) for r in (0, 1)]
    for said, waited_s in start(late, env, tmp_path, 5.0, 2.5, limit_s=60):
        assert "(rank 2) within 5 s" in said
        assert waited_s < 7


def test_missing_ranks_are_named_at_a_file_too(start, tmp_path: Path):
    env = {**by_hand(1, 2, 1), "LOCAL_WORLD_SIZE": "2", "TDP_STORE": str(tmp_path / "store")}
    (told,) = start(meet_within, [env], 1.0)
    assert tells(told.error, "1", "2 ranks", "rank 0", "within 1")


def test_nobody_at_the_address_says_where_was_looked(start):
    port = find_free_port()
    (told,) = start(meet_within, [by_hand(1, 2, port)], 1.0)
    assert "found no rank 0" in told.error and port in told.error


def test_a_silent_server_at_the_users_port_is_no_rank_0(start):
    with bound(0) as silent:
        port = silent.getsockname()[1]
        (told,) = start(meet_within, [by_hand(1, 2, port)], 2.0)
    assert f"port {port} has not answered" in told.error


def paused_store() -> tuple[float, str]:
    """A process listens as rank 0 and is stopped for longer than a stranger may be silent."""
    port = int(find_free_port())
    places = [Rendezvous(r, 2, r, 2, 0, "127.0.0.1", (port,), "a", "test") for r in range(2)]
    ready, serving = os.pipe()
    if not (keeper := os.fork()):
        store, _ = rendezvous_store.serve(places[0], (port,), timeout_s=30)
        os.write(serving, b".")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    os.kill(keeper, signal.SIGSTOP)
    wakes = threading.Timer(PAUSE_S, os.kill, (keeper, signal.SIGCONT))
    wakes.start()
    begin = time.monotonic()
    try:
        store, _ = rendezvous_store.find(places[1], (port,), timeout_s=30)
        return time.monotonic() - begin, store.get("token").decode()
    finally:
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)


PAUSE_S = rendezvous_store.BUSY_S + 1.5


def test_a_rank_0_that_is_stopped_for_a_moment_is_no_stranger(start):
    ((waited_s, token),) = start(paused_store, [{}])
    assert token == "a" and waited_s > PAUSE_S - 1

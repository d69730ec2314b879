"""Small parts that two ranks of gloo swap by a socket of their own."""

import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchdistpackage.comm import primitives as p
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.transport import swap
from torchdistpackage.errors import CommError

pytestmark = pytest.mark.own_transport("a socket between two ranks of gloo")


def pair(use: str) -> dist.ProcessGroup:
    return Groups(dist.get_rank()).of([0, 1], use=use)


def numbers(rank: int, num: int) -> torch.Tensor:
    return torch.arange(num, dtype=torch.float64) * (rank + 1)


def around_the_limit() -> list[bool]:
    """Below, at and above what is swapped, one call after the other, with such as are begun."""
    group, rank = pair("swaps"), dist.get_rank()
    limit = recorder.line(group).swapped_bytes // 8
    for num in (2, limit - 2, limit, limit + 2, 4 * limit):
        both = [numbers(r, num) for r in range(2)]
        begun = p.all_gather(both[rank], group, async_op=True)
        assert torch.equal(p.all_reduce(both[rank].clone(), group), sum(both))
        half = slice(rank * num // 2, (rank + 1) * num // 2)
        assert torch.equal(p.reduce_scatter(both[rank], group), sum(both)[half])
        assert torch.equal(p.all_gather(both[rank], group), torch.cat(both))
        sizes = [num, 1]
        parts = [part[:n] for part, n in zip(both, sizes, strict=True)]
        assert torch.equal(p.all_gather(parts[rank], group, sizes), torch.cat(parts))
        assert torch.equal(begun.wait(), torch.cat(both))
    line, swap = recorder.line(group), recorder.line(group).swap
    recorder.forget(group)
    return [line.swapped_bytes > 0, swap is not None and swap._socket.fileno() == -1]


def test_what_is_swapped_is_what_gloo_sends(ranks):
    assert ranks(2).run(around_the_limit) == [[True, True]] * 2, "and the socket ends with the log"


def without_address() -> bool:
    """Rank 0 knows none: both go on over gloo."""
    group = pair("no address")
    known = os.environ["GLOO_SOCKET_IFNAME"]
    os.environ["GLOO_SOCKET_IFNAME"] = "none"
    try:
        for _ in range(2):
            assert p.all_reduce(torch.ones(3), group).tolist() == [2, 2, 2]
            assert p.all_gather(torch.ones(1), group).tolist() == [1, 1]
    finally:
        os.environ["GLOO_SOCKET_IFNAME"] = known
    return recorder.line(group).swap is None


def test_ranks_without_an_address_keep_to_gloo(ranks):
    assert ranks(2).run(without_address) == [True, True]


def in_another_call() -> str:
    group = pair("mixed")
    p.all_reduce(torch.ones(1), group)
    with pytest.raises(CommError) as caught:
        if dist.get_rank():
            p.reduce_scatter(torch.ones(4), group)
        else:
            p.all_gather(torch.ones(2), group)
    return str(caught.value)


def test_both_ranks_hear_that_the_other_one_is_in_another_call(ranks):
    for said in ranks(2).run(in_another_call):
        assert "the other rank is in another call: 8 bytes came" in said, said


def alone(leaves: bool) -> tuple[str, float]:
    """Rank 1 ends its group, or does something else; rank 0 goes on with sums."""
    group, whole = pair(f"alone {leaves}"), pair("meets")
    p.all_reduce(torch.ones(1), group)
    p.set_timeout(group, 20.0 if leaves else 0.3)
    began, said = time.monotonic(), ""
    if dist.get_rank():
        if leaves:
            recorder.forget(group)
    else:
        with pytest.raises(CommError) as caught:
            p.all_reduce(torch.ones(1), group)
        said = str(caught.value)
        with pytest.raises(CommError, match="an earlier call failed"):
            p.all_reduce(torch.ones(1), group)
    p.barrier(whole)
    return said, time.monotonic() - began


@pytest.mark.parametrize(
    ("leaves", "text"),
    [(True, "Connection closed by peer, rank 1 at ["), (False, "Timed out waiting 0:00:00.3")],
)
def test_who_does_not_come_or_leaves_is_named_in_time(ranks, leaves: bool, text: str):
    said, took_s = ranks(2).run(alone, leaves)[0]
    assert text in said, said
    assert said.startswith("all_reduce over ranks (0, 1) failed (number 2)") and took_s < 15


def absent() -> tuple[str, float]:
    """Rank 1 does not come to its first call on the group."""
    group, whole = pair("absent"), pair("meets")
    p.set_timeout(group, 0.3)
    began, said = time.monotonic(), ""
    if not dist.get_rank():
        with pytest.raises(CommError) as caught:
            p.all_reduce(torch.ones(1), group)
        said = str(caught.value)
    p.barrier(whole)
    return said, time.monotonic() - began


def test_a_first_call_has_the_limit_too(ranks):
    said, took_s = ranks(2).run(absent)[0]
    assert "Timed out waiting 0:00:00.3" in said and "for rank 1 to come" in said, said
    assert took_s < 15


def in_threads() -> list[list[float]]:
    """On rank 0 a second thread calls while the first one waits."""
    group, whole = pair("threads"), pair("meets")
    p.all_reduce(torch.ones(1), group)
    found: list[list[float]] = [[], []]

    def call(i: int) -> None:
        found[i] = p.all_reduce(torch.full((2,), float(i + 1)), group).tolist()

    if dist.get_rank():
        p.barrier(whole)
        call(0)
        call(1)
    else:
        threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
        for number, thread in enumerate(threads):
            thread.start()
            while recorder.line(group).issued < number + 2:
                time.sleep(0.001)
            time.sleep(0.05)
        p.barrier(whole)
        for thread in threads:
            thread.join()
    return found


def test_threads_go_one_after_the_other(ranks):
    assert ranks(2).run(in_threads) == [[[2, 2], [4, 4]]] * 2


def forks() -> str:
    """The child has no part in its parent's connection, which goes on."""
    group = pair("forks")
    p.all_reduce(torch.ones(1), group)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            p.all_reduce(torch.ones(1), group)
        except BaseException as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert p.all_reduce(torch.ones(1), group).item() == 2
    said = os.read(reader, 2000).decode()
    os.close(reader), os.close(writer)
    return said


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_leaves_the_connection_to_its_parent(ranks):
    for said in ranks(2).run(forks):
        assert "or this process was forked" in said, said


def many(number: int) -> list[int]:
    """How many files are open, before and after many groups came and went."""
    found = []
    for turns in (1, number):
        for _ in range(turns):
            group = dist.new_group([0, 1])
            assert p.all_reduce(torch.ones(1), group).item() == 2
            dist.destroy_process_group(group)
        del group
        found.append(len(list(Path("/proc/self/fd").iterdir())))
    return found


@pytest.mark.parametrize("number", [10, pytest.param(200, marks=pytest.mark.full)])
def test_groups_that_end_leave_no_socket(ranks, number: int):
    for before, after in ranks(2).run(many, number):
        assert after <= before


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_strangers_hold_nobody_up(monkeypatch: pytest.MonkeyPatch, address: str):
    monkeypatch.setattr(swap, "_address", lambda: address)
    store, key, found = dist.HashStore(), "swap/x", []
    first = threading.Thread(target=lambda: found.append(swap._offer(store, key, 20.0)))
    first.start()
    store.wait([key], timedelta(seconds=20))
    place = (address, int(store.get(key).split()[1]))
    strangers = [socket.create_connection(place) for _ in range(3)]  # silent ones
    strangers[1].sendall(b"x" * 16)
    strangers[2].sendall(b"x")
    began = time.monotonic()
    found.append(swap._answer(store, key, 20.0))
    first.join()
    assert time.monotonic() - began < 4
    other, mine = found
    mine.sendall(b"hello")
    assert other.recv(5) == b"hello"
    for one in (*strangers, *found):
        one.close()


def test_nobody_who_comes_is_waited_for_as_long_as_the_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(swap, "_address", lambda: "127.0.0.1")
    store = dist.HashStore()
    with pytest.raises(TimeoutError):
        swap._offer(store, "swap/x", 0.1)
    assert not store.check(["swap/x"]), "what no one listens to is not left to find"

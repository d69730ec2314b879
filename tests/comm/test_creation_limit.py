"""Who waits for a group in vain says for whom, and is ended if it is ours."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.tells import facts_pattern, tells
from torchdistpackage.comm import creation
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.runtime import join
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.errors import CommError, RankError
from torchdistpackage.launch.workers import run_local

LIMIT_S = 0.5


def heard(text: Path) -> str:
    """What is in the file, once there is a line."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if "\n" in (told := text.read_text()):
            return told
        time.sleep(0.02)
    raise AssertionError("nobody spoke")


def never_returns(folder: str) -> None:
    """Rank 2 does not come, and the back end of the others has no limit of its own."""
    if dist.get_rank() == 2:
        return
    path, released, ended = Path(folder, f"{dist.get_rank()}"), threading.Event(), []

    def ask() -> None:
        try:
            Groups(dist.get_rank(), timeout_s=LIMIT_S).of([0, 1, 2], use="late")
        except ZeroDivisionError:
            ended.append(True)

    saved = os.dup(2)
    with pytest.MonkeyPatch.context() as patch, path.open("wb") as file:
        patch.setattr(creation, "MARGIN_S", 0.1)
        patch.setattr(dist, "new_group", lambda *_, **__: released.wait(60) and 1 / 0)
        thread = threading.Thread(target=ask, daemon=True)
        os.dup2(file.fileno(), 2)
        try:
            thread.start()
            told = heard(path)
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        assert thread.is_alive() and not ended, "a user's own process goes on"
        released.set()
        thread.join(20)
    assert tells(told, "ranks (0, 1, 2)", "1", "3 ranks")
    assert "(rank 2)" in told and f"{LIMIT_S:g} s" in told
    assert f"rank {dist.get_rank()} on " in told and ended


@pytest.mark.late_in_full
def test_who_does_not_come_is_named_by_those_who_wait(ranks, tmp_path):
    ranks(3).run(never_returns, str(tmp_path))


def given_up() -> None:
    """gloo has a limit, but does not say for whom it waited."""
    made = Groups(dist.get_rank(), timeout_s=LIMIT_S)
    if dist.get_rank() == 0:
        with pytest.raises(CommError, match=r"1 of 2 ranks did not come .*\(rank 1\)"):
            made.of([0, 1], use="late")


@pytest.mark.late_in_full
def test_a_back_end_that_gives_up_is_told_for_whom(ranks):
    ranks(2).run(given_up)


def stuck(*_: object, **__: object) -> None:
    time.sleep(120)


def nobody_returns(which: str) -> None:
    """As a rank of `tdp train`: joined, in a process that run_local started."""
    creation.MARGIN_S = 0.1
    here = detect(os.environ)
    if which == "the default group":
        creation.CONNECT_S = 5.0
        dist.init_process_group = stuck
        join(here, init_timeout_s=3)
    join(here, init_timeout_s=30)
    if which == "a group, under another launcher":
        del os.environ["TDP_FAILURE"]
        creation.end_processes()
    if here.rank == 1:
        time.sleep(120)
    dist.new_group = stuck
    Groups(here.rank, timeout_s=LIMIT_S).of([0, 1], use="late")


def test_a_rank_that_we_started_is_ended_and_named(forks):
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_local(nobody_returns, ("a group",), num_procs=2)
    assert time.monotonic() - began < 60
    text = str(caught.value)
    assert text.startswith("rank 0 of 2 failed")
    assert tells(text, "ranks (0, 1)", "1", "2 ranks")
    assert f"(rank 1 on {os.uname().nodename})" in text


def test_a_rank_that_is_ours_ends_under_another_launcher_too(forks):
    with pytest.raises(RankError, match=facts_pattern("rank 0", "2 failed", "code 1")):
        run_local(nobody_returns, ("a group, under another launcher",), num_procs=2)


def test_a_default_group_that_is_not_there_in_time_ends_too(forks):
    with pytest.raises(RankError) as caught:
        run_local(nobody_returns, ("the default group",), num_procs=2)
    assert "the default group: its 2 ranks came, but are not connected" in str(caught.value)


def connected_slowly() -> tuple[bool, str]:
    """All members come, and the back end takes several times the limit."""
    creation.MARGIN_S, creation.WARN_S = 0.1, 0.5
    read, write = os.pipe()
    saved = os.dup(2)
    os.dup2(write, 2)
    try:
        with creation.creation_limit("a group", (0, 1), lambda *_: True, dist.HashStore(), 0.5):
            time.sleep(2.5)
    finally:
        os.dup2(saved, 2)
        os.close(write)
    with os.fdopen(read) as told:
        return True, told.read()


def test_members_that_have_come_may_connect_slowly_and_that_is_said(ranks):
    for rank, (went_on, told) in enumerate(ranks(2).run(connected_slowly)):
        assert went_on
        # the first speaks for all
        said = told.count("its 2 ranks came, but are not connected after")
        assert said >= 2 if rank == 0 else said == 0


def keeper_gone() -> list[str]:
    """What is said of a member that never came, first with and then without the store's keeper."""
    creation.MARGIN_S, creation._TELL_WAIT_S = 0.1, 1.0
    port, serving = os.pipe()
    if not (keeper := os.fork()):
        store = dist.TCPStore("127.0.0.1", 0, 4, True, wait_for_workers=False)
        os.write(serving, str(store.port).encode())
        time.sleep(60)
        os._exit(0)
    limit = timedelta(seconds=2)
    port = int(os.read(port, 16))
    store = dist.TCPStore("127.0.0.1", port, 4, False, limit, wait_for_workers=False)
    for rank in (0, 1, 3):
        store.set(f"joins/{rank}", "")
    told: list[str] = []

    def came(store: dist.Store, rank: int) -> bool:
        return store.check([f"joins/{rank}"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(creation, "_give_up", lambda rank, text, *_: told.append(text))
        for name in "ab":
            with creation.creation_limit("a group", range(4), came, store, 0.3, name=name):
                end = time.monotonic() + 20
                while not told and time.monotonic() < end:
                    time.sleep(0.05)
            if name == "a":
                os.kill(keeper, signal.SIGKILL)
                os.waitpid(keeper, 0)
                (first,) = told
                told.clear()
    return [first, *told]


def test_who_cannot_ask_the_store_does_not_say_that_all_came(ranks):
    ((named, unknown),) = ranks(1).run(keeper_gone)
    assert "1 of 4 ranks did not come" in named and "(rank 2)" in named
    assert "does not answer" in unknown and "came, but" not in unknown


def requests_at_the_limit() -> int:
    """How often this rank asks whether another one has come, when all wait for one in vain."""
    creation.MARGIN_S = 0.1
    asked: list[int] = []

    def came(store: dist.Store, rank: int) -> bool:
        asked.append(rank)
        return rank != 3

    store, told = creation.default_store(), threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(creation, "_give_up", lambda *_: told.set())
        with creation.creation_limit("a group", range(4), came, store, 0.3, name="vain"):
            assert told.wait(30)
    return len(asked)


def test_one_member_looks_for_all(ranks):
    assert sorted(ranks(3).run(requests_at_the_limit)) == [0, 0, 4]

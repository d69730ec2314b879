"""The pool itself: what a test sees inside, how a test fails, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.tells import facts_pattern
from torchdistpackage.comm.creation import PerGroup
from torchdistpackage.comm.groups import step_over
from torchdistpackage.comm.transport.pairwise import EXPECTED_SUMMED, expected_tag
from torchdistpackage.errors import LaunchError, RankError
from torchdistpackage.testing import RankPool

ROOT = Path(__file__).resolve().parents[2]


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def survivors(pids: list[int], within_s: float = 5) -> list[int]:
    end = time.monotonic() + within_s
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    return alive


def sum_of_ranks(plus: int, *, times: int = 1) -> tuple[int, int, int]:
    total = torch.tensor(dist.get_rank() + plus)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total) * times


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_default_group_is_the_world_that_was_asked_for(
    ranks: RankPool, world_size: int
) -> None:
    total = sum(range(world_size)) + 3 * world_size
    expected = [(rank, world_size, 2 * total) for rank in range(world_size)]
    assert ranks(world_size).run(sum_of_ranks, 3, times=2) == expected


def test_a_run_costs_tens_of_milliseconds(ranks: RankPool) -> None:
    ranks(4).run(sum_of_ranks, 0)
    start = time.monotonic()
    for _ in range(10):
        ranks(4).run(sum_of_ranks, 0)
    print(f"{(time.monotonic() - start) / 10 * 1e3:.1f} ms a run of 4 ranks")


def draw() -> tuple[float, ...]:
    state = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled())
    assert state == (1, torch.float32, True)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def disturb() -> None:
    """Leave behind all that a test can: seeds, modes, variables, groups, a handler."""
    torch.manual_seed(5)
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "1"
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    pair = dist.new_group([0, 1], use_local_synchronization=True)
    if dist.get_rank() < 2:
        dist.all_reduce(torch.ones(1), group=pair)


def look() -> tuple[bool, int]:
    return "LEFT_BEHIND" in os.environ, len(dist.distributed_c10d._world.pg_map)


def test_a_run_finds_nothing_of_the_one_before(ranks: RankPool) -> None:
    drawn = ranks(4).run(draw)
    assert drawn == [drawn[0]] * 4
    for _ in range(2):  # the same group again: what it wrote to the store must be gone as well
        ranks(4).run(disturb)
        assert ranks(4).run(look) == [(False, 1)] * 4
        assert ranks(4).run(draw) == drawn


def leave_the_world() -> None:
    dist.destroy_process_group()


def keep_of_the_world(value: int) -> tuple[int | None, int]:
    """What was kept for the world by the run before, and the world's identity."""
    known, WORLD_KEEPS[dist.group.WORLD] = WORLD_KEEPS.get(dist.group.WORLD), value
    dist.new_group([0, 1])
    return known, id(dist.group.WORLD)


def lose_messages(ranks_that_fail: list[int]) -> None:
    with contextlib.suppress(ValueError), step_over(dist.group.WORLD):
        if dist.get_rank() in ranks_that_fail:
            raise ValueError


WORLD_KEEPS: PerGroup[int] = PerGroup()


def test_runs_share_their_world_but_nothing_that_is_kept_for_it(ranks: RankPool) -> None:
    first, second = ranks(2).run(keep_of_the_world, 1), ranks(2).run(keep_of_the_world, 2)
    assert first == second == [(None, first[0][1]), (None, first[1][1])]


@pytest.mark.parametrize("who", [[0], [0, 1]])
def test_a_world_in_which_any_rank_lost_messages_is_made_anew(
    ranks: RankPool, who: list[int]
) -> None:
    before = ranks(2).run(kept_world)
    assert ranks(2).run(kept_world) == before
    ranks(2).run(lose_messages, who)
    after = ranks(2).run(kept_world)
    assert [a == b for a, b in zip(after, before, strict=True)] == [False, False]


def post_ahead() -> None:
    expected_tag(EXPECTED_SUMMED, dist.group.WORLD)  # of which all posts ahead take theirs


def test_a_world_in_which_receives_were_posted_ahead_is_made_anew(ranks: RankPool) -> None:
    before = ranks(2).run(kept_world)
    ranks(2).run(post_ahead)
    after = ranks(2).run(kept_world)
    assert [a == b for a, b in zip(after, before, strict=True)] == [False, False]


WORLDS: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
NUMBERS = itertools.count()


def kept_world() -> int:
    """A number of this rank's world, another one where it is another world."""
    return WORLDS.setdefault(dist.group.WORLD, next(NUMBERS))


def test_a_run_may_leave_its_world(ranks: RankPool) -> None:
    ranks(2).run(leave_the_world)
    assert ranks(2).run(sum_of_ranks, 0) == [(0, 2, 1), (1, 2, 1)]


CLEANED = [0]


class Singleton:
    """Stands for a singleton of the package that a cleanup resets."""

    @staticmethod
    def destroy() -> None:
        CLEANED[0] += 1


def num_cleaned() -> int:
    return CLEANED[0]


def test_cleanups_run_where_their_module_is_loaded_and_nothing_survives_close() -> None:
    hooks = (f"{__name__}:Singleton.destroy", "not_loaded:destroy")
    with RankPool(2, preload=["pytest"], cleanups=hooks) as pool:
        assert pool(2).run(num_cleaned) == [0, 0]
        assert pool(2).run(num_cleaned) == [1, 1]
        pids = [*pool(2).run(os.getpid), *pool(1).run(os.getpid), *pool(1).run(os.getppid)]
        folder = pool.server.folder
        pool(1).run(warn)  # an error in the pool of these tests alone, which asks for it
        assert len({pid for pid in pids if is_alive(pid)}) == 4
    assert survivors(pids, 0) == []
    assert not folder.exists()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the tensor is not square")
    dist.barrier()


def warn() -> None:
    warnings.warn("old name", UserWarning, stacklevel=1)


def die(how: str) -> None:
    print("last words")
    if dist.get_rank() == 1:
        os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_an_exception_fails_the_run_with_its_traceback(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"^ranks .* were still running") as caught:
        ranks(4).run(fail_on, 2)
    lines = str(caught.value).splitlines()
    assert lines[1] == "rank 2 of 4 failed: exit code 1: ValueError: the tensor is not square"
    assert lines[-1] == "ValueError: the tensor is not square"
    assert any(line.endswith("in fail_on") for line in lines)
    assert ranks(4).run(sum_of_ranks, 0)[3] == (3, 4, 6), "new ranks are made"


def test_a_warning_is_an_error(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="UserWarning: old name"):
        ranks(2).run(warn)


@pytest.mark.parametrize("options", ["raise", "error::int", "error::NoWarning", "", "error,"])
def test_unknown_filters_of_warnings_are_refused(options: str) -> None:
    with pytest.raises(LaunchError, match=f"^warnings='{options}': .* is not an action"):
        RankPool(1, warnings=options)


@pytest.mark.parametrize(
    ("how", "text"), [("exit", "exit code 3"), ("kill", r"killed by signal 9 \(SIGKILL\)")]
)
def test_a_death_fails_the_run_though_its_peer_reports_first(
    ranks: RankPool, how: str, text: str
) -> None:
    with pytest.raises(RankError, match=f"(?s)rank 1 of 2 failed: {text}.*last words$"):
        ranks(2).run(die, how)


def die_unnoticed(seconds: float) -> None:
    """The server, which is told first of the end of a rank, is stopped for a while."""
    if dist.get_rank() == 1:
        script = (
            f"import os, time; time.sleep({seconds}); os.kill({os.getppid()}, {signal.SIGCONT:d})"
        )
        subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
        os.kill(os.getppid(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_death_that_is_reported_late_is_what_failed(ranks: RankPool) -> None:
    """As it may be on a busy machine: its peer has failed long before."""
    with pytest.raises(RankError, match=facts_pattern("rank 1", "2 failed", "signal 9", "SIGKILL")):
        ranks(2).run(die_unnoticed, 0.8)


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def stay() -> None:
    time.sleep(60)


def ignore_the_stack_signal() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def test_a_hang_shows_the_stack_of_every_rank(ranks: RankPool) -> None:
    ranks(2).run(ignore_the_stack_signal)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"stay did not return within 0\.5 s") as caught:
        ranks(2).run(stay, timeout_s=0.5)
    assert time.monotonic() - start < 5
    for part in str(caught.value).split("--- rank ")[1:]:
        assert "in stay" in part
        assert "running ---" in part


def test_a_stopped_rank_is_named_and_its_peers_show_where_they_wait(ranks: RankPool) -> None:
    pids = ranks(2).run(os.getpid)
    with pytest.raises(RankError) as caught:
        ranks(2).run(hang_on, 1, timeout_s=0.5)
    _, waiting, stopped = str(caught.value).split("--- rank ")
    assert "in hang_on" in waiting
    assert "in barrier" in waiting
    assert "stopped" in stopped
    assert survivors(pids, 0) == []


def uneven_collective() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def test_a_collective_without_peers_is_charged_to_the_run_that_left_it(ranks: RankPool) -> None:
    with pytest.raises(RankError):
        ranks(2).run(uneven_collective, timeout_s=1)


def test_a_rank_that_died_between_runs_is_replaced(ranks: RankPool) -> None:
    """Also while the server, which is told first of the end of a rank and its threads, is busy."""
    killed, server = ranks(2).run(os.getpid)[1], ranks(2).run(os.getppid)[0]
    os.kill(server, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    while is_alive(killed) or len([*Path(f"/proc/{killed}/task").iterdir()]) > 1:
        time.sleep(0.01)
    threading.Timer(0.3, os.kill, (server, signal.SIGCONT)).start()
    assert ranks(2).run(sum_of_ranks, 0) == [(0, 2, 1), (1, 2, 1)]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_ranks_of_another_size_are_stopped_until_they_are_asked_for(ranks: RankPool) -> None:
    pids = ranks(2).run(os.getpid)
    (alone,) = ranks(1).run(os.getpid)
    end_s = time.monotonic() + 5
    while {state_of(pid) for pid in pids} != {"T"} and time.monotonic() < end_s:
        time.sleep(0.01)
    assert {state_of(pid) for pid in pids} == {"T"} and state_of(alone) != "T"
    assert ranks(2).run(sum_of_ranks, 0) == [(0, 2, 1), (1, 2, 1)]
    assert ranks(2).run(os.getpid) == pids


def test_the_size_of_a_pool_is_its_limit(ranks: RankPool) -> None:
    for world_size in (0, 9):
        with pytest.raises(LaunchError, match=f"{world_size} ranks were asked of a pool of 1 to 8"):
            ranks(world_size)


SCRIPT = """
import os, signal, sys
from torchdistpackage.testing import RankPool, run_ranks

def add():
    import torch, torch.distributed as dist
    total = torch.ones(()) * dist.get_rank()
    dist.all_reduce(total)
    return int(total), os.getpid(), os.getppid()

if __name__ == "__main__":
    if sys.argv[1] == "once":
        results = run_ranks(add, world_size=2)
    else:
        pool = RankPool(2)
        results = [pool(2).run(add) for _ in range(3)][-1]
    print(*[value for value, _, _ in results], *[pid for r in results for pid in r[1:]], flush=True)
    assert "torch" not in sys.modules
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full
@pytest.mark.parametrize("num_copies", [2, pytest.param(20, marks=pytest.mark.full)])
def test_copies_run_side_by_side_and_leave_nobody(tmp_path: Path, num_copies: int) -> None:
    """Some end without closing their pool, some are killed, some use the one-shot form."""
    modes = [("end", "kill", "once")[i % 3] for i in range(num_copies)]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    copies = [
        subprocess.Popen(
            [sys.executable, str(script), mode],
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TMPDIR": str(tmp_path),
                "PYTHONDONTWRITEBYTECODE": "1",  # no file of the interpreter itself is left
            },
            text=True,
        )
        for mode in modes
    ]
    pids: list[int] = []
    for mode, copy in zip(modes, copies, strict=True):
        output, _ = copy.communicate(timeout=240)
        assert copy.returncode == (-signal.SIGKILL if mode == "kill" else 0)
        first, second, *own = map(int, output.split())
        assert (first, second) == (1, 1)
        pids += own
    assert survivors(pids) == []
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_ranks_that_were_ended_are_new_ones_that_meet_elsewhere(ranks: RankPool) -> None:
    """A file to meet at that comes again has the port of ranks that are gone."""
    first, number = ranks(2).run(os.getpid), ranks(2)._num_stores
    ranks.end(2)
    assert not {*ranks(2).run(os.getpid)} & {*first}
    assert ranks(2)._num_stores == number + 1

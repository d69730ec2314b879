"""Joining: real processes with the variables of launchers, and strangers on their ports."""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchdistpackage.comm import primitives, runtime
from torchdistpackage.comm.runtime import find_free_port, join, leave, setup_distributed
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError, LaunchError
from torchdistpackage.launch.children import ForkServer
from torchdistpackage.launch.failure import Failure
from torchdistpackage.launch.local import run_local
from torchdistpackage.launch.rank import Returned, pack_arguments
from torchdistpackage.launch.reference import Reference
from torchdistpackage.launch.rendezvous import Rendezvous, detect
from torchdistpackage.launch.wire import unpack

LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC", "TDP_")
PLAIN = {
    **{k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_NAMES)},
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}


def by_hand(rank: int, world_size: int, port: int | str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def in_step(rank: int, world_size: int, job: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(world_size),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": str(world_size),
    }


class Start:
    """Processes with an environment each, forked from a server that has torch."""

    def __init__(self, server: ForkServer):
        self._server = server

    def __call__(self, fn, environments: list[Mapping[str, str]], *args, limit_s: float = 20):
        """What fn(*args) returned, or its Failure, in order."""
        children = []
        for i, env in enumerate(environments):
            children.append(
                self._server.spawn(
                    "torchdistpackage.launch.rank:main",
                    (Reference.of(fn), pack_arguments(*args), i),
                    env={**PLAIN, **env},
                    stdout=sys.__stderr__.fileno(),
                    stderr=sys.__stderr__.fileno(),
                    with_channel=True,
                )
            )
        answers: dict[int, Returned | Failure] = {}
        end = time.monotonic() + limit_s
        while len(answers) < len(children):
            assert time.monotonic() < end, f"only {sorted(answers)} of {len(children)} came back"
            for i, child in enumerate(children):
                if i not in answers and (messages := child.channel.recv_ready()[0]):
                    answers[i] = messages[0]
            time.sleep(0.01)
        return [
            a if isinstance(a, Failure) else unpack(a.value) for _, a in sorted(answers.items())
        ]


@pytest.fixture(scope="module")
def start():
    with ForkServer(["torch", "torch.distributed", "numpy", "pytest"]) as server:
        yield Start(server)


@contextlib.contextmanager
def bound(port: int):
    """A plain server that accepts and never says a word."""
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        silent.bind(("127.0.0.1", port))
        silent.listen()
        yield silent


def meet(*args, **kwargs) -> tuple[int, int, int | None, str, list[object]]:
    place = setup_distributed(*args, **kwargs)
    said = primitives.gather_objects((os.environ.get("SLURM_JOB_ID"), place[0]))
    leave()
    return (*place, said)


def test_ranks_with_variables_set_by_hand_meet_at_the_users_port(start):
    port = find_free_port()
    told = start(meet, [by_hand(r, 3, port) for r in range(3)])
    assert [t[:4] for t in told] == [(r, 3, int(port), "127.0.0.1") for r in range(3)]
    assert all(t[4] == [(None, 0), (None, 1), (None, 2)] for t in told)


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


def join_at(place: tuple[int, str], ports: tuple[int, ...]) -> tuple[int, list[object]]:
    rank, token = place
    joined = join(
        Rendezvous(rank, 2, rank, 2, 0, "127.0.0.1", ports, token, "test"), init_timeout_s=15
    )
    said = primitives.gather_objects((token, rank))
    leave()
    return joined.port, said


def join_as_told(ports: tuple[int, ...]) -> tuple[int, list[object]]:
    return join_at((int(os.environ["TEST_RANK"]), os.environ["TEST_TOKEN"]), ports)


def test_two_jobs_on_the_same_candidates_never_mix(start):
    ports = tuple(int(find_free_port()) for _ in range(3))
    told = start(
        join_as_told,
        [{"TEST_RANK": str(r), "TEST_TOKEN": t} for r in (1, 0) for t in ("a", "b")],
        ports,
    )
    at = {said[0][0]: port for port, said in told}
    assert at.keys() == {"a", "b"} and at["a"] != at["b"]
    for i, (port, said) in enumerate(told):
        token = "ab"[i % 2]
        assert said == [(token, 0), (token, 1)] and port == at[token]


def test_a_users_busy_port_is_refused_at_once_by_number(start):
    with bound(0) as silent:
        port = silent.getsockname()[1]
        begin = time.monotonic()
        told = start(meet, [by_hand(0, 2, port)])
    assert time.monotonic() - begin < 10
    assert str(port) in told[0].error and "MASTER_PORT" in told[0].error


def test_a_host_name_that_does_not_resolve_does_not_stall_rank_0(start):
    """Rank 0 does not need its own name; that its peers do is theirs to say."""
    env = by_hand(0, 2, find_free_port()) | {
        "MASTER_ADDR": "no-such-host.invalid",
        "LOCAL_WORLD_SIZE": "2",
    }
    begin = time.monotonic()
    told = start(meet_within, [env], 1.0)
    assert time.monotonic() - begin < 5 and "ranks 1" in told[0].error


def meet_within(limit_s: float):
    return meet(init_timeout_s=limit_s)


def test_missing_ranks_are_named_within_the_time_limit(start):
    port = find_free_port()
    begin = time.monotonic()
    told = start(meet_within, [by_hand(r, 3, port) for r in (0, 2)], 2.0)
    assert 2 <= time.monotonic() - begin < 7
    assert "1 of 3 ranks did not come (ranks 1) within 2 s" in told[0].error
    # the other one hears it too, unless rank 0 with the list was gone a moment earlier
    assert all("LaunchError" in t.error and "come" in t.error for t in told)


def test_missing_ranks_are_named_at_a_file_too(start, tmp_path: Path):
    env = {**by_hand(1, 2, 1), "LOCAL_WORLD_SIZE": "2", "TDP_STORE": str(tmp_path / "store")}
    (told,) = start(meet_within, [env], 1.0)
    assert "1 of 2 ranks did not come (ranks 0) within 1 s" in told.error


def test_nobody_at_the_address_says_where_was_looked(start):
    port = find_free_port()
    (told,) = start(meet_within, [by_hand(1, 2, port)], 1.0)
    assert "found no rank 0" in told.error and port in told.error


def test_a_silent_server_at_the_users_port_is_no_rank_0(start):
    with bound(0) as silent:
        port = silent.getsockname()[1]
        (told,) = start(meet_within, [by_hand(1, 2, port)], 2.0)
    assert f"port {port} accepted but said nothing" in told.error


def alone_twice() -> tuple[object, ...]:
    begin = time.monotonic()
    first = setup_distributed()
    with pytest.raises(LaunchError, match="already initialised with 1 ranks"):
        setup_distributed()
    total = primitives.all_reduce(torch.ones(1), dist.group.WORLD).item()
    leave()
    leave()
    again = setup_distributed()
    leave()
    return first, again, total, time.monotonic() - begin < 2


def test_one_process_alone_needs_nothing_and_may_come_again(start):
    place = (0, 1, None, "127.0.0.1")
    assert start(alone_twice, [{}]) == [(place, place, 1.0, True)]


def want_nccl() -> None:
    setup_distributed("nccl")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_nccl_without_a_gpu_is_refused(start):
    (told,) = start(want_nccl, [{}])
    assert "nccl needs a GPU for each rank" in told.error and "use gloo" in told.error


def wait_for_a_sleeper() -> tuple[float, float]:
    rank, *_ = setup_distributed(init_timeout_s=30)
    tpc.setup_process_groups([("data", 2)])
    times = []
    for limit_s, sleep_s in ((None, 2.0), (1.0, 3.0)):
        if limit_s is not None:
            tpc.groups.set_timeout(limit_s)
        begin = time.monotonic()
        if rank == 1:
            time.sleep(sleep_s)
        with contextlib.suppress(CommError):
            primitives.all_reduce(torch.ones(1), tpc.get_group("data"))
        times.append(time.monotonic() - begin)
    return times[0], times[1]


def test_steps_have_a_limit_of_their_own_from_when_it_is_set(start):
    port = find_free_port()
    told = start(wait_for_a_sleeper, [by_hand(r, 2, port) for r in range(2)])
    start_s, step_s = told[0]
    assert start_s >= 1.9, "the limit of the start holds until another is set"
    assert 0.9 < step_s < 2.5


def threads_and_place() -> tuple[object, ...]:
    place = setup_distributed()
    return (*place, torch.get_num_threads())


@pytest.mark.parametrize("threads", [1, 2])
def test_ranks_of_the_local_starter_meet_at_a_file_with_the_threads_asked_for(threads: int):
    told = run_local(
        threads_and_place,
        num_procs=2,
        preload=["torch", "torch.distributed", "numpy", "pytest"],
        env={"OMP_NUM_THREADS": str(threads)},
    )
    assert told == [(r, 2, None, "127.0.0.1", threads) for r in range(2)]


def own_threads() -> int:
    torch.set_num_threads(2)
    setup_distributed()
    return torch.get_num_threads()


def test_under_a_launcher_threads_set_by_the_user_stand(start):
    port = find_free_port()
    assert start(own_threads, [by_hand(r, 2, port) for r in range(2)]) == [2, 2]


def test_torchruns_own_store_is_joined(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            from torchdistpackage.comm import primitives
            from torchdistpackage.comm.runtime import leave, setup_distributed

            rank, world_size, port, address = setup_distributed()
            total = primitives.all_reduce(torch.tensor([rank + 1]), torch.distributed.group.WORLD)
            open(f"{__file__}.{rank}", "w").write(f"{world_size} {int(total)} {port is not None}")
            leave()
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**PLAIN, "PYTHONPATH": str(Path(runtime.__file__).parents[2])}
    subprocess.run([*command, str(script)], env=env, check=True, timeout=60, capture_output=True)
    assert [Path(f"{script}.{r}").read_text() for r in range(2)] == ["2 3 True"] * 2

"""Joining: real processes with the variables of launchers. test_rendezvous_store.py: the store."""

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.comm.starting import PLAIN, by_hand, in_step, meet, meet_within, two_nodes
from torchdistpackage.comm import creation, primitives, runtime
from torchdistpackage.comm.p2p import Post
from torchdistpackage.comm.runtime import (
    find_free_port,
    join,
    leave,
    setup_distributed,
    setup_distributed_slurm,
)
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.environment.device import DETERMINISTIC
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.errors import CommError, LaunchError
from torchdistpackage.launch.workers import run_local


def test_ranks_with_variables_set_by_hand_meet_at_the_users_port(start):
    port = find_free_port()
    told = start(meet, [by_hand(r, 3, port) for r in range(3)])
    assert [t[:4] for t in told] == [(r, 3, int(port), "127.0.0.1") for r in range(3)]
    assert all(t[4] == [(None, 0), (None, 1), (None, 2)] for t in told)


def test_a_host_name_that_does_not_resolve_does_not_stall_rank_0(start):
    """Rank 0 does not need its own name; that its peers do is theirs to say."""
    env = by_hand(0, 2, find_free_port()) | {
        "MASTER_ADDR": "no-such-host.invalid",
        "LOCAL_WORLD_SIZE": "2",
    }
    begin = time.monotonic()
    told = start(meet_within, [env], 1.0)
    assert time.monotonic() - begin < 5 and "(rank 1)" in told[0].error


def master_port_of_two_starts() -> list[tuple[str, int | None]]:
    """In the second one the first port is in use by rank 0: it is no word of the user."""
    told = []
    for _ in range(2):
        rank, _, port, _ = setup_distributed(init_timeout_s=8)
        told.append((os.environ["MASTER_PORT"], port))
        store = dist.distributed_c10d._get_default_store() if rank == 0 else None  # noqa: F841
        leave()
    return told


def test_under_slurm_the_port_is_in_the_environment(start):
    first, second = start(master_port_of_two_starts, [in_step(r, 2, 79) for r in range(2)])
    assert first == second and all(name == str(port) for name, port in first)
    assert first[0] != first[1]


def leave_at_once() -> float:
    if os.environ["RANK"] == "1":  # as if it were still about to return from making the group
        made = runtime.mark_made
        runtime.mark_made = lambda *args: (time.sleep(1.0), made(*args))
    setup_distributed()
    begin = time.monotonic()
    leave()
    return time.monotonic() - begin


def test_who_leaves_at_once_waits_until_all_have_joined(start):
    port = find_free_port()
    first, late = start(leave_at_once, [by_hand(r, 2, port) for r in range(2)])
    assert late < 0.5 < first < 4.0


UNSAID = {"GLOO_SOCKET_IFNAME": ""}


def test_a_loopback_master_of_several_nodes_is_refused_at_once_on_each(start):
    envs = [by_hand(r, 2, 1) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} for r in range(2)]
    begin = time.monotonic()
    told = start(meet, [env | UNSAID for env in (*envs, two_nodes(0, 75), two_nodes(2, 75))])
    assert time.monotonic() - begin < 8
    for answer, (rank, name) in zip(
        told, [(0, "127.0.0.1"), (1, "127.0.0.1"), (0, "localhost"), (2, "localhost")], strict=True
    ):
        assert f"rank {rank} on" in answer.error
        assert f"the master address {name} is" in answer.error and "loopback" in answer.error


def test_a_users_interface_that_this_node_has_not_is_refused(start):
    env = by_hand(0, 2, find_free_port()) | {
        "MASTER_ADDR": "192.0.2.77",
        "LOCAL_WORLD_SIZE": "1",
        "GLOO_SOCKET_IFNAME": "nosuch0",
    }
    (told,) = start(meet, [env])
    assert "GLOO_SOCKET_IFNAME=nosuch0" in told.error and "lo (127.0.0.1/8)" in told.error


def test_nodes_that_are_all_this_machine_meet_where_the_user_says_so(start):
    told = start(meet, [two_nodes(r, 76) for r in range(4)])
    assert [t[:2] for t in told] == [(r, 4) for r in range(4)]


def test_an_unknown_backend_is_refused_on_every_rank(start):
    port = find_free_port()
    envs = [by_hand(r, 2, port) for r in range(2)]
    told = start(meet, envs, "glo0")
    for one in told:
        assert "there is no backend 'glo0'; use gloo, nccl" in one.error


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


def leave_without_a_file(path: str) -> float:
    """Seconds that `leave` takes once the store's file was removed."""
    creation._LATE_S = 0.5
    store = dist.FileStore(path, 1)
    store.set_timeout(timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    creation.mark_made(creation.world(), store, "default")
    Path(path).unlink()
    begin = time.monotonic()
    leave()
    return time.monotonic() - begin


def test_leaving_does_not_wait_for_a_store_that_has_gone(start, tmp_path):
    (seconds,) = start(leave_without_a_file, [{}], str(tmp_path / "store"))
    assert seconds < 5


def ask_for_nccl(call: str) -> tuple[str, list[str]]:
    """The backend that there is then, and what was warned of."""
    said: list[str] = []
    runtime.log.warning = lambda text, *values: said.append(text % values)
    setups = {
        "setup_distributed": lambda: setup_distributed("nccl"),
        "setup_distributed_slurm": lambda: setup_distributed_slurm("nccl"),
    }
    setups[call]()
    backend = dist.get_backend()
    leave()
    return backend, said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_nccl_means_gloo_where_no_rank_has_a_gpu_whoever_is_asked(start):
    """Programs of the time when it was the default name it; `test_devices.py` has the refusals."""
    port = find_free_port()
    for call in ("setup_distributed", "setup_distributed_slurm"):
        told = start(ask_for_nccl, [by_hand(r, 2, port) for r in range(2)], call)
        assert [backend for backend, _ in told] == ["gloo", "gloo"]
        assert [len(said) for _, said in told] == [1, 0]


def one_gpu_in_sight() -> tuple[str, str]:
    """Device and note where the driver shows one GPU, which is TEST_GPU."""
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=os.environ["TEST_GPU"])
    torch.cuda.set_device = lambda device: None
    joined = join(detect(os.environ), backend="gloo")
    leave()
    return str(joined.device), joined.notes[-1]


@pytest.mark.parametrize(
    ("gpus", "visible", "device", "note"),
    [
        ("ab", "01", "cuda:0", "each of 2 local ranks sees only its own GPU"),
        ("ab", "00", "cuda:0", "each of 2 local ranks sees only its own GPU"),
        ("aa", ("MIG-1", "MIG-2"), "cuda:0", "each of 2 local ranks sees only its own GPU"),
        ("aa", "00", "cpu", "2 local ranks, 1 GPU: running on CPU with gloo"),
    ],
)
def test_one_gpu_in_sight_of_each_rank_may_be_its_own(start, gpus, visible, device, note):
    """As a script does that sets CUDA_VISIBLE_DEVICES=$LOCAL_RANK, or a container runtime."""
    port = find_free_port()
    envs = [
        by_hand(r, 2, port) | {"TEST_GPU": gpus[r], "CUDA_VISIBLE_DEVICES": visible[r]}
        for r in range(2)
    ]
    told = start(one_gpu_in_sight, envs)
    assert [t[0] for t in told] == [device] * 2
    assert all(t[1].startswith(note) for t in told)


def late_for_each(timeout_s: float | None) -> list[str]:
    """What came of a sum, and of a message, for which rank 1 comes 2.5 s late."""
    rank, *_ = setup_distributed(init_timeout_s=1.5, timeout_s=timeout_s)
    world, came = dist.group.WORLD, []

    def message() -> None:
        post = Post(world)
        post.send([torch.ones(1)], 0) if rank else post.receive([torch.ones(1)], 1)
        post.go().wait()

    for call in (lambda: primitives.all_reduce(torch.ones(1), world), message):
        if rank == 1:
            time.sleep(2.5)
        begin = time.monotonic()
        try:
            call()
            came.append("came")
        except CommError:
            came.append("too late" if time.monotonic() - begin < 2.4 else "given up late")
    return came


def test_the_limit_of_the_start_is_none_for_what_comes_after(start):
    port = find_free_port()
    told = start(late_for_each, [by_hand(r, 2, port) for r in range(2)], None)
    assert told == [["came", "came"]] * 2


def test_calls_of_the_default_group_have_the_limit_asked_for(start):
    port = find_free_port()
    told = start(late_for_each, [by_hand(r, 2, port) for r in range(2)], 1.0)
    assert told[0] == ["too late", "too late"]


def limits_after_joining() -> list[float]:
    """As NCCL would be told: what the default group is made with, and what it is told next."""
    seen = []

    def init_process_group(backend, *, timeout, device_id, **_):
        seen.append(timeout.total_seconds())
        assert (backend, str(device_id)) == ("nccl", "cuda:0")

    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    dist.init_process_group = init_process_group
    runtime.world = lambda: None
    runtime.mark_made = lambda *_: None
    runtime.set_timeout = lambda group, seconds: seen.append(seconds)
    dist.distributed_c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    join(detect(os.environ), init_timeout_s=7.0)
    return seen


def test_nccl_has_ten_minutes_to_connect_and_torchs_limit_then(start):
    assert start(limits_after_joining, [{}]) == [[600.0, 600.0]]


def set_limit_late() -> float:
    rank, *_ = setup_distributed()
    tpc.setup_process_groups([("data", 2)])
    tpc.groups.set_timeout(1.0)
    begin = time.monotonic()
    if rank == 1:
        time.sleep(3.0)
    with contextlib.suppress(CommError):
        primitives.all_reduce(torch.ones(1), tpc.get_group("data"))
    return time.monotonic() - begin


def test_steps_have_a_limit_of_their_own_from_when_it_is_set(start):
    port = find_free_port()
    told = start(set_limit_late, [by_hand(r, 2, port) for r in range(2)])
    assert 0.9 < told[0] < 2.5


def threads_and_place() -> tuple[object, ...]:
    place = setup_distributed()
    return (*place, torch.get_num_threads())


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.full), 2])
def test_ranks_of_the_local_starter_meet_at_a_file_with_the_threads_asked_for(
    forks: None, threads: int
):
    told = run_local(threads_and_place, num_procs=2, env={"OMP_NUM_THREADS": str(threads)})
    assert told == [(r, 2, None, "127.0.0.1", threads) for r in range(2)]


def own_threads() -> int:
    torch.set_num_threads(2)
    setup_distributed()
    leave()  # rank 0 has the store, and stays until both have joined
    return torch.get_num_threads()


def test_under_a_launcher_threads_set_by_the_user_stand(start):
    port = find_free_port()
    assert start(own_threads, [by_hand(r, 2, port) for r in range(2)]) == [2, 2]


@pytest.mark.full
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
    subprocess.run([*command, str(script)], env=env, check=True, timeout=300, capture_output=True)
    assert [Path(f"{script}.{r}").read_text() for r in range(2)] == ["2 3 True"] * 2


def test_torchruns_store_that_is_gone_is_named(start):
    port = find_free_port()
    agent = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env = by_hand(1, 2, port) | agent | {"LOCAL_WORLD_SIZE": "2"}
    begin = time.monotonic()
    (told,) = start(meet_within, [env], 2.0)
    assert time.monotonic() - begin < 8
    assert f"torchrun's store at 127.0.0.1, port {port}, did not answer" in told.error
    assert told.error.startswith("LaunchError") and "\n" not in told.error


def three_times() -> list[float]:
    told = []
    for i in range(3):
        rank, *_ = setup_distributed(init_timeout_s=8)
        told.append(primitives.all_reduce(torch.tensor([float(rank + i)]), dist.group.WORLD).item())
        leave()
    return told


@pytest.mark.parametrize("where", ["step", "port", "file"])
def test_ranks_that_left_may_come_again(start, where, tmp_path: Path):
    port = find_free_port()
    environments = {
        "step": [in_step(r, 2, 77) for r in range(2)],
        "port": [by_hand(r, 2, port) for r in range(2)],
        "file": [
            by_hand(r, 2, 1) | {"LOCAL_WORLD_SIZE": "2", "TDP_STORE": str(tmp_path / "store")}
            for r in range(2)
        ],
    }
    assert start(three_times, environments[where]) == [[1.0, 3.0, 5.0]] * 2


def place_alone() -> tuple[int, int]:
    return setup_distributed()[:2]


def test_a_shell_of_a_job_is_told_in_a_line_that_it_is_alone(start, capfd):
    """Without any set-up of logging, and without waiting for ranks that never come."""
    assert start(place_alone, [{"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}]) == [(0, 1)]
    said = capfd.readouterr().err
    assert said.count("Slurm job 7 without a step: running as one process") == 1


def test_a_deterministic_run_sets_what_libraries_need_and_keeps_what_the_user_set(monkeypatch):
    environ = {"NCCL_ALGO": "Tree"}
    monkeypatch.setattr(os, "environ", environ)
    try:
        runtime.make_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    expected = {"NCCL_ALGO": "Tree", "NCCL_NVLS_ENABLE": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert {name: environ[name] for name in DETERMINISTIC} == expected

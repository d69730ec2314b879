"""All ranks run on one kind of device with one backend, or all refuse: real processes that meet,
with GPUs that a patched driver shows."""

import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import torchdistpackage
from tests.comm.starting import by_hand, in_step, two_nodes
from tests.tells import tells
from torchdistpackage.comm import nccl_library, runtime
from torchdistpackage.comm.runtime import find_free_port, join, leave
from torchdistpackage.environment.failure import Failure
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.errors import LaunchError


def join_with_gpus() -> tuple[str, str]:
    """Device and backend where the driver shows TEST_GPUS; no communicator is made before."""
    torch.cuda.device_count = lambda: int(os.environ["TEST_GPUS"])
    torch.cuda.set_device = lambda device: None
    host = f"n{1 + int(os.environ.get('SLURM_NODEID', '0'))}"
    socket.gethostname = lambda: host
    made, real = [], dist.init_process_group

    def init_process_group(backend, **options):
        made.append(backend)
        real("gloo", **options | {"device_id": None, "pg_options": None})

    dist.init_process_group = init_process_group
    try:
        joined = join(detect(os.environ), backend=os.environ.get("TEST_BACKEND"), init_timeout_s=20)
        assert made == [joined.backend]
        return str(joined.device), joined.backend
    except LaunchError:
        assert not made
        raise
    finally:
        leave()


def on_two_nodes(
    start, job: int, gpus: tuple[int, int], tasks: int = 2, **env: str
) -> list[tuple[str, str] | Failure]:
    envs = [
        two_nodes(r, job, tasks) | {"TEST_GPUS": str(gpus[r // tasks])} | env
        for r in range(2 * tasks)
    ]
    return start(join_with_gpus, envs, limit_s=60)


def test_seven_gpus_for_eight_ranks_of_one_of_two_nodes_are_named_on_every_rank(start):
    told = on_two_nodes(start, 301, (8, 7), tasks=8)
    assert len({answer.error for answer in told}) == 1
    assert told[0].error.startswith("LaunchError")
    assert tells(told[0].error, "n2", "7 GPUs", "8 ranks", "ranks 8", "15")
    assert "n1" not in told[0].error and "other 8 ranks" in told[0].error


def test_gpus_for_all_are_taken(start):
    told = on_two_nodes(start, 302, (2, 2))
    assert told == [(f"cuda:{r % 2}", "nccl") for r in range(4)]


@pytest.mark.full
def test_several_nodes_short_of_gpus_do_not_train_on_the_cpu_unless_told(start):
    told = on_two_nodes(start, 303, (2, 2), tasks=3)
    assert all(tells(t.error, "n1", "2 GPUs", "3 ranks") and "n2 shows" in t.error for t in told)
    asked = on_two_nodes(start, 309, (2, 2), tasks=3, TEST_BACKEND="nccl")
    assert {t.error for t in asked} == {t.error for t in told}
    assert on_two_nodes(start, 304, (2, 2), tasks=3, TEST_BACKEND="gloo") == [("cpu", "gloo")] * 6
    on_cpu = [("cpu", "gloo")] * 4
    assert on_two_nodes(start, 305, (0, 0), CUDA_VISIBLE_DEVICES="") == on_cpu
    assert on_two_nodes(start, 306, (0, 0)) == on_cpu


def test_gpus_that_slurm_gave_and_nobody_sees_are_missed(start):
    told = on_two_nodes(start, 307, (0, 0), SLURM_GPUS_ON_NODE="2")
    assert all(tells(t.error, "n1", "GPU", "2", "2 ranks") for t in told)
    hidden = on_two_nodes(start, 308, (0, 0), SLURM_GPUS_ON_NODE="2", CUDA_VISIBLE_DEVICES="")
    assert hidden == [("cpu", "gloo")] * 4


def test_variables_that_name_more_than_the_driver_shows_end_all_ranks_at_once(start):
    port = find_free_port()
    envs = [by_hand(r, 2, port) | {"TEST_GPUS": "2"} for r in range(2)]
    envs[1]["CUDA_VISIBLE_DEVICES"] = "0,1,2"
    told = start(join_with_gpus, envs)
    assert told[0].error == told[1].error and told[0].error.startswith("LaunchError: rank 1 on n1")


@pytest.mark.parametrize("backends", [("gloo", "nccl"), (None, "gloo")])
def test_backends_that_differ_are_refused_on_every_rank(start, backends):
    port = find_free_port()
    envs = [
        by_hand(r, 2, port) | {"TEST_GPUS": "2"} | ({"TEST_BACKEND": b} if b else {})
        for r, b in enumerate(backends)
    ]
    told = start(join_with_gpus, envs)
    assert told[0].error == told[1].error
    assert "gloo on rank" in told[0].error and "nccl on rank" in told[0].error


def test_one_machine_with_too_few_gpus_runs_on_the_cpu(start):
    port = find_free_port()
    envs = [by_hand(r, 2, port) | {"TEST_GPUS": "1"} for r in range(2)]
    assert start(join_with_gpus_alike, envs) == [("cpu", "gloo")] * 2


def join_with_gpus_alike() -> tuple[str, str]:
    """Both see the same single one."""
    torch.cuda.get_device_properties = lambda device: type("", (), {"uuid": "a"})
    return join_with_gpus()


SHARED = ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS", "NCCL_NVLS_ENABLE")


def join_on_shared_gpus() -> tuple[str, float, list[str | None], str]:
    """Device, part of its memory, variables and the log's line, where NCCL is TEST_NCCL."""
    parts: list[float] = []
    version = tuple(map(int, os.environ["TEST_NCCL"].split(".")))
    runtime.loaded_nccl = lambda: version
    torch.cuda.device_count = lambda: int(os.environ["TEST_GPUS"])
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="a")
    torch.cuda.set_device = lambda device: None
    torch.cuda.set_per_process_memory_fraction = lambda part, device: parts.append(part)
    seen: list[str | None] = []

    def init_process_group(backend, **options):
        assert backend == "nccl"
        seen.extend(os.environ.get(name) for name in SHARED)
        real("gloo", **options | {"device_id": None, "pg_options": None})

    real, dist.init_process_group = dist.init_process_group, init_process_group
    try:
        joined = join(detect(os.environ), share_gpus=True, init_timeout_s=20)
        assert joined.sharing in joined.notes
        return str(joined.device), sum(parts), seen, joined.sharing
    finally:
        leave()


def test_ranks_share_gpus_over_nccl_that_can(start):
    port = find_free_port()
    more = {"TEST_GPUS": "2", "TEST_NCCL": "2.30.7", "NCCL_MAX_CTAS": "4"}
    told = start(join_on_shared_gpus, [by_hand(rank, 4, port) | more for rank in range(4)])
    assert [device for device, *_ in told] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert [tuple(x[1:3]) for x in told] == [(0.4, ["1", "4", "0"])] * 4, "the user's 4 stands"
    assert all("2 ranks" in x[3] and "2.30.7" in x[3] for x in told)


def test_tasks_of_slurm_that_see_one_gpu_share_it_and_an_older_nccl_is_refused(start):
    more = {"TEST_GPUS": "1", "SLURM_GPUS_ON_NODE": "1", "CUDA_VISIBLE_DEVICES": "0"}
    envs = [in_step(rank, 2, 310) | more | {"TEST_NCCL": "2.30.1"} for rank in range(2)]
    assert [x[:3] for x in start(join_on_shared_gpus, envs)] == [
        ("cuda:0", 0.4, ["1", "2", "0"])
    ] * 2
    envs = [in_step(rank, 2, 311) | more | {"TEST_NCCL": "2.28.9"} for rank in range(2)]
    told = start(join_on_shared_gpus, envs)
    assert len({answer.error for answer in told}) == 1
    assert told[0].error.startswith("LaunchError") and "2.28.9" in told[0].error


def test_the_version_of_nccl_is_that_of_the_library_in_use(monkeypatch):
    """And not of the header that torch was compiled with, where another library was preloaded."""

    def get_version(code) -> int:
        code._obj.value = 23007
        return 0

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9, "x"))
    assert nccl_library.loaded_nccl() == (2, 28, 9), "none is loaded apart from torch"
    library = SimpleNamespace(ncclGetVersion=get_version)
    monkeypatch.setattr(nccl_library.ctypes, "CDLL", lambda name, mode: library)
    assert nccl_library.loaded_nccl() == (2, 30, 7)


def variables_when_cuda_is_touched() -> list[str | None]:
    """What a rank finds that sees TEST_GPUS, when the first call that may initialise CUDA comes."""
    names = ("PYTORCH_ALLOC_CONF", "NCCL_LAUNCH_ORDER_IMPLICIT", "TORCH_FR_DUMP_TEMP_FILE")
    seen: list[str | None] = []

    def look(device: int) -> SimpleNamespace:
        seen.extend(os.environ.get(name) for name in names)
        return SimpleNamespace(uuid=device)

    torch.cuda.device_count = lambda: int(os.environ["TEST_GPUS"])
    torch.cuda.get_device_properties = look
    torch.cuda.set_device = lambda device: None
    join(detect(os.environ), backend="gloo", dump_folder=Path("/run/logs"))
    leave()
    return seen or [os.environ.get(name) for name in names]


def test_variables_for_gpus_are_set_before_cuda_is_touched_and_only_where_there_are_any(start):
    port, said = find_free_port(), {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}
    envs = [by_hand(r, 2, port) | {"TEST_GPUS": "1"} | said for r in range(2)]
    with_gpus = ["expandable_segments:True", "0", "/run/logs/nccl_trace_rank"]
    assert start(variables_when_cuda_is_touched, envs) == [with_gpus] * 2
    port = find_free_port()
    envs = [by_hand(r, 2, port) | {"TEST_GPUS": "0"} for r in range(2)]
    assert start(variables_when_cuda_is_touched, envs) == [[None] * 3] * 2


def join_with_version() -> str:
    """Rank 1 has another version of TEST_NAME."""
    if os.environ["RANK"] == "1":
        owner = torch if os.environ["TEST_NAME"] == "torch" else torchdistpackage
        owner.__version__ = "0.0.1"
    host = f"n{os.environ['RANK']}"
    socket.gethostname = lambda: host
    try:
        join(detect(os.environ), init_timeout_s=20, same_versions="TEST_ANY" not in os.environ)
    finally:
        leave()
    return "joined"


@pytest.mark.parametrize("name", ["torch", "torchdistpackage"])
def test_ranks_of_other_versions_are_refused_with_their_hosts(start, name):
    port = find_free_port()
    envs = [by_hand(rank, 3, port) | {"TEST_NAME": name} for rank in range(3)]
    told = start(join_with_version, envs)
    assert len({answer.error for answer in told}) == 1
    said = told[0].error
    assert said.startswith("LaunchError") and "the ranks run different versions" in said
    assert re.search(rf"{name} 0\.0\.1, .* on n1 \(rank 1\); ", said), said
    version = torch.__version__ if name == "torch" else torchdistpackage.__version__
    assert re.search(rf"{name} {re.escape(version)}, .* on n0; n2 \(ranks 0, 2\)", said), said


def test_other_versions_may_be_allowed(start):
    port = find_free_port()
    more = {"TEST_NAME": "torch", "TEST_ANY": "1"}
    assert (
        start(join_with_version, [by_hand(r, 2, port) | more for r in range(2)]) == ["joined"] * 2
    )

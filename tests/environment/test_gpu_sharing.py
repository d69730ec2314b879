"""Several ranks on one GPU: versions, variables, placement, and whether MPS runs."""

import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from torchdistpackage.environment.gpu_sharing import (
    LEAST_NCCL,
    gpu_of,
    limits_memory,
    memory_fraction,
    mps_runs,
    mps_variables,
    nccl_version,
    ranks_per_gpu,
    sharing_variables,
    too_old,
)

ALL = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "2",
    "NCCL_MIN_CTAS": "1",
    "NCCL_NVLS_ENABLE": "0",
}


@pytest.mark.parametrize(
    ("code", "version"),
    [
        (2804, (2, 8, 4)),
        (20903, (2, 9, 3)),
        (22809, (2, 28, 9)),
        (23007, (2, 30, 7)),
        (30000, (3, 0, 0)),
    ],
)
def test_codes_are_versions(code, version):
    assert nccl_version(code) == version
    assert bool(too_old(version, 4)) == (version < LEAST_NCCL)


def test_an_older_library_is_refused_with_its_version():
    text = too_old((2, 28, 9), 4)
    assert all(x in text for x in ("4 ranks", "2.30", "2.28.9", "launch.share_gpus", "LD_PRELOAD"))
    assert "none is loaded" in too_old(None, 2)


def test_neighbours_share_evenly():
    for num_gpus in range(1, 9):
        for num_ranks in range(1, 17):
            gpus = [gpu_of(rank, num_ranks, num_gpus) for rank in range(num_ranks)]
            assert all(0 <= b - a <= 1 for a, b in pairwise(gpus))
            counts = Counter(gpus).values()
            assert max(counts) - min(counts) <= 1
            assert max(counts) == ranks_per_gpu(num_ranks, num_gpus)
            assert len(counts) == min(num_ranks, num_gpus)


def test_variables_follow_the_ranks_of_a_gpu_and_the_users_stand():
    assert sharing_variables({}, 4) == ALL
    assert sharing_variables({}, 8) == {**ALL, "NCCL_MAX_CTAS": "1"}
    assert sharing_variables({}, 1) == {}
    for name in ALL:
        assert sharing_variables({name: ""}, 2) == {k: v for k, v in ALL.items() if k != name}


def test_mps_is_told_the_part_of_a_rank_where_it_runs():
    name = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    assert mps_variables({}, 8, has_mps=True) == {name: "12"}
    assert mps_variables({}, 200, has_mps=True) == {name: "1"}
    assert mps_variables({}, 8, has_mps=False) == mps_variables({}, 1, has_mps=True) == {}
    assert mps_variables({name: "50"}, 8, has_mps=True) == {}


def test_the_ranks_of_a_gpu_leave_a_part_of_its_memory():
    assert memory_fraction(1) == 1
    assert 0.7 < 8 * memory_fraction(8) < 0.9
    assert not limits_memory({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert limits_memory({"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.3"})


def test_mps_runs_where_its_daemon_does(tmp_path: Path):
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    number = tmp_path / "nvidia-cuda-mps-control.pid"
    assert not mps_runs(env)
    os.mkfifo(tmp_path / "control")
    assert not mps_runs(env)
    number.write_text(f"{os.getpid()}\n")
    assert mps_runs(env)
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    number.write_text(str(ended.pid))
    assert not mps_runs(env), "it was killed"


def test_the_page_has_each_variable():
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text("utf-8")
    assert all(f"`{name}`" in page for name in (*ALL, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"))

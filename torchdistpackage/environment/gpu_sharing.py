"""Several ranks on one GPU over NCCL, for development and tests.

NCCL refuses two ranks of a communicator on one device, unless it is 2.30 or later and
NCCL_MULTI_RANK_GPU_ENABLE is 1 (docs/userguide/source/env.rst and src/init.cc of NCCL 2.30). Each
rank then occupies its own thread blocks (CTAs) and memory. A kernel hangs if it waits for a kernel
of another rank that finds no room, so both resources are limited by the number of ranks on a GPU.

Pure: the environment, the version and the folder of MPS are arguments.
"""

import os
from collections.abc import Mapping
from pathlib import Path

LEAST_NCCL = (2, 30)
ALLOW = "launch.share_gpus: true (share_gpus=True of setup_distributed)"
_MEMORY_SHARE = 0.8
"""Fraction of a GPU's memory that the allocators of its ranks may use.

The rest is for the contexts of their processes and NCCL's buffers, which torch does not count."""
_FEW_RANKS, _FEW_CTAS, _CTAS = 4, 2, 1
"""CTAs of an NCCL kernel: two with few ranks on a GPU, one with more.

A rank has a communicator for each axis, and their kernels may all run at once."""
_MPS_FOLDER = "/tmp/nvidia-mps"


def ranks_per_gpu(num_local: int, num_visible: int) -> int:
    """Return the largest number of ranks on a GPU if `num_local` ranks share `num_visible` GPUs
    evenly.
    """
    return -(-num_local // num_visible)


def gpu_of(local_rank: int, num_local: int, num_visible: int) -> int:
    """Return the index of a local rank's GPU; with fewer GPUs than ranks, neighbours share one."""
    if num_local <= num_visible:
        return local_rank
    return local_rank * num_visible // num_local


def nccl_version(code: int) -> tuple[int, int, int]:
    """Return (major, minor, patch) from the result of ncclGetVersion: 23007 is 2.30.7, 2804 is
    2.8.4.
    """
    thousands = 10_000 if code >= 10_000 else 1_000
    return code // thousands, code % thousands // 100, code % 100


def too_old(version: tuple[int, ...] | None, num_ranks: int) -> str:
    """Return why `num_ranks` ranks cannot share a GPU with this NCCL, or "" if they can.

    version: of the loaded library; None if torch has none.
    """
    if version is not None and version[:2] >= LEAST_NCCL:
        return ""
    loaded = "none is" if version is None else f"{'.'.join(map(str, version))} is"
    least = ".".join(map(str, LEAST_NCCL))
    return (
        f"{num_ranks} ranks are to share a GPU, which needs NCCL {least} or later, and {loaded} "
        f"loaded; put a newer one ahead of it, LD_PRELOAD=/path/libnccl.so.2, or remove "
        f"launch.share_gpus to run on the CPU"
    )


def mps_variables(env: Mapping[str, str], num_ranks: int, *, has_mps: bool) -> dict[str, str]:
    """Return the variables that MPS needs before the process initialises CUDA, beyond those in
    `env`.
    """
    name = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    if not has_mps or num_ranks <= 1 or name in env:
        return {}
    return {name: str(max(100 // num_ranks, 1))}


def sharing_variables(env: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    """Return the variables that NCCL needs before its first communicator, beyond those in `env`.

    num_ranks: ranks on one GPU.
    """
    if num_ranks <= 1:
        return {}
    settings = {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_MAX_CTAS": str(_FEW_CTAS if num_ranks <= _FEW_RANKS else _CTAS),
        "NCCL_MIN_CTAS": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
    return {name: value for name, value in settings.items() if name not in env}


def memory_fraction(num_ranks: int) -> float:
    """Return the fraction of a GPU's memory that each of its ranks may allocate."""
    return 1.0 if num_ranks <= 1 else _MEMORY_SHARE / num_ranks


def limits_memory(env: Mapping[str, str]) -> bool:
    """Return whether the user has set that fraction (torch 2.9 and later read it)."""
    settings = (env.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return any("per_process_memory_fraction" in text for text in settings)


def mps_runs(env: Mapping[str, str]) -> bool:
    """Return whether an MPS control daemon runs at CUDA_MPS_PIPE_DIRECTORY.

    The daemon opens a pipe there and writes its process number to a file. Both outlive it, so their
    existence alone proves nothing.
    """
    folder = Path(env.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS_FOLDER)
    try:
        number = int((folder / "nvidia-cuda-mps-control.pid").read_text())
        os.kill(number, 0)
    except PermissionError:  # another user's process: the folder's owner says whether it is there
        return (folder / "control").exists()
    except (OSError, ValueError):
        return False
    return (folder / "control").exists()


def sharing_note(num_ranks: int, library: str, *, has_mps: bool) -> str:
    """Return the first line of a start on shared GPUs. library: NCCL 2.30.7, or gloo."""
    sharing = "under MPS" if has_mps else "taking turns, as no MPS control daemon runs"
    return (
        f"up to {num_ranks} ranks share a GPU (launch.share_gpus) over {library}, {sharing}: for "
        f"development and tests; times and speeds of this run mean nothing"
    )

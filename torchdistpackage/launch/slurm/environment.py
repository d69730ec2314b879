"""What a new job may not inherit from whatever it is submitted from.

One rule: what another job, step or launcher said of itself is not handed on, and all else is. The
patterns are those of a shell's `case`, so that a batch script can follow the same rule.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

KEPT = ("SLURM_CONF",)
"""Where Slurm is found: without it nothing is."""

RANKS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_*", "TDP_*", "PMI_*", "PMI2_*", "PMIX_*", "OMPI_*"),
)
"""By these a process takes itself for one of many."""

SLURM = ("SLURM_*", "SLURMD_*", "SLURMCTLD_*", "SBATCH_*", "SRUN_*", "SALLOC_*", "SQUEUE_*")
"""What Slurm says of a job, and options of its commands."""

DEVICES = (
    *("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES"),
    *("HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
)
"""The devices of a job; outside of one they are the user's own choice."""


def scrub_slurm_env(env: Mapping[str, str]) -> dict[str, str]:
    """`env` as it is handed to sbatch, and to Slurm's other commands."""
    return {name: value for name, value in env.items() if not _is_dropped(name, env)}


def options_dropped(env: Mapping[str, str]) -> tuple[str, ...]:
    """Variables by which a user may have meant to choose options of sbatch, `NAME=value`."""
    return tuple(f"{name}={env[name]}" for name in sorted(env) if name.startswith("SBATCH_"))


def _is_dropped(name: str, env: Mapping[str, str]) -> bool:
    in_job = "SLURM_JOB_ID" in env or "SLURM_JOBID" in env
    patterns = (*RANKS, *SLURM, *(DEVICES if in_job else ()))
    return name not in KEPT and any(fnmatchcase(name, pattern) for pattern in patterns)

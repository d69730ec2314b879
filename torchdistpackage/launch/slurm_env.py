"""Slurm's variables: whether this process is a task of a step, and what a new job may not inherit.

Only srun makes tasks. sbatch and salloc pass on what they find in their caller's environment, so in
a job that was submitted from inside a step that step's variables stand next to the new job's own;
they count only where nothing contradicts them. A job that we submit gets none of them: what another
job, step or launcher said of itself is not handed on, and all else is. The patterns are those of a
shell's `case`, so that a batch script can follow the same rule.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torchdistpackage.launch.hostlist import expand, expand_counts

Env = Mapping[str, str]

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

# Slurm numbers what is not a srun step from here: batch script, interactive shell, external.
_FIRST_RESERVED_STEP = 0xFFFF_FFF0


def in_step(env: Env) -> bool:
    """Whether srun made this process: a batch script or an interactive shell is no step."""
    step = env.get("SLURM_STEP_ID")
    reserved = step is not None and step.isdecimal() and int(step) >= _FIRST_RESERVED_STEP
    return step is not None and not reserved and not is_inherited(env)


def is_inherited(env: Env) -> bool:
    """Whether the step variables come from the job that submitted this one from inside a step.

    Three facts give that away: the list of tasks on this node is not the step's; the step has
    nodes that the job has not; or this is a batch script, submitted from a node of the step.
    """
    counts, node = env.get("SLURM_STEP_TASKS_PER_NODE"), env.get("SLURM_NODEID", "")
    tasks = env.get("SLURM_GTIDS", "").split(",")
    if counts and node.isdecimal() and tasks != [""]:
        per_node = expand_counts(counts)
        if int(node) < len(per_node) and len(tasks) != per_node[int(node)]:
            return True
    step_nodes, job_nodes = env.get("SLURM_STEP_NODELIST"), env.get("SLURM_JOB_NODELIST")
    if not step_nodes or not job_nodes:
        return False
    hosts = set(expand(step_nodes))
    if step_nodes != job_nodes and not hosts <= set(expand(job_nodes)):
        return True
    # srun gives its tasks a umask; from a batch script Slurm takes the variable away. Not proof
    # enough alone, should a site's srun be told to hand on less.
    is_batch = env.get("ENVIRONMENT") == "BATCH" and "SLURM_UMASK" not in env
    return is_batch and env.get("SLURM_SUBMIT_HOST", "").partition(".")[0] in hosts


def hosts_of_ranks(env: Env, counts: Sequence[int], node: int) -> tuple[str, ...]:
    """The host of each rank of a step with `counts` tasks per node; () where it is not known.

    Known is the block distribution, node after node, if the tasks of this `node` agree with it.
    """
    hosts = expand(env.get("SLURM_STEP_NODELIST", ""))
    first = sum(counts[:node])
    here = ",".join(map(str, range(first, first + counts[node])))
    # with one task per node Slurm calls the same thing cyclic
    other = env.get("SLURM_DISTRIBUTION", "block").partition(":")[0] != "block" and max(counts) > 1
    if other or env.get("SLURM_GTIDS") != here or len(hosts) != len(counts):
        return ()
    return tuple(host for host, count in zip(hosts, counts, strict=True) for _ in range(count))


def scrub_slurm_env(env: Env) -> dict[str, str]:
    """`env` as it is handed to sbatch, and to Slurm's other commands."""
    in_job = "SLURM_JOB_ID" in env or "SLURM_JOBID" in env
    patterns = (*RANKS, *SLURM, *(DEVICES if in_job else ()))
    return {
        name: value
        for name, value in env.items()
        if name in KEPT or not any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def options_dropped(env: Env) -> tuple[str, ...]:
    """Variables by which a user may have meant to choose options of sbatch, `NAME=value`."""
    return tuple(f"{name}={env[name]}" for name in sorted(env) if name.startswith("SBATCH_"))

"""Which of the visible GPUs is mine: arithmetic on what the launcher and the driver say.

The one rule: a process takes an index among the devices it can see and never changes what
it sees. CUDA_VISIBLE_DEVICES belongs to whoever set it; a process that narrows it to its
own device takes the direct links to the other GPUs of the node away from NCCL.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.hostlist import expand_counts


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Index among the visible GPUs, None for the CPU, and one line worth printing, or ""."""

    index: int | None
    note: str


def choose_device(
    local_rank: int,
    visible: str | None,
    num_visible: int,
    *,
    local_world_size: int = 1,
    exclusive: bool = False,
    oversubscribe: bool = False,
) -> DeviceChoice:
    """The GPU of `local_rank`, or the CPU where the GPUs do not go round.

    visible: CUDA_VISIBLE_DEVICES as the process found it (None: unset): numbers, UUIDs or
        MIG names. num_visible: how many devices the driver reports under it.
    exclusive: this process was given devices of its own, as the launcher says
        (`exclusive_device`) or the ranks found out by comparing, so that what it sees says
        nothing about the other local ranks.
    oversubscribe: share the GPUs in turn if there are more local ranks than GPUs.

    local_world_size below local_rank + 1 counts as unknown; then one visible GPU is taken
    for this process's own.

    Raises:
        LaunchError: the driver reports another number of devices than `visible` names.
    """
    if local_rank < 0 or num_visible < 0:
        raise LaunchError(
            f"local rank {local_rank} with {num_visible} visible GPUs: neither can be negative; "
            f"pass LOCAL_RANK or SLURM_LOCALID and the driver's device count"
        )
    least, most = _num_named(visible, num_visible)
    if not least <= num_visible <= most:
        raise LaunchError(
            f"local rank {local_rank}: CUDA_VISIBLE_DEVICES={visible!r} names {most} GPU(s), but "
            f"the driver reports {num_visible}; check the names against `nvidia-smi -L`, or unset "
            f"the variable"
        )
    if num_visible == 0:
        return DeviceChoice(None, "no GPU is visible: running on CPU with gloo")
    if exclusive:
        return DeviceChoice(0, _cgroup_hides_others(local_world_size) if num_visible == 1 else "")
    if local_world_size <= local_rank and num_visible == 1:
        return DeviceChoice(0, "")
    num_ranks = max(local_world_size, local_rank + 1)
    if num_ranks <= num_visible:
        return DeviceChoice(local_rank, "")
    gpus = f"{num_visible} GPU{'s' if num_visible > 1 else ''}"
    if oversubscribe:
        note = f"{num_ranks} local ranks, {gpus}: sharing in turn, on request"
        return DeviceChoice(local_rank % num_visible, note)
    return DeviceChoice(None, f"{num_ranks} local ranks, {gpus}: running on CPU with gloo")


def exclusive_device(env: Mapping[str, str]) -> bool:
    """Whether Slurm bound GPUs to this task alone (`--gpus-per-task`, `--gpu-bind`).

    Under a binding SLURM_STEP_GPUS holds the task's own devices, without one those of the
    whole node. Own devices for everybody need as many GPUs as tasks: `--gpu-bind=single:2`
    gives two tasks the same one. A variable that is not there means no, and so does a starter
    inside the task (torchrun, this package's own), whose ranks share what the task was given.

    Raises:
        LaunchError: Slurm's task counts cannot be read.
    """
    own, on_node = env.get("SLURM_STEP_GPUS", ""), env.get("SLURM_GPUS_ON_NODE", "")
    node, tasks = env.get("SLURM_NODEID", ""), env.get("SLURM_STEP_TASKS_PER_NODE", "")
    if not own or not tasks or not on_node.isdecimal() or not node.isdecimal():
        return False
    if "TORCHELASTIC_RUN_ID" in env or "TDP_STORE" in env:
        return False
    num_own, num_on_node, counts = len(own.split(",")), int(on_node), expand_counts(tasks)
    if int(node) >= len(counts):
        return False
    return num_own < num_on_node and num_own * counts[int(node)] <= num_on_node


def names_no_device(visible: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES is set and hides every GPU, as "" does."""
    return visible is not None and _num_named(visible, 0) == (0, 0)


def _num_named(visible: str | None, num_visible: int) -> tuple[int, int]:
    """Fewest and most devices that the driver may report under `visible`."""
    if visible is None:
        return num_visible, num_visible
    names: list[str] = []
    for name in (part.strip() for part in visible.split(",")):
        # As the driver reads it: the first name that is none ends the list ("", -1,
        # Slurm's NoDevFiles), whatever follows.
        if not name.isdecimal() and not name.startswith(("GPU-", "MIG-")):
            break
        names.append(name)
    # Most drivers let a process see one MIG slice only, however many are named.
    least = 1 if names and names[0].startswith("MIG-") else len(names)
    return least, len(names)


def _cgroup_hides_others(local_world_size: int) -> str:
    if local_world_size == 1:
        return ""
    return (
        f"each of {local_world_size} local ranks sees only its own GPU: NCCL may have to do "
        f"without direct links between them; let each see all of the node's, with --gpus-per-node "
        f"instead of --gpus-per-task, and leave CUDA_VISIBLE_DEVICES alone"
    )

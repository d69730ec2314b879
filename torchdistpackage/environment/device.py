"""Choice of this rank's GPU, and the check that all ranks may run on theirs.

A process takes an index among the devices it can see and never changes what it sees: a process that
narrows CUDA_VISIBLE_DEVICES to its own device takes the direct links to the other GPUs of the node
away from NCCL.

What the ranks chose is judged once, from what each published: a rank without a GPU among ranks with
one would wait on gloo for peers that wait in NCCL, and a run on the CPU where GPUs were meant costs
a night. So both are refused, with the hosts that are short of a GPU. One machine with too few
GPUs may run on the CPU: that is how people try things.

Pure: what the launcher, the driver and the ranks say are arguments.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from torchdistpackage.environment.gpu_sharing import ALLOW, gpu_of, ranks_per_gpu
from torchdistpackage.environment.slurm_env import expand_counts
from torchdistpackage.errors import LaunchError

_NAMED = 8
_ADVICE = (
    "look at `nvidia-smi` there and leave such hosts out (Slurm: --exclude), or set "
    "CUDA_VISIBLE_DEVICES to nothing for all ranks to run on the CPU"
)
_HIDDEN = (
    "each of {} local ranks sees only its own GPU: NCCL may have to do without direct links "
    "between them; let each see all of the node's, with --gpus-per-node instead of "
    "--gpus-per-task, and leave CUDA_VISIBLE_DEVICES alone"
)
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Pairs of names for one setting each; the first is the newer."""


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The index among the visible GPUs, None for the CPU, and one line worth printing, or "".

    sharing: the most ranks of this node that one of its GPUs has.
    """

    index: int | None
    note: str
    sharing: int = 1


def choose_device(
    local_rank: int,
    visible: str | None,
    num_visible: int,
    *,
    local_world_size: int = 1,
    exclusive: bool = False,
    share_gpus: bool = False,
) -> DeviceChoice:
    """Return the GPU of `local_rank`; with fewer GPUs than ranks the CPU, or with `share_gpus` a
    GPU that neighbours have too.

    visible: CUDA_VISIBLE_DEVICES as the process found it (None: unset): numbers, UUIDs or
        MIG names. num_visible: how many devices the driver reports under it.
    exclusive: this process was given devices of its own, as the launcher says
        (`exclusive_device`) or the ranks found out by comparing, so that what it sees says
        nothing about the other local ranks.

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
        hidden = num_visible == 1 and local_world_size != 1
        return DeviceChoice(0, _HIDDEN.format(local_world_size) if hidden else "")
    if local_world_size <= local_rank and num_visible == 1:
        return DeviceChoice(0, "")
    num_ranks = max(local_world_size, local_rank + 1)
    if num_ranks <= num_visible:
        return DeviceChoice(local_rank, "")
    if share_gpus:
        index = gpu_of(local_rank, num_ranks, num_visible)
        return DeviceChoice(index, "", ranks_per_gpu(num_ranks, num_visible))
    gpus = f"{num_visible} GPU{'s' if num_visible > 1 else ''}"
    note = f"{num_ranks} local ranks, {gpus}: running on CPU with gloo; for tests {ALLOW}"
    return DeviceChoice(None, f"{note} runs them on {gpus} over NCCL")


def exclusive_device(env: Mapping[str, str]) -> bool:
    """Return True if Slurm bound GPUs to this task alone (`--gpus-per-task`, `--gpu-bind`).

    Under a binding SLURM_STEP_GPUS holds the task's own devices, otherwise those of the entire
    node. Every task can have its own devices only if there are as many GPUs as tasks:
    `--gpu-bind=single:2` gives two tasks the same one. A missing variable means no, and so does a
    starter inside the task (torchrun, this package's own), whose ranks share the task's devices.

    Raises:
        LaunchError: Slurm's task counts cannot be read.
    """
    step_gpus, on_node = env.get("SLURM_STEP_GPUS", ""), env.get("SLURM_GPUS_ON_NODE", "")
    node, tasks = env.get("SLURM_NODEID", ""), env.get("SLURM_STEP_TASKS_PER_NODE", "")
    if not step_gpus or not tasks or not on_node.isdecimal() or not node.isdecimal():
        return False
    if "TORCHELASTIC_RUN_ID" in env or "TDP_STORE" in env:
        return False
    num_own, num_on_node, counts = len(step_gpus.split(",")), int(on_node), expand_counts(tasks)
    if int(node) >= len(counts):
        return False
    return num_own < num_on_node and num_own * counts[int(node)] <= num_on_node


def names_no_device(visible: str | None) -> bool:
    """Return True if CUDA_VISIBLE_DEVICES is set and hides every GPU, as "" does."""
    return visible is not None and _num_named(visible, 0) == (0, 0)


def _num_named(visible: str | None, num_visible: int) -> tuple[int, int]:
    """Return the fewest and most devices that the driver may report under `visible`."""
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


def device_variables(
    env: Mapping[str, str], dump_folder: Path | None = None, *, is_hip: bool = False
) -> dict[str, str]:
    """Return the variables to set in addition to those of `env`.

    is_hip: torch is built for ROCm, whose RCCL ends or hangs processes that order launches
        (ROCm/aorta#512, ROCm/rccl#2191).
    dump_folder: where NCCL's flight recorder leaves a file for each rank when a call timed out.
    """
    settings: dict[tuple[str, ...], str] = {
        _ALLOCATOR: "expandable_segments:True",
        # a captured graph whose buffers NCCL registers hangs on such segments (pytorch#158029)
        ("NCCL_GRAPH_REGISTER",): "0",
    }
    if not is_hip:
        settings["NCCL_LAUNCH_ORDER_IMPLICIT",] = "1"
    if dump_folder is not None:
        settings[_DUMPS] = str(dump_folder.absolute() / "nccl_trace_rank")
    return {names[0]: value for names, value in settings.items() if not env.keys() & {*names}}


DETERMINISTIC = {
    "NCCL_ALGO": "Ring",
    "NCCL_NVLS_ENABLE": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""Variables for sums in one order: NVSwitch may add in another order each time (NVIDIA/nccl#1497),
and cuBLAS chooses kernels by the memory that is free."""
_RECORDED = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE")


def algorithm_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `env` that decide in which order devices add."""
    return {name: env[name] for name in (*_RECORDED, "CUBLAS_WORKSPACE_CONFIG") if name in env}


@dataclass(frozen=True, slots=True)
class RankDevice:
    """Facts that one rank publishes about itself before any communicator exists.

    device: "cuda" or "cpu". asked: the backend its caller requested, or "". num_visible: GPUs that
    the driver shows it; hides_gpus: CUDA_VISIBLE_DEVICES is set and names none. num_given: GPUs of
    this node that Slurm gave the step. problem: why it could choose none, or "". versions: versions
    that must match on all ranks, in words; "" if they may differ. sharing: the largest number of
    this node's ranks on one of its GPUs.
    """

    rank: int
    host: str
    node: int
    num_local: int
    device: str
    backend: str
    asked: str
    num_visible: int
    hides_gpus: bool
    num_given: int
    problem: str = ""
    versions: str = ""
    sharing: int = 1

    def to_json(self) -> str:
        """Return the facts as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read the facts from `to_json`; skip facts that only another version knows."""
        # A rank of another version may say more, and must be understood to be refused for it.
        field_names = {x.name for x in fields(cls)}
        return cls(**{name: x for name, x in json.loads(text).items() if name in field_names})


def disagreement(ranks: Sequence[RankDevice]) -> str:
    """Return why these ranks must not start, or "" if they may."""
    if wrong := [f"rank {r.rank} on {r.host}: {r.problem}" for r in ranks if r.problem]:
        return _some(wrong, "")
    by_versions: dict[str, list[RankDevice]] = {}
    for r in ranks:
        if r.versions:
            by_versions.setdefault(r.versions, []).append(r)
    if len(by_versions) > 1:
        return f"the ranks run different versions: {_versions(by_versions)}"
    on_cpu = [r for r in ranks if r.device == "cpu"]
    if on_cpu and len(on_cpu) < len(ranks):
        return (
            f"some ranks have a GPU and some have none: {_shortage(on_cpu)}; the other "
            f"{len(ranks) - len(on_cpu)} ranks have one each; {_advice(on_cpu)}"
        )
    backends = {r.backend: [s.rank for s in ranks if s.backend == r.backend] for r in ranks}
    if len(backends) > 1:
        shown = ", ".join(
            f"{name} on {_listed(ranks_of_name)}" for name, ranks_of_name in backends.items()
        )
        return f"the ranks use different backends: {shown}; give setup_distributed the same on all"
    if on_cpu and (short := [r for r in ranks if _is_short(r, len(ranks))]):
        return f"too few GPUs: {_shortage(short)}; {_advice(short)}"
    if len({r.sharing for r in ranks}) > 1:
        return (
            f"the nodes have different numbers of ranks on a GPU: {_shortage(ranks)}; with "
            f"{ALLOW} give all nodes the same number of GPUs, and of ranks"
        )
    return ""


def _versions(by_versions: Mapping[str, Sequence[RankDevice]]) -> str:
    """Return a text with the versions and their hosts, rarest first, and what to do."""
    shown: list[str] = []
    for versions, devices in sorted(by_versions.items(), key=lambda item: len(item[1])):
        hosts = list(dict.fromkeys(r.host for r in devices))
        shown.append(
            f"{versions} on {_some(hosts, ' hosts')} ({_listed([r.rank for r in devices])})"
        )
    return (
        f"{_some(shown, ' versions')}; give all hosts one environment, or allow it with "
        f"launch.same_versions: false (same_versions=False of setup_distributed)"
    )


def _advice(short: Sequence[RankDevice]) -> str:
    """Return what to change; ranks that all see a GPU are told that they may share it."""
    share = f", or, for tests, let ranks share GPUs with {ALLOW}"
    return _ADVICE + share * all(r.num_visible > 0 for r in short)


def _is_short(r: RankDevice, world_size: int) -> bool:
    """Return True if a rank on the CPU should have had a GPU."""
    if r.asked == "gloo" or r.hides_gpus:
        return False
    return r.num_given > 0 or (r.num_visible > 0 and r.num_local < world_size)


def _shortage(ranks: Sequence[RankDevice]) -> str:
    """Return the hosts, how many GPUs each shows, and to how many ranks."""
    nodes = {r.node: [s for s in ranks if s.node == r.node] for r in ranks}
    lines: list[str] = []
    for devices in nodes.values():
        r = devices[0]
        by_slurm = f" of the {r.num_given} that Slurm gave" if r.num_given else ""
        gpus = "no GPU" if not r.num_visible else f"{r.num_visible} GPU{'s' * (r.num_visible > 1)}"
        many = "s" * (r.num_local > 1)
        numbers = _listed([s.rank for s in devices])
        lines.append(f"{r.host} shows {gpus}{by_slurm} to {r.num_local} rank{many} ({numbers})")
    return _some(lines, " hosts")


def _some(texts: Sequence[str], unit: str) -> str:
    """Return the first texts, and how many more there are."""
    more = f"; and {len(texts) - _NAMED} more{unit}" if len(texts) > _NAMED else ""
    return "; ".join(texts[:_NAMED]) + more


def _listed(ranks: Iterable[int]) -> str:
    """Return ranks as text, with consecutive ones as ranges: ranks 0 to 7, 9."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    text = ", ".join(" to ".join(map(str, run)) for run in runs)
    return f"rank{'s' * (len(runs) > 1 or len(runs[0]) > 1)} {text}"

"""How many nodes, tasks and CPUs a Slurm job has, from `launch.slurm` and the degrees.

One rule: a node holds the same number of tasks as every other, so the number of ranks follows from
the number of nodes alone, whichever of its range Slurm grants.
"""

import re
from dataclasses import dataclass

from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.slurm import Found, header, node_counts

LAYOUT = ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task")
"""Options that a shape stands for."""
GPUS = ("gpus", "gpus-per-task", "gpus-per-node", "gres")


@dataclass(frozen=True, slots=True)
class JobGeometry:
    """nodes: every count that Slurm may grant, ascending; nodes_text: the same for sbatch.

    gpus_per_node: as [type:]number, if the job asks by `gpus` or `gpus-per-task`, else None.
    """

    nodes: tuple[int, ...]
    nodes_text: str
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: str | None = None

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Number of ranks for each count of nodes."""
        return tuple(n * self.tasks_per_node for n in self.nodes)

    def __str__(self) -> str:
        """2-4 nodes x 8 tasks"""
        nodes = "node" if self.nodes == (1,) else "nodes"
        tasks = "task" if self.tasks_per_node == 1 else "tasks"
        return f"{self.nodes_text} {nodes} x {self.tasks_per_node} {tasks}"


def job_geometry(config: RunConfig) -> tuple[JobGeometry | None, tuple[Found, ...]]:
    """The shape of the job, or why there is none. The options are in order each by itself."""
    options = {k: v for k, v in header(config.launch.slurm).items() if v is not None}
    nodes_text = options.get("nodes", "1")
    nodes = node_counts(nodes_text)
    tasks, why = _tasks(config, options, nodes_text)
    gpus, wrong = _gpus_per_node(options, tasks)
    found = tuple(x for x in (why, wrong) if x)
    if found or tasks is None:
        return None, found
    cpus = int(options.get("cpus-per-task", "1"))
    return JobGeometry(nodes, nodes_text, tasks, cpus, gpus), ()


def num_gpus(options: dict[str, str]) -> int | None:
    """GPUs on each node, as far as the options say so whatever the number of tasks."""
    if "gpus-per-node" in options:
        return _number(options["gpus-per-node"])
    if "gpus" in options:
        share, rest = divmod(_number(options["gpus"]), _smallest(options))
        return None if rest else share
    numbers = re.findall(
        r"(?:^|,)gpu(?::[A-Za-z_][^:,]*)?(?::(\d+))?(?=,|$)", options.get("gres", "")
    )
    return sum(int(number or 1) for number in numbers) or None


def _tasks(
    config: RunConfig, options: dict[str, str], nodes_text: str
) -> tuple[int | None, Found | None]:
    per_node, ntasks = options.get("ntasks-per-node"), options.get("ntasks")
    if ntasks is None:
        return (int(per_node), None) if per_node else _default_tasks(config, options, nodes_text)
    nodes, tasks = _smallest(options), int(ntasks)
    if len(node_counts(nodes_text)) > 1:
        return None, (
            "ntasks",
            f"ntasks={ntasks} is one number of ranks, but nodes={nodes_text} is a choice; use "
            f"ntasks-per-node instead",
        )
    if tasks % nodes:
        return None, (
            "ntasks",
            f"ntasks={ntasks} cannot be shared evenly by nodes={nodes}; use a multiple of {nodes}",
        )
    if per_node and int(per_node) * nodes != tasks:
        return None, (
            "ntasks",
            f"ntasks={ntasks} is not nodes={nodes} x ntasks-per-node={per_node} = "
            f"{nodes * int(per_node)}; leave one of them out",
        )
    return tasks // nodes, None


def _default_tasks(
    config: RunConfig, options: dict[str, str], nodes_text: str
) -> tuple[int | None, Found | None]:
    """As many tasks as GPUs where the data axis takes what there is, else as the degrees ask."""
    parallel, nodes = config.parallel, _smallest(options)
    if parallel.data == "auto":
        if gpus := num_gpus(options):
            return gpus, None
        world = config.launch.local.procs or parallel.model_size
    else:
        world = parallel.model_size * parallel.data
    if world % nodes == 0:
        return world // nodes, None
    return None, (
        "ntasks-per-node",
        f"is not given, and the {world} ranks that the degrees ask for cannot be shared evenly by "
        f"nodes={nodes_text}; set it, or change nodes or the degrees",
    )


def _smallest(options: dict[str, str]) -> int:
    return min(node_counts(options.get("nodes", "1")))


def _number(gpus: str) -> int:
    return int(gpus.rpartition(":")[2])


def _gpus_per_node(options: dict[str, str], tasks: int | None) -> tuple[str | None, Found | None]:
    """`gpus` and `gpus-per-task` by node; the others stay as they are."""
    given = [name for name in GPUS if name in options]
    if "gres" in given and not re.search(r"(^|,)gpu\b", options["gres"]):
        given.remove("gres")
    if len(given) > 1:
        both = " and ".join(f"{name}={options[name]}" for name in given)
        return None, (given[0], f"{both} all ask for GPUs; keep one of them")
    if tasks is None or not given or given[0] in ("gpus-per-node", "gres"):
        return None, None
    name = given[0]
    number, kind = _number(options[name]), options[name].rpartition(":")[0]
    if name == "gpus-per-task":
        number *= tasks
    else:
        nodes = node_counts(options.get("nodes", "1"))
        if len(nodes) > 1 or number % min(nodes):
            text = f"gpus={number} cannot be shared evenly by nodes={options.get('nodes', '1')}"
            return None, (name, f"{text}; use gpus-per-node instead")
        number //= min(nodes)
    return f"{kind}:{number}".removeprefix(":"), None

"""Compute the nodes, tasks and GPUs of a Slurm job from `launch.slurm` and the degrees.

Every node has the same number of tasks, so the number of ranks follows from the number of nodes
that Slurm grants. An impossible size is refused here, before it waits in a queue.
"""

import re
from dataclasses import dataclass

from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.slurm import Found, header, node_counts
from torchdistpackage.environment import gpu_sharing

LAYOUT = ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task")
"""Options that a JobGeometry replaces."""
GPUS = ("gpus", "gpus-per-task", "gpus-per-node", "gres")


@dataclass(frozen=True, slots=True)
class JobGeometry:
    """The size of a job.

    nodes: every number of nodes that Slurm may grant, ascending. nodes_text: the same for sbatch.
    gpus_per_node: [type:]number if the job asks by `gpus` or `gpus-per-task`, else None.
    """

    nodes: tuple[int, ...]
    nodes_text: str
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: str | None = None

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Return the number of ranks for each number of nodes."""
        return tuple(n * self.tasks_per_node for n in self.nodes)

    def __str__(self) -> str:  # 2-4 nodes x 8 tasks
        nodes = "node" if self.nodes == (1,) else "nodes"
        tasks = "task" if self.tasks_per_node == 1 else "tasks"
        return f"{self.nodes_text} {nodes} x {self.tasks_per_node} {tasks}"


def job_geometry(config: RunConfig) -> tuple[JobGeometry | None, tuple[Found, ...]]:
    """Return the size of the job, or the reason why it has none.

    `slurm.problems` must have found every single option valid.
    """
    options = {k: v for k, v in header(config.launch.slurm).items() if v is not None}
    problems: list[Found] = []
    if (span := config.launch.elastic.nodes) is not None:
        if "nodes" in options:
            text = f"nodes={options['nodes']} and launch.elastic.nodes=[{span[0]}, {span[1]}] both"
            problems.append(("nodes", f"{text} set the number of nodes; remove nodes"))
        options["nodes"] = f"{span[0]}" if span[0] == span[1] else f"{span[0]}-{span[1]}"
    nodes_text = options.get("nodes", "1")
    nodes = node_counts(nodes_text)
    tasks = _tasks(config, options, nodes, problems)
    gpus = _gpus_per_node(options, nodes, tasks, problems)
    if problems or tasks is None:
        return None, tuple(problems)
    cpus = int(options.get("cpus-per-task", "1"))
    return JobGeometry(nodes, nodes_text, tasks, cpus, gpus), ()


def ranks_per_gpu(config: RunConfig) -> int:
    """Return the largest number of ranks that share a GPU of the job (launch.share_gpus).

    It is 1 if each rank has its own GPU or the number of GPUs is unknown.
    """
    shape = job_geometry(config)[0] if config.launch.share_gpus else None
    if shape is None:
        return 1
    options = {k: v for k, v in header(config.launch.slurm).items() if v is not None}
    num_gpus = _known_gpus(options, shape.nodes[0])
    return gpu_sharing.ranks_per_gpu(shape.tasks_per_node, num_gpus) if num_gpus else 1


def _tasks(
    config: RunConfig, options: dict[str, str], nodes: tuple[int, ...], problems: list[Found]
) -> int | None:
    """Return the tasks of a node, or None after adding to `problems`.

    The default is one task for each GPU if parallel.data is auto, else as many as the degrees need.
    """
    per_node, fewest = int(options.get("ntasks-per-node", "0")), nodes[0]
    if "ntasks" not in options:
        # the degrees of an elastic run are those on the most nodes
        of = fewest if config.launch.elastic.nodes is None else nodes[-1]
        return per_node or _default_tasks(config, options, of, problems)
    tasks = int(options["ntasks"])
    if len(nodes) > 1:
        choice = f"nodes={options['nodes']} is a choice"
        text = f"is a single number of ranks, but {choice}; use ntasks-per-node instead"
    elif tasks % fewest:
        text = f"cannot be shared evenly by nodes={fewest}; use a multiple of {fewest}"
    elif per_node and per_node * fewest != tasks:
        product = f"nodes={fewest} x ntasks-per-node={per_node} = {fewest * per_node}"
        text = f"is not {product}; remove one of them"
    else:
        return tasks // fewest
    problems.append(("ntasks", f"ntasks={tasks} {text}"))
    return None


def _default_tasks(
    config: RunConfig, options: dict[str, str], nodes: int, problems: list[Found]
) -> int | None:
    data, world = config.parallel.data, config.parallel.model_size
    if data == "auto":
        if gpus := _known_gpus(options, nodes):
            return gpus
        world = config.launch.local.procs or world
    else:
        world *= data
    if world % nodes == 0:
        return world // nodes
    many = options.get("nodes", "1")
    why = f"the {world} ranks that the degrees need cannot be shared evenly by nodes={many}"
    fix = "set it, or change nodes or the degrees"
    problems.append(("ntasks-per-node", f"is not set, and {why}; {fix}"))
    return None


def _known_gpus(options: dict[str, str], nodes: int) -> int | None:
    """Return the GPUs of each node if the options determine them without the number of tasks."""
    if "gpus-per-node" in options:
        return _number(options["gpus-per-node"])
    if "gpus" in options:
        share, remainder = divmod(_number(options["gpus"]), nodes)
        return None if remainder else share
    gpu = r"(?:^|,)gpu(?::[A-Za-z_][^:,]*)?(?::(\d+))?(?=,|$)"
    numbers = re.findall(gpu, options.get("gres", ""))
    return sum(int(number or 1) for number in numbers) or None


def _number(gpus: str) -> int:
    return int(gpus.rpartition(":")[2])


def _gpus_per_node(
    options: dict[str, str], nodes: tuple[int, ...], tasks: int | None, problems: list[Found]
) -> str | None:
    """Return `gpus` or `gpus-per-task` as a number for each node; None for other options."""
    names = [name for name in GPUS if name in options]
    if "gres" in names and not re.search(r"(^|,)gpu\b", options["gres"]):
        names.remove("gres")
    if len(names) > 1:
        both = " and ".join(f"{name}={options[name]}" for name in names)
        problems.append((names[0], f"{both} all ask for GPUs; keep one of them"))
        return None
    if tasks is None or not names or names[0] in ("gpus-per-node", "gres"):
        return None
    name, fewest = names[0], nodes[0]
    number, kind = _number(options[name]), options[name].rpartition(":")[0]
    if name == "gpus-per-task":
        number *= tasks
    elif len(nodes) > 1 or number % fewest:
        text = f"gpus={number} cannot be shared evenly by nodes={options.get('nodes', '1')}"
        problems.append((name, f"{text}; use gpus-per-node instead"))
        return None
    else:
        number //= fewest
    return f"{kind}:{number}".removeprefix(":")

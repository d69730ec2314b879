"""Runs that continue with other degrees on another number of ranks (config/elastic.py). No
torch.
"""

from collections.abc import Collection

from torchdistpackage.config.elastic import elastic_config, nodes_used
from torchdistpackage.config.errors import ConfigErrors, Problem
from torchdistpackage.config.job_geometry import JobGeometry
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import ConfigError
from torchdistpackage.plan.run_plan import Plan, make_plan


def fitted(config: RunConfig, world_size: int, source: str = "the configuration") -> RunConfig:
    """Return the run for `world_size` ranks: with new degrees if it is elastic, else unchanged.

    Raises:
        ConfigError: see `elastic_config`.
    """
    if config.launch.elastic.nodes is None:
        return config
    return elastic_config(config, world_size, source)


def check_nodes(
    config: RunConfig, shape: JobGeometry, source: str, bad: Collection[str] = ()
) -> list[Plan]:
    """Return the plans of a job on every number of nodes that it may use; `bad` as in `make_plan`.

    Raises:
        ConfigErrors: it cannot be on the fewest, or the model not on others; with the reasons.
    """
    if config.launch.elastic.nodes is None:
        return [make_plan(config, x, source, bad=bad) for x in shape.world_sizes]
    plans: list[Plan] = []
    problems: list[Problem] = []
    key = "launch.elastic.nodes"
    try:
        counts = sorted(set(nodes_used(config, shape).values()))
    except ConfigError as error:
        raise ConfigErrors(source, [config.problem(key, _why(error))]) from error
    for nodes in counts:
        try:
            plans.append(elastic_plan(config, nodes * shape.tasks_per_node, source))
        except ConfigError as error:
            problems.append(config.problem(key, f"not on {nodes} nodes: {_why(error)}"))
    if problems:
        raise ConfigErrors(source, problems)
    return plans


def _why(error: ConfigError) -> str:
    problems = error.problems if isinstance(error, ConfigErrors) else ()
    return "; ".join(problem.text for problem in problems) or str(error)


def elastic_plan(config: RunConfig, world_size: int, source: str = "the configuration") -> Plan:
    """Return the plan of `elastic_config`.

    Raises:
        ConfigError: no degrees do, or the model cannot be cut so.
    """
    return make_plan(elastic_config(config, world_size, source), world_size, source)

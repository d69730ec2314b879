"""Adapt the degrees of a run to a number of ranks other than the one it was written for.

Everything that affects results stays: the global batch, the order of samples and the learning-rate
schedule. Tensor and context degrees stay too, because they cut single layers. The data degree
changes first, then the pipe degree. Gradient accumulation makes up for missing ranks, so no
micro-batch grows.
"""

from collections.abc import Iterator

from torchdistpackage.config.check import violations
from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.job_geometry import JobGeometry
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import ConfigError


def elastic_config(
    config: RunConfig, world_size: int, source: str = "the configuration"
) -> RunConfig:
    """Return the same training on `world_size` ranks, with equal losses except for rounding.

    Raises:
        ConfigError: no degrees fit; says why those nearest to the run's do not.
    """
    fixed = config.parallel.context * config.parallel.tensor
    if world_size % fixed:
        raise ConfigError(
            f"{source}: {world_size} ranks are not a multiple of context={config.parallel.context} "
            f"x tensor={config.parallel.tensor} = {fixed}, which stay on any number of nodes; use "
            f"a multiple of {fixed}"
        )
    first: ConfigErrors | None = None
    for candidate in _candidates(config, world_size // fixed):
        if not (problems := violations(candidate, world_size)):
            return candidate
        first = first or ConfigErrors(f"{source} on {world_size} ranks", problems)
    raise first or ConfigError(
        f"{source}: {world_size} ranks do not share data.global_batch={config.data.global_batch} "
        f"evenly in {config.pipeline.microbatches} microbatches under any parallel.pipe up to "
        f"{config.parallel.pipe}; change the number of ranks, or pipeline.microbatches"
    )


def goes_on_without_nodes(config: RunConfig) -> bool:
    """Return whether a job that lost nodes starts its ranks again on those that are left."""
    launch = config.launch
    varies = launch.elastic.nodes is not None or launch.spares > 0
    return varies and launch.requeue.in_job_restarts > 0


def nodes_used(config: RunConfig, shape: JobGeometry) -> dict[int, int]:
    """Return how many nodes the job uses for each number of nodes it may get.

    A job uses the largest number of nodes for which degrees exist, and leaves `launch.spares` idle.

    Raises:
        ConfigError: no degrees fit the fewest nodes.
    """
    used = _nodes_fitted(config, shape)
    most = shape.nodes[-1]
    return used | {most + more: used[most] for more in range(1, config.launch.spares + 1)}


def _nodes_fitted(config: RunConfig, shape: JobGeometry) -> dict[int, int]:
    if config.launch.elastic.nodes is None:
        return {nodes: nodes for nodes in shape.nodes}
    used: dict[int, int] = {}
    best = shape.nodes[0]
    for nodes, world_size in zip(shape.nodes, shape.world_sizes, strict=True):
        try:
            elastic_config(config, world_size, f"launch.elastic.nodes, {nodes} nodes")
            best = nodes
        except ConfigError:
            if not used:
                raise
        used[nodes] = best
    return used


def _candidates(config: RunConfig, num_ranks: int) -> Iterator[RunConfig]:
    """Yield runs whose pipe and data axes have `num_ranks` ranks, most similar first."""
    most = _samples_per_microbatch(config)
    for pipe in range(min(config.parallel.pipe, num_ranks), 0, -1):
        data, remainder = divmod(num_ranks, pipe)
        accumulate = None if remainder else _accumulate(config, data, most)
        if accumulate is None:
            continue
        parallel = config.parallel.model_copy(update={"data": data, "pipe": pipe})
        train = config.train.model_copy(update={"accumulate": accumulate})
        yield config.model_copy(update={"parallel": parallel, "train": train})


def _samples_per_microbatch(config: RunConfig) -> int | None:
    """Return the samples of a micro-batch of the run as written, or None if parallel.data is
    auto.
    """
    data = config.parallel.data
    if data == "auto":
        return None
    return config.data.global_batch // (
        data * config.train.accumulate * config.pipeline.microbatches
    )


def _accumulate(config: RunConfig, data: int, most: int | None) -> int | None:
    """Return the fewest accumulation rounds for `data` replicas, or None if no number fits.

    most: largest number of samples in a micro-batch; None for no limit.
    """
    share, remainder = divmod(config.data.global_batch, data * config.pipeline.microbatches)
    if remainder:
        return None
    least = config.train.accumulate if most is None else 1
    for rounds in range(least, share + 1):
        if share % rounds == 0 and (most is None or share // rounds <= most):
            return rounds
    return None

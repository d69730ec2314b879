"""The degrees of a run on another number of ranks than it was written for.

What numbers follow from stays: the global batch, the order of samples, the schedule of the learning
rate. So do tensor and context, which cut single layers. The data axis changes first, then
the pipe axis; accumulation makes up for ranks that are gone, so no microbatch grows.
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
    """The same training on `world_size` ranks: equal losses but for rounding.

    Raises:
        ConfigError: no degrees do that; says why those nearest to the run's do not.
    """
    fixed = config.parallel.context * config.parallel.tensor
    if world_size % fixed:
        raise ConfigError(
            f"{source}: {world_size} ranks are no multiple of the {fixed} that context="
            f"{config.parallel.context} x tensor={config.parallel.tensor} take, which cut layers "
            f"and stay; use a multiple of {fixed}"
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


def nodes_used(config: RunConfig, shape: JobGeometry) -> dict[int, int]:
    """For each number of nodes that a job may get how many it uses: the most on which it can be.

    Raises:
        ConfigError: it cannot be on the fewest.
    """
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
    """Runs whose pipe and data axes have `num_ranks`, those most like `config` first."""
    most = _samples_per_microbatch(config)
    for pipe in range(min(config.parallel.pipe, num_ranks), 0, -1):
        data, rest = divmod(num_ranks, pipe)
        accumulate = None if rest else _accumulate(config, data, most)
        if accumulate is None:
            continue
        parallel = config.parallel.model_copy(update={"data": data, "pipe": pipe})
        train = config.train.model_copy(update={"accumulate": accumulate})
        yield config.model_copy(update={"parallel": parallel, "train": train})


def _samples_per_microbatch(config: RunConfig) -> int | None:
    """Of the run as it is written; None where it takes as many replicas as fit."""
    data = config.parallel.data
    if data == "auto":
        return None
    return config.data.global_batch // (
        data * config.train.accumulate * config.pipeline.microbatches
    )


def _accumulate(config: RunConfig, data: int, most: int | None) -> int | None:
    """The fewest rounds in which each of `data` replicas does its share of the batch.

    most: samples of a microbatch. None: there are none.
    """
    share, rest = divmod(config.data.global_batch, data * config.pipeline.microbatches)
    if rest:
        return None
    least = config.train.accumulate if most is None else 1
    for rounds in range(least, share + 1):
        if share % rounds == 0 and (most is None or share // rounds <= most):
            return rounds
    return None

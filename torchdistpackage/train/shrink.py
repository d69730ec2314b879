"""The run that stands for a larger one under the order linter. No torch.

Every axis with several ranks keeps at least two, so that all kinds of groups are there. Which calls
ranks make, and in which order, does not depend on the length of an axis or on sizes of tensors.
"""

from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.types import CUSTOM
from torchdistpackage.train.plan import Plan, make_plan, num_parameters

MOST_RANKS = 16
MOST_PARAMETERS = 20_000_000
"""Of all ranks together, each with the whole model."""
_BYTES = 256
_TOKENS = 16
_HEAD_DIM = 4


def shrunk(plan: Plan) -> Plan:
    """The plan with one sample in each microbatch, on at most `MOST_RANKS` ranks, and with a model
    of ours made smaller where it has more than `MOST_PARAMETERS`.

    A custom schedule keeps its ranks and its microbatches. An own model keeps its size.

    Raises:
        ConfigError: the smaller run breaks a rule.
    """
    config, is_large = plan.config, plan.world_size > MOST_RANKS
    if is_large:
        config = _fewer_ranks(config)
    if num_parameters(plan) * _world_size(config) > MOST_PARAMETERS:
        config, is_large = _smaller_model(config), True
    if is_large:
        config = _fewer_rounds(config)
    return make_plan(_one_sample(config), _world_size(config))


def is_small(plan: Plan) -> bool:
    """Whether its steps take seconds: of an own model nothing is known."""
    return plan.shape is not None and num_parameters(plan) * plan.world_size <= MOST_PARAMETERS


def _world_size(config: RunConfig) -> int:
    assert isinstance(config.parallel.data, int)
    return config.parallel.model_size * config.parallel.data


def _fewer_ranks(config: RunConfig) -> RunConfig:
    parallel, pipeline = config.parallel, config.pipeline
    assert isinstance(parallel.data, int)
    # a divisor, so that heads and widths can still be shared evenly
    tensor = next((n for n in range(2, parallel.tensor) if parallel.tensor % n == 0), 0)
    tensor = tensor or parallel.tensor
    pipe = parallel.pipe
    if pipeline.schedule != CUSTOM:
        pipe = min(pipe, max(2, MOST_RANKS // (tensor * min(parallel.data, 2))))
    data = min(parallel.data, max(2, MOST_RANKS // (tensor * pipe)))
    axes = {"data": data, "pipe": pipe, "tensor": tensor}
    config = config.model_copy(update={"parallel": parallel.model_copy(update=axes)})
    return config if pipe == parallel.pipe else _without_costs(config)


def _smaller_model(config: RunConfig) -> RunConfig:
    model, data, tensor = config.model, config.data, config.parallel.tensor
    heads = tensor * min(model.heads // tensor, 2)
    # twice as many layers as stages, which is at least one piece for each
    stages = config.parallel.pipe * max(config.pipeline.chunks or 2, 2)
    if config.pipeline.schedule == CUSTOM:
        stages = model.layers
    sizes: dict[str, object] = {
        "layers": min(model.layers, 2 * stages),
        "heads": heads,
        "dim": _HEAD_DIM * heads,
        "mlp_ratio": 4.0,
    }
    if data.name in ("python_stdlib", "text"):
        sizes["vocab"] = min(model.vocab, _BYTES + model.vocab % tensor)
    update: dict[str, object] = {"model": model.model_copy(update=sizes)}
    if data.name is not None:
        seq_len = min(data.seq_len, _TOKENS * tensor)
        update["data"] = data.model_copy(update={"seq_len": seq_len})
    return _without_costs(config.model_copy(update=update))


def _without_costs(config: RunConfig) -> RunConfig:
    """Measured costs are of the stages that the large run has."""
    partition = "cost" if config.pipeline.partition == "time" else config.pipeline.partition
    pipeline = config.pipeline.model_copy(update={"costs": None, "partition": partition})
    return config.model_copy(update={"pipeline": pipeline})


def _fewer_rounds(config: RunConfig) -> RunConfig:
    """As many microbatches as fill a pipeline and keep it full, in at most two rounds."""
    pipeline, train = config.pipeline, config.train
    if pipeline.schedule != CUSTOM:
        number = min(pipeline.microbatches, 4 * config.parallel.pipe)
        pipeline = pipeline.model_copy(update={"microbatches": number})
    train = train.model_copy(update={"accumulate": min(train.accumulate, 2)})
    return config.model_copy(update={"pipeline": pipeline, "train": train})


def _one_sample(config: RunConfig) -> RunConfig:
    rounds = config.train.accumulate * config.pipeline.microbatches
    assert isinstance(config.parallel.data, int)
    data = config.data.model_copy(update={"global_batch": config.parallel.data * rounds})
    return config.model_copy(update={"data": data})

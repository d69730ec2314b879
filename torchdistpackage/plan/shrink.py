"""The reduced run that stands for a larger one in the communication linter. No torch.

Every axis with several ranks keeps at least two, so that all kinds of groups are there. Which calls
ranks make, and in which order, does not depend on the length of an axis or on sizes of tensors.
"""

from torchdistpackage.config.schema import ParallelSection, RunConfig
from torchdistpackage.config.types import CUSTOM
from torchdistpackage.plan.run_plan import Plan, num_parameters, num_ranks

MOST_RANKS = 16
MOST_PARAMETERS = 20_000_000
"""Largest number of parameters of all ranks together, each with the full model."""
_BYTES = 256
_TOKENS = 16
_HEAD_DIM = 4


def shrunk(plan: Plan) -> Plan:
    """Return the plan with one sample in each micro-batch, on at most `MOST_RANKS` ranks, and with
    a smaller model of ours if it has more than `MOST_PARAMETERS`.

    A custom schedule keeps its ranks and its microbatches. An own model keeps its size.

    Raises:
        ConfigError: the smaller run breaks a rule.
    """

    def smaller(config: RunConfig) -> RunConfig:
        is_large = plan.world_size > MOST_RANKS
        if is_large:
            config = _fewer_ranks(config)
        is_ours = config.model.name is not None
        if is_ours and num_parameters(plan) * num_ranks(config) > MOST_PARAMETERS:
            config, is_large = smaller_model(config), True
        return _one_sample(_fewer_rounds(config) if is_large else config)

    return plan.changed(smaller)


def is_small(plan: Plan) -> bool:
    """Return whether its steps take only seconds; False for a user's own model, whose size is
    unknown.
    """
    return plan.shape is not None and num_parameters(plan) * plan.world_size <= MOST_PARAMETERS


def _with(config: RunConfig, section: str, **update: object) -> RunConfig:
    changed = getattr(config, section).model_copy(update=update)
    return config.model_copy(update={section: changed})


def _fewer_ranks(config: RunConfig) -> RunConfig:
    parallel = config.parallel
    assert isinstance(parallel.data, int)
    # a divisor, so that heads, widths and sequences can still be shared evenly
    tensor, context = (
        next((n for n in range(2, size) if size % n == 0), size)
        for size in (parallel.tensor, parallel.context)
    )
    pipe, inside = parallel.pipe, tensor * context
    if config.pipeline.schedule != CUSTOM:
        pipe = min(pipe, max(2, MOST_RANKS // (inside * min(parallel.data, 2))))
    data = min(parallel.data, max(2, MOST_RANKS // (inside * pipe)))
    degrees = {"data": data, "pipe": pipe, "context": context, "tensor": tensor}
    group = zero_group_for(parallel, data)
    config = _with(config, "parallel", **degrees, zero_group=group)
    return config if pipe == parallel.pipe else _without_costs(config)


def zero_group_for(parallel: ParallelSection, data: int) -> int | None:
    """Return parallel.zero_group for another number of data ranks: with groups and replicas of
    several ranks if they can have both, else None.
    """
    if (number := parallel.zero_group) is None:
        return None
    assert number != "node", "a plan has filled it in"
    for each in (number, 2):
        fits = data % each == 0 and (each % parallel.expert == 0 or parallel.expert % each == 0)
        if fits and 1 < each < data:
            return each
    return None


def smaller_model(config: RunConfig) -> RunConfig:
    """Return the run with a small model of ours, whose heads and layers its ranks can still
    share.
    """
    model, data, tensor = config.model, config.data, config.parallel.tensor
    context = config.parallel.context
    # each tensor rank has two heads, or as many as context ranks may exchange
    least = 2 if context == 1 or model.heads // tensor % context else max(context, 2)
    heads, kv_heads = tensor * min(model.heads // tensor, least), model.kv_heads
    if kv_heads not in (None, model.heads):  # queries still share keys, and ranks key-value heads
        kv_heads = min(kv_heads, tensor)
        heads = tensor if kv_heads < tensor else least * tensor
    # twice as many layers as stages, which is at least one piece for each
    stages = config.parallel.pipe * max(config.pipeline.chunks or 2, 2)
    if config.pipeline.schedule == CUSTOM:
        stages = model.layers
    layers, vocab = min(model.layers, 2 * stages), model.vocab
    if data.spec is not None and data.spec.is_bytes and data.tokenizer is None:
        vocab = min(vocab, _BYTES + vocab % tensor)
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": None, "dim": _HEAD_DIM * heads}
    sizes |= {"mlp_ratio": 4.0, "mlp_hidden": None, "max_seq_len": None, "weights": None}
    config = _with(config, "model", layers=layers, vocab=vocab, **sizes)
    if data.name is not None and not data.is_preference:  # in less pairs would be none
        config = _with(config, "data", seq_len=min(data.seq_len, _TOKENS * tensor * context))
    return _without_costs(config)


def _without_costs(config: RunConfig) -> RunConfig:
    """Return the run without measured costs, which belong to the stages of the large run."""
    partition = "cost" if config.pipeline.partition == "time" else config.pipeline.partition
    return _with(config, "pipeline", costs=None, partition=partition)


def _fewer_rounds(config: RunConfig) -> RunConfig:
    """Return the run with only the micro-batches that fill a pipeline and keep it full, in at most
    two rounds.
    """
    if config.pipeline.schedule != CUSTOM:
        number = min(config.pipeline.microbatches, 4 * config.parallel.pipe)
        config = _with(config, "pipeline", microbatches=number)
    return _with(config, "train", accumulate=min(config.train.accumulate, 2))


def _one_sample(config: RunConfig) -> RunConfig:
    rounds = config.train.accumulate * config.pipeline.microbatches
    assert isinstance(config.parallel.data, int)
    return _with(config, "data", global_batch=config.parallel.data * rounds)

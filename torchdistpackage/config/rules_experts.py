"""Rules about mixtures of experts: sizes must fit each other and the ranks."""

from torchdistpackage.config.model_section import MoESection
from torchdistpackage.config.rules import Rule, divisors, rule
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.moe import shape_of_options

_KEYS = tuple(f"model.moe.{key}" for key in MoESection.model_fields if key != "num_experts")


@rule(*_KEYS, "model.moe.num_experts")
def _moe_keys_are_read(c: RunConfig, world_size: int | None) -> str | None:
    if c.model.moe.num_experts is not None:
        return None
    moe, plain = c.model.moe, MoESection().model_dump()
    if not (unread := [f"model.moe.{key}" for key in plain if getattr(moe, key) != plain[key]]):
        return None
    return (
        f"{', '.join(unread)} has no effect without model.moe.num_experts; set that, or "
        f"remove {'it' if len(unread) == 1 else 'them'}"
    )


@rule("model.moe.num_experts", *_KEYS, "model.mlp_hidden", "parallel.tensor")
def _moe_fits(c: RunConfig, world_size: int | None) -> str | None:
    if c.model.moe.num_experts is None:
        return None
    try:
        shape = shape_of_options({**c.model.moe.model_dump(), "hidden": c.model.expert_hidden})
    except LayoutError as error:
        return f"model.moe: {str(error).removeprefix('mixture of experts: ')}"
    problems = shape.check_split(1, c.parallel.tensor)
    return f"model.moe: {'; '.join(problems)}" if problems else None


@rule("model.moe.first", "model.moe.num_experts", "model.layers")
def _some_block_has_experts(c: RunConfig, world_size: int | None) -> str | None:
    first, layers = c.model.moe.first, c.model.layers
    if c.model.moe.num_experts is None or first < layers:
        return None
    return (
        f"model.moe.first={first} leaves no block of model.layers={layers} with experts; set first "
        f"to {layers - 1} or less"
    )


@rule("parallel.expert", "model.moe.num_experts")
def _expert_ranks_have_experts(c: RunConfig, world_size: int | None) -> str | None:
    ranks, experts = c.parallel.expert, c.model.moe.num_experts
    if ranks == 1:
        return None
    if c.model.hf is not None:  # models/transformers_refusals.py reads its config.json
        return None
    if c.model.name is None:
        return (
            f"parallel.expert={ranks} shares the experts of model.moe, but "
            f"model.target={c.model.target} builds the model; set expert to 1"
        )
    if experts is None:
        return (
            f"parallel.expert={ranks}, but the model has no experts to share; set "
            f"model.moe.num_experts, or expert to 1"
        )
    if ranks > experts:
        return (
            f"parallel.expert={ranks} ranks need one expert each, but "
            f"model.moe.num_experts={experts}; set expert to {experts} or less"
        )
    return None


@rule("parallel.expert", "parallel.data", "parallel.pipe", "parallel.context", "parallel.tensor")
def _expert_divides_data(c: RunConfig, world_size: int | None) -> str | None:
    ranks, data = c.parallel.expert, c.parallel.data
    if data == "auto" and world_size is not None and world_size % c.parallel.model_size == 0:
        data = world_size // c.parallel.model_size
    if data == "auto" or data % ranks == 0:
        return None
    return (
        f"parallel.expert={ranks} does not divide parallel.data={data}, whose ranks hold the "
        f"experts; set expert to {divisors(data, ranks)}"
    )


@rule("model.moe.capacity_factor", "parallel.context")
def _capacity_counts_whole_sequences(c: RunConfig, world_size: int | None) -> str | None:
    factor, context = c.model.moe.capacity_factor, c.parallel.context
    if factor is None or context == 1:
        return None
    return (
        f"model.moe.capacity_factor={factor:g} counts the tokens of whole sequences, but "
        f"parallel.context={context} splits them; set capacity_factor to null, or context to 1"
    )


EXPERT_RULES = tuple(x for x in tuple(globals().values()) if isinstance(x, Rule))
"""The rules of this file, in its order."""

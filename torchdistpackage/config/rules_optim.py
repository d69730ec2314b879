"""Rules of the optim section: which arguments a schedule takes, and which layouts an optimizer."""

from torchdistpackage.config.optim_section import SCHEDULE_ARGS, SCHEDULE_SHAPES, OptimSection
from torchdistpackage.config.rules import Rule, rule
from torchdistpackage.config.schema import RunConfig


@rule("optim.schedule", "optim.schedule_args", "optim.lr", "train.steps")
def _schedule_takes_its_arguments(c: RunConfig, world_size: int | None) -> str | None:
    name, arguments = c.optim.schedule, c.optim.schedule_args
    takes = SCHEDULE_ARGS[name]
    if unknown := [key for key in arguments if key not in takes]:
        takes_text = f"takes {', '.join(takes)}" if takes else "takes none"
        return (
            f"optim.schedule_args has {', '.join(unknown)}, but optim.schedule={name} "
            f"{takes_text}; remove what it does not take"
        )
    shapes = [key for key in arguments if key.endswith("_type")]
    for key in arguments:
        value = arguments[key]
        if key in shapes and value not in SCHEDULE_SHAPES:
            return (
                f"optim.schedule_args.{key}={value} is unknown; use one of "
                f"{', '.join(SCHEDULE_SHAPES)}"
            )
        if key not in shapes and (isinstance(value, bool) or not isinstance(value, int | float)):
            return f"optim.schedule_args.{key}={value} is not a number; use a number"
    return _unsound(c)


def _unsound(c: RunConfig) -> str | None:
    """Return which arguments of the schedule are missing or impossible."""
    name, arguments = c.optim.schedule, c.optim.schedule_args
    if name == "cosine_with_min_lr" and len({"min_lr", "min_lr_rate"} & arguments.keys()) != 1:
        return (
            "optim.schedule=cosine_with_min_lr needs one of min_lr and min_lr_rate in "
            "optim.schedule_args; add one, such as min_lr_rate: 0.1"
        )
    if name == "warmup_stable_decay" and "num_decay_steps" not in arguments:
        return (
            f"optim.schedule=warmup_stable_decay needs num_decay_steps in optim.schedule_args; add "
            f"it, such as num_decay_steps: {max(c.train.steps // 10, 1)}"
        )
    end = arguments.get("lr_end")
    if isinstance(end, int | float) and end >= c.optim.lr:
        return f"optim.schedule_args.lr_end={end:g} is not below optim.lr={c.optim.lr:g}; lower it"
    scale = arguments.get("timescale")
    if isinstance(scale, int | float) and scale <= 0:
        return f"optim.schedule_args.timescale={scale:g} is not above 0; set a number of steps"
    return None


@rule("optim.target", "optim.name", "optim.args")
def _optimizer_is_named_once(c: RunConfig, world_size: int | None) -> str | None:
    name, target = c.optim.name, c.optim.target
    if target is None and c.optim.args:
        keys = ", ".join(c.optim.args)
        return f"optim.args ({keys}) has no effect without optim.target; remove it"
    if target is not None and name != OptimSection().name:
        return f"optim.name={name} and optim.target={target} exclude each other; remove one"
    return None


@rule("train.eval_ema", "optim.ema_decay")
def _averages_are_kept(c: RunConfig, world_size: int | None) -> str | None:
    if not c.train.eval_ema or c.optim.ema_decay is not None:
        return None
    return (
        "train.eval_ema=true validates averages of the weights, but optim.ema_decay is null; set "
        "it, such as 0.999, or eval_ema to false"
    )


@rule("optim.groups")
def _groups_change_something(c: RunConfig, world_size: int | None) -> str | None:
    for index, group in enumerate(c.optim.groups):
        if not group.params:
            return (
                f"optim.groups[{index}] has no params; give it patterns of names, such as "
                f"['*embed*']"
            )
        if group.lr is None and group.weight_decay is None:
            return (
                f"optim.groups[{index}] (params {', '.join(group.params)}) has neither lr nor "
                f"weight_decay; set one, or remove the group"
            )
    return None


@rule("optim.name", "optim.target", "parallel.tensor", "parallel.expert")
def _some_see_whole_parameters(c: RunConfig, world_size: int | None) -> str | None:
    why = c.optim.spec.refuses_split
    degrees = {key: getattr(c.parallel, key) for key in ("tensor", "expert")}
    split = [f"parallel.{key}={size}" for key, size in degrees.items() if size > 1]
    if not why or not split:
        return None
    target = c.optim.target
    chosen = f"optim.name={c.optim.name}" if target is None else f"optim.target={target}"
    return (
        f"{chosen} {why}, but {' and '.join(split)} gives each rank only a part "
        "of it; use data, pipe, context and zero instead, or optim.name=adamw"
    )


@rule("optim.name", "model.lora.target")
def _muon_steps_no_adapters(c: RunConfig, world_size: int | None) -> str | None:
    if c.optim.name != "muon" or c.model.lora.target is None:
        return None
    return (
        f"optim.name=muon makes the update of a matrix orthogonal, but with model.lora.target="
        f"[{', '.join(c.model.lora.target)}] the matrix that moves is the product of lora_A and "
        "lora_B, whose updates are not; use optim.name=adamw"
    )


@rule("optim.muon_exchange", "optim.muon_scale", "optim.name")
def _keys_of_muon_are_read(c: RunConfig, world_size: int | None) -> str | None:
    default = OptimSection()
    keys = ("muon_exchange", "muon_scale")
    changed = [key for key in keys if getattr(c.optim, key) != getattr(default, key)]
    if c.optim.name == "muon" or not changed:
        return None
    values = " and ".join(f"optim.{key}={getattr(c.optim, key)}" for key in changed)
    return f"{values} has no effect with optim.name={c.optim.name}; set name to muon, or remove it"


OPTIM_RULES = tuple(x for x in tuple(globals().values()) if isinstance(x, Rule))
"""The rules of this file, in its order."""

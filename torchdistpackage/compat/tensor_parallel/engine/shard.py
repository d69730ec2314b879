"""One shard of a module: its parameters cut, its layers wrapped, its attributes changed, by a plan.

The module itself is left as it is. Tensors that it shares between names stay shared in the shard.
"""

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.compat.tensor_parallel.engine.actions import StateAction, Whole
from torchdistpackage.compat.tensor_parallel.engine.layerwise import get_default_config
from torchdistpackage.compat.tensor_parallel.engine.ops import RankCollectives
from torchdistpackage.compat.tensor_parallel.engine.products import share_products
from torchdistpackage.compat.tensor_parallel.engine.rules import (
    Config,
    find_matching_actions,
    match_report,
    matching,
    plain_name,
    renamed,
    state_action,
)
from torchdistpackage.compat.tensor_parallel.engine.wrapper import TensorParallelWrapper
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto.draws import mark_split
from torchdistpackage.parallel.auto.nested import find_tied_weight_aliases

WHOLE = Whole()
SIZES = (
    "in_features",
    "out_features",
    "num_embeddings",
    "embedding_dim",
    "in_channels",
    "out_channels",
    "groups",
)
"""Attributes in which torch's layers note the sizes of their weights."""


def make_shard(
    module: nn.Module, device: torch.device | str, config: Config, *, rank: int, world_size: int
) -> tuple[nn.Module, set[str]]:
    """Return the shard of `rank` on `device`, and the names, in the shard, of what a rule cut.

    config: with its collectives bound, see `Config.bound`.

    Raises:
        LayoutError: `module` is one layer and no container, or a rule does not fit a tensor.
        ValueError: two rules say different things of one key.
    """
    check_is_container(module)
    check_num_parts(config, world_size)
    sources = tensors_of(module)
    actions = state_actions(module, config)
    device = torch.device(device)
    empty = {id(tensor): emptied(tensor, device) for tensor in sources.values()}
    shard = deepcopy(module, memo=dict(empty))
    for name, source in sources.items():
        fill(name, empty[id(source)], source, actions.get(name), rank)

    wrappers: dict[nn.Module, nn.Module] = {}
    with torch.no_grad():
        for submodule, names in modules_by_names(shard).items():
            if wrapped := wrapped_module(config, submodule, names, rank, world_size):
                wrappers[submodule] = wrapped
            apply_attributes(config, submodule, names, rank)
    for part, original in zip(shard.modules(), module.modules(), strict=True):
        fix_sizes(part, original)
    for submodule, names in modules_by_names(shard).items():
        if any(pattern.search(name) for pattern in config.split_modules for name in names):
            mark_split(submodule)
    for parent in list(shard.modules()):
        if isinstance(parent, TensorParallelWrapper):
            continue
        for name, child in list(parent._modules.items()):
            if child in wrappers:
                setattr(parent, name, wrappers[child])
    shard = wrappers.get(shard, shard)
    return shard, set(map(shard_names(config, module), actions))


def make_distributed_shard(
    module: nn.Module,
    device: torch.device | str,
    config: Config | None = None,
    *,
    group: Group | None = None,
) -> tuple[nn.Module, set[str]]:
    """Return the shard of this process, and the names of what a rule cut.

    group: the ranks that hold one shard each; default tpc's tensor group, or all ranks. The bare
    shard leaves partial gradients on what it holds whole: `tensor_parallel(module,
    distributed=True)` gives the module that sums them.
    """
    group = resolve_group(group, "tensor")
    if config is None:
        config = get_default_config(module, range(group.size()))
    bound = config.bound(group.size(), RankCollectives(group))
    return make_shard(module, device, bound, rank=group.rank(), world_size=group.size())


def check_is_container(module: nn.Module) -> None:
    if not any(True for _ in module.children()):
        raise AssertionError(
            f"a single {type(module).__name__} was given; pass a container of layers, such as "
            f"torch.nn.Sequential(layer)"
        )


def check_num_parts(config: Config, world_size: int) -> None:
    """Raises LayoutError where rules cut for more or fewer shards, whose parts would be lost."""
    wrong = [
        f"{pattern.pattern}: {action!r} cuts for {num}"
        for pattern, action in config.state_rules.items()
        if (num := action.num_parts()) is not None and num != world_size
    ]
    if wrong:
        raise LayoutError(
            f"the plan does not fit the number of shards, {world_size}: {'; '.join(wrong)}; make "
            f"it for {world_size}"
        )


# -- parameters and buffers ----------------------------------------------------------------


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, each once, under its first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def state_actions(module: nn.Module, config: Config) -> dict[str, StateAction]:
    """Return the action of each tensor of `tensors_of(module)` that a rule matches under any of its
    names.
    """
    actions: dict[str, StateAction] = {}
    for names in find_tied_weight_aliases(module).values():
        if (action := state_action(config, names)) is not None:
            actions[names[0]] = action
    first = {id(tensor): name for name, tensor in tensors_of(module).items()}
    return {
        first[id(tensor)]: actions[names[0]]
        for tensor, names in named_aliases(module)
        if names[0] in actions
    }


def named_aliases(module: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Return each parameter and buffer with all its names."""
    aliases = find_tied_weight_aliases(module)
    tensors = {id(tensor): tensor for tensor in tensors_of(module).values()}
    return [(tensors[key], names) for key, names in aliases.items()]


def emptied(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same kind without elements, for the copy of a module to hold."""
    target = tensor.device if tensor.device.type == "meta" else device
    empty = torch.empty(0, dtype=tensor.dtype, device=target)
    return nn.Parameter(empty, tensor.requires_grad) if is_parameter(tensor) else empty


def is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


@torch.no_grad()
def fill(name: str, empty: Tensor, source: Tensor, action: StateAction | None, rank: int) -> None:
    """Give `empty` the part of `source` that `rank` holds.

    Raises:
        LayoutError: the action does not fit, or would cut quantised numbers.
    """
    part = source.detach()
    if action is not None:
        if is_parameter(source) and not (source.is_floating_point() or source.is_complex()):
            raise LayoutError(
                f"{name} is of type {source.dtype}, as quantised weights are, whose packed numbers "
                f"cannot be cut by {action!r}; split the model first and quantise the shards"
            )
        try:
            part = action(part, rank=rank)
        except (RuntimeError, IndexError, LayoutError) as error:
            raise LayoutError(
                f"{name}, of shape {tuple(source.shape)}, cannot be cut by {action!r}: {error}"
            ) from error
    # a copy, as a part that is a view keeps the whole alive
    empty.data = torch.empty_like(part, device=empty.device).copy_(part)


def shard_names(config: Config, module: nn.Module) -> Callable[[str], str]:
    """Translates a name in `module` to the name in a shard."""
    wrapped = {
        alias
        for submodule, names in modules_by_names(module).items()
        if is_wrapped(config, names)
        for alias in names
    }
    return lambda name: renamed(name, wrapped.__contains__)


# -- modules -------------------------------------------------------------------------------


def modules_by_names(module: nn.Module) -> dict[nn.Module, list[str]]:
    names: dict[nn.Module, list[str]] = {}
    for name, submodule in module.named_modules(remove_duplicate=False):
        names.setdefault(submodule, []).append(name)
    return names


def is_wrapped(config: Config, names: Collection[str]) -> bool:
    patterns = (*config.input_rules, *config.output_rules)
    return any(pattern.search(name) for pattern in patterns for name in names)


def wrapped_module(
    config: Config, module: nn.Module, names: list[str], rank: int, world_size: int
) -> nn.Module | None:
    """Return `module` with what the plan does around it; None: nothing."""
    if not is_wrapped(config, names):
        return None
    inputs: dict[Any, Any] = {}
    outputs: dict[Any, Any] = {}
    for name in names:
        inputs |= find_matching_actions("input", name, config.input_rules)
        outputs |= find_matching_actions("output", name, config.output_rules)
    wrapper = TensorParallelWrapper(module, inputs, outputs, rank=rank, world_size=world_size)
    if config.entrances:
        layers: dict[Any, Any] = {}
        for name in names:
            layers |= find_matching_actions("entrance", name, config.entrances)
        share_products(wrapper, layers)
    keys = [key for key, parameter in module._parameters.items() if parameter is not None]
    for key in keys if config.joins else ():
        for name in dict.fromkeys(plain_name(f"{name}.{key}") for name in names):
            if patterns := matching(config.joins, name):
                wrapper.joins[key] = config.joins[patterns[0]]
    if wrapper.joins and not config.is_general:
        wrapper.sizes = {name: getattr(module, name) for name in SIZES if hasattr(module, name)}
    return wrapper


def apply_attributes(config: Config, module: nn.Module, names: list[str], rank: int) -> None:
    """Change the attributes that the plan names and the module has.

    A family's modules lose attributes from one release of a library to the next.
    """
    actions: dict[Any, Any] = {}
    for name in dict.fromkeys((*names, *map(plain_name, names))):
        actions |= find_matching_actions("attr", name, config.attr_rules)
    for attribute, action in actions.items():
        if hasattr(module, attribute):
            setattr(module, attribute, action(getattr(module, attribute), rank=rank))


def fix_sizes(layer: nn.Module, original: nn.Module) -> None:
    """Sizes that torch's layers note, from the weight of `layer`, where it was cut."""
    weight, full_weight = layer._parameters.get("weight"), original._parameters.get("weight")
    if weight is not None and full_weight is not None and weight.shape != full_weight.shape:
        note_sizes(layer, weight)


def note_sizes(layer: nn.Module, weight: Tensor) -> None:
    """Set the sizes that a layer of torch notes to those of `weight`."""
    if weight.dim() < 2:
        return
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = weight.shape
    elif isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        layer.num_embeddings, layer.embedding_dim = weight.shape
    elif isinstance(layer, _ConvNd):
        first, second = weight.shape[:2]
        if layer.transposed:
            layer.in_channels, layer.out_channels = first, second * layer.groups
        else:
            layer.in_channels, layer.out_channels = second * layer.groups, first


def check_plan(config: Config, module: nn.Module) -> None:
    """Warn of rules that match nothing, and of parameters that several rules match."""
    report = match_report(config, module)
    (replace(report, unmatched=()) if config.is_general else report).log()


def parameter_actions(module: nn.Module, config: Config) -> Mapping[str, StateAction]:
    """Return the action of each parameter, by its name in the original module; `WHOLE` without a
    rule.
    """
    cut = state_actions(module, config)
    return {name: cut.get(name, WHOLE) for name, _ in module.named_parameters()}

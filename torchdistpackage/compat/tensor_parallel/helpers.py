"""Names that tensor_parallel's modules share internally, and helpers for programs with their own
plans.

Each is a step of ours, or made of some: of making a shard, of calling it and of converting a state.
"""

import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.compat.tensor_parallel.engine.actions import StateAction, as_state_action
from torchdistpackage.compat.tensor_parallel.engine.ops import apply_action, bind
from torchdistpackage.compat.tensor_parallel.engine.rules import (
    Actions,
    Config,
    Target,
    get_parameter_name_mapping,
    state_action,
)
from torchdistpackage.compat.tensor_parallel.engine.shard import fill, note_sizes
from torchdistpackage.compat.tensor_parallel.engine.wrapper import TensorParallelWrapper
from torchdistpackage.compat.tensor_parallel.plans import collectives_of
from torchdistpackage.compat.tensor_parallel.threads import run_threads
from torchdistpackage.parallel.auto.reporting import LOG

logger = LOG
Arg = Target
Action = Callable[[Any, int], Any]
MappedActions = Actions
StateRules = dict[re.Pattern[str], StateAction]
ModuleRules = dict[re.Pattern[str], Actions]

# -- plans ------------------------------------------------------------------------------------


def convert_legacy_state_action(state_action: Any) -> StateAction:
    """Return the action of a state rule, which may be a function or a pair of them.

    Raises:
        LayoutError: it is none.
    """
    return as_state_action(state_action)[0]


def create_collective_ops(
    rules: Mapping[Any, Actions],
    devices: Sequence[torch.device],
    distributed: bool = True,
    *,
    group: Group | None = None,
) -> dict[Any, Actions]:
    """Return rules with functions for the texts of collectives; see
    `Config.create_collective_ops`.
    """
    return bind(rules, collectives_of(len(devices), group), full_gradients=False)


def verify_peft_version() -> None:
    """
    Raises:
        ImportError: peft is not installed, or older than 0.3.
    """
    try:
        installed = version("peft")
    except PackageNotFoundError:
        raise ImportError("peft is not installed; use 0.3 or newer") from None
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < (0, 3):
        raise ImportError(f"peft is {installed}; use 0.3 or newer")


def check_lora(module: nn.Module) -> bool:
    """Return whether the module is a Linear with adapters of peft around it."""
    return hasattr(module, "lora_A") and isinstance(getattr(module, "base_layer", None), nn.Linear)


# -- shards -----------------------------------------------------------------------------------


def process_state_(
    sharded_module: nn.Module,
    source_tensors: Mapping[str, Tensor],
    config: Config,
    *,
    rank: int,
    world_size: int,
) -> set[str]:
    """Fill a shard's parameters and buffers with their slices; return the names of those cut.

    Raises:
        LayoutError: an action does not fit its tensor.
    """
    cut: set[str] = set()
    for name, tensor in chain(sharded_module.named_parameters(), sharded_module.named_buffers()):
        action = state_action(config, [name])
        fill(name, tensor, source_tensors[name], action, rank)
        if action is not None:
            cut.add(name)
    return cut


def fix_general_attributes(sharded_module: nn.Module) -> None:
    """Set the sizes that torch's layers note to those of the weights that they now have."""
    for layer in sharded_module.modules():
        if (weight := layer._parameters.get("weight")) is not None:
            note_sizes(layer, weight)


def process_attrs_(
    module: nn.Module, actions: Mapping[str, Any], rank: int, world_size: int
) -> None:
    """Set each attribute to what its action makes of it."""
    for name, action in actions.items():
        setattr(module, name, action(getattr(module, name), rank=rank))


def process_input(
    input_actions: Actions, rank: int, world_size: int, *args: Any, **kwargs: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and named arguments as the actions make them; a target that is absent stays
    so.
    """
    arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    for target in input_actions.keys() & arguments.keys():
        action = input_actions[target]
        arguments[target] = apply_action(
            arguments[target], action, rank=rank, world_size=world_size
        )
    return [arguments.pop(at) for at in range(len(args))], arguments


def process_output(output: Any, output_actions: Actions, *, rank: int, world_size: int) -> Any:
    """Return a tensor, sequence or mapping as the actions make it; see `TensorParallelWrapper`."""
    same = nn.Identity()
    return TensorParallelWrapper(same, {}, output_actions, rank=rank, world_size=world_size)(output)


def parallel_apply_simple(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any]] | None,
    devices: Sequence[torch.device],
) -> list[Any]:
    """Return the outputs of all modules, each called in a thread of its own."""
    places = [x if isinstance(x, list | tuple) else (x,) for x in inputs]
    named = [{}] * len(places) if kwargs_tup is None else kwargs_tup
    calls = [(tuple(args), dict(kwargs)) for args, kwargs in zip(places, named, strict=True)]
    return run_threads(modules, calls, devices)


def get_a_var(obj: Any) -> Tensor | None:
    """Return the first tensor in nested lists, tuples and dicts; None where there is none."""
    if isinstance(obj, Tensor):
        return obj
    parts = obj.values() if isinstance(obj, dict) else obj
    if not isinstance(obj, list | tuple | dict):
        return None
    return next((x for x in map(get_a_var, parts) if x is not None), None)


# -- states -----------------------------------------------------------------------------------


def infer_sharded_data_device_id(name: str) -> int:
    """Return the shard number in a parameter's name.

    Raises:
        KeyError: there is none.
    """
    match = re.search(r"(?:_sanity_check_params|module_shards|flat_shards)\.(\d+)", name)
    if match is None:
        raise KeyError(f"{name!r} names no shard; pass a name in a model of tensor_parallel")
    return int(match[1])


def convert_data(
    input_state_dict: Mapping[str, Tensor],
    output_state_dict: MutableMapping[str, Tensor],
    tensor_parallel_config: Config,
    world_size: int,
    rank: int,
) -> None:
    """Put the parts of `rank` into `output_state_dict`, by the original's names."""
    for name, tensor in input_state_dict.items():
        action = state_action(tensor_parallel_config, [name])
        output_state_dict[name] = tensor if action is None else action(tensor, rank=rank)


def convert_names(state_dict: MutableMapping[str, Tensor], tensor_parallel_config: Config) -> None:
    """Rename the tensors of a state dict, in place, to their names within wrapped modules."""
    for old, new in get_parameter_name_mapping(state_dict, tensor_parallel_config).items():
        state_dict[new] = state_dict.pop(old)


def prefix_names_with_shard_id(state_dict: MutableMapping[str, Tensor], rank: int) -> None:
    """Put `module_shards.{rank}.` before all names of a state, in place."""
    for name in list(state_dict):
        state_dict[f"module_shards.{rank}.{name}"] = state_dict.pop(name)


def convert_state_dict_single_shard(
    input_state_dict: Mapping[str, Tensor],
    tensor_parallel_config: Config,
    world_size: int,
    rank: int,
) -> dict[str, Tensor]:
    """Convert a state dict to that of the shard `rank`, as `convert_state_dict` does for all
    shards.
    """
    shard_state: dict[str, Tensor] = {}
    convert_data(input_state_dict, shard_state, tensor_parallel_config, world_size, rank)
    convert_names(shard_state, tensor_parallel_config)
    prefix_names_with_shard_id(shard_state, rank)
    return shard_state

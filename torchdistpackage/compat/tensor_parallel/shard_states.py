"""State of all shards by their numbers, for programs that load shards by a loader of their own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.compat.tensor_parallel.engine.rules import (
    Config,
    get_parameter_name_mapping,
    state_action,
)
from torchdistpackage.parallel.auto.nested import find_tied_weight_aliases


def convert_state_dict(
    input_state_dict: Mapping[str, Tensor],
    tensor_parallel_config: Config,
    world_size: int,
    for_pretrained: bool = False,
) -> dict[str, Tensor]:
    """Return the state of all shards, with `sharded=False`, from that of the module that is to be
    split.

    A part of a state dict gives the part of the result that it determines, so files can be
    converted one by one. for_pretrained: names in a `TensorParallelPreTrainedModel`.
    """
    names = get_parameter_name_mapping(input_state_dict, tensor_parallel_config)
    prefix = "wrapped_model." if for_pretrained else ""
    shard_states: dict[str, Tensor] = {}
    for rank in range(world_size):
        for name, tensor in input_state_dict.items():
            action = state_action(tensor_parallel_config, [name])
            part = tensor if action is None else action(tensor, rank=rank)
            shard_states[f"{prefix}module_shards.{rank}.{names[name]}"] = part
    for rank in range(world_size):
        shard_states[f"{prefix}_sanity_check_params.{rank}"] = torch.empty(0)
    return shard_states


def infer_sharded_device_map(tp_model: nn.Module) -> dict[str, str]:
    """Name of each parameter and buffer, tied ones under all names -> its device, as "cuda:1".

    They are texts, as safetensors, through which accelerate loads, takes no torch.device.

    Raises:
        KeyError: a name is of no shard.
    """
    devices: Any = tp_model.devices
    tensors = [*tp_model.named_parameters(), *tp_model.named_buffers()]
    places = {id(tensor): str(devices[shard_of(name, len(devices))]) for name, tensor in tensors}
    aliases = find_tied_weight_aliases(tp_model)
    return {alias: places[key] for key, names in aliases.items() for alias in names}


def shard_of(name: str, num: int) -> int:
    """Return the number of the shard that a name belongs to; flat parameters are dealt to the
    shards in turn.
    """
    parts = name.split(".")
    for holder in ("_sanity_check_params", "module_shards", "flat_shards"):
        if holder in parts[:-1]:
            return int(parts[parts.index(holder) + 1]) % num
    raise KeyError(f"{name!r} names no shard; pass a model made by tensor_parallel")

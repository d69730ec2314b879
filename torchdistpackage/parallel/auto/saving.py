"""State of split modules as that of the module that was split, and the other way round.

What a shard holds is found by the name that the original module had for it, tied names included,
and shards by their numbers. Names, their order and every bit are the original's.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto.actions import StateAction
from torchdistpackage.parallel.auto.nested import find_tied_weight_aliases
from torchdistpackage.parallel.auto.rules import Config, get_parameter_name_mapping, state_action
from torchdistpackage.parallel.auto.shard import named_aliases, shard_names


@dataclass(frozen=True)
class OriginalEntry:
    """One name in a state dict of the original module."""

    name: str
    first: str
    in_shard: str
    action: StateAction | None


@dataclass(frozen=True)
class Original:
    """How the module that was split named its state, in its order."""

    entries: tuple[OriginalEntry, ...]
    metadata: Any

    @classmethod
    def of(cls, module: nn.Module, config: Config) -> "Original":
        aliases = {name: names for _, names in named_aliases(module) for name in names}
        state = module.state_dict(keep_vars=True)
        entries, shard_name = [], shard_names(config, module)
        for name in state:
            names = aliases.get(name, [name])
            action = state_action(config, names)
            entries.append(OriginalEntry(name, names[0], shard_name(names[0]), action))
        return cls(tuple(entries), getattr(state, "_metadata", None))


def original_state_dict(model: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """`state_dict()` of the module that was split. With a group all of its ranks call it.

    Raises:
        LayoutError: a rule of the plan cuts and cannot join.
    """
    prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
    destination = kwargs.get("destination", args[0] if args else None)
    found: Any = OrderedDict() if destination is None else destination
    if not hasattr(model, "_original"):
        inner = model.module_shards[0].state_dict(prefix=prefix)
        found.update(inner)
        found._metadata = getattr(inner, "_metadata", None)
        return found
    original: Original = model._original
    made: dict[str, Tensor] = {}
    parts = PartsOf(model)
    for entry in original.entries:
        if entry.first not in made:
            made[entry.first] = parts.joined(entry)
        found[prefix + entry.name] = made[entry.first]
    if original.metadata is not None:
        metadata = OrderedDict((prefix + k, v) for k, v in original.metadata.items())
        if hasattr(found, "_metadata"):
            found._metadata.update(metadata)
        elif destination is None:
            found._metadata = metadata
    return found


class PartsOf:
    """The parts of each tensor that the shards of a `TensorParallel` hold."""

    def __init__(self, model: Any):
        self.group: Group | None = model._group
        self.shards = [tensors_by_any_name(shard) for shard in model.module_shards]
        manager = model.sharding_manager
        with torch.no_grad():
            names = () if manager is None else manager.sharded_param_names
            self.full: dict[str, Tensor] = manager.full_tensors(0) if names else {}
        if self.full:
            tied = {n: name for name, places in manager.names_by_first().items() for n in places}
            self.full |= {n: self.full[first] for n, first in tied.items()}

    def joined(self, entry: OriginalEntry) -> Tensor:
        name = entry.in_shard
        if name in self.full:
            return self._undone(entry, [self.full[name]] * len(self.shards))
        mine = [tensors[name].detach() for tensors in self.shards]
        if self.group is None or entry.action is None:
            return self._undone(entry, mine)
        return self._undone(entry, gathered(mine[0], self.group))

    @staticmethod
    def _undone(entry: OriginalEntry, parts: list[Tensor]) -> Tensor:
        if entry.action is None:
            return parts[0]
        try:
            return entry.action.undo(parts)
        except LayoutError as error:
            raise LayoutError(f"{entry.name}: {error}") from error


def tensors_by_any_name(module: nn.Module) -> dict[str, Tensor]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(module.named_buffers(remove_duplicate=False))}


def gathered(part: Tensor, group: Group) -> list[Tensor]:
    """The parts of all ranks of the group, on the CPU, in its order; their shapes may differ."""
    shapes: list[Any] = collectives.gather_objects(tuple(part.shape), group)
    lengths = [torch.Size(shape).numel() for shape in shapes]
    flat = collectives.all_gather(part.reshape(-1).contiguous(), 0, group, lengths)
    return [p.view(s).cpu() for p, s in zip(flat.split(lengths), shapes, strict=True)]


@contextmanager
def save_tensor_parallel(model: Any) -> Iterator[None]:
    """Inside, `state_dict()` and `save_pretrained()` of `model` are those of what was split.

    Where the shards are processes all of them enter and make the same calls.
    """
    model.set_preserve_shards_when_saving(False)
    try:
        yield
    finally:
        model.set_preserve_shards_when_saving(True)


def convert_state_dict(
    input_state_dict: Mapping[str, Tensor],
    tensor_parallel_config: Config,
    world_size: int,
    for_pretrained: bool = False,
) -> dict[str, Tensor]:
    """The state of all shards, with `sharded=False`, from that of the module that is to be split.

    A part of a state dict gives the part of the result that it determines, so files can be
    converted one by one. for_pretrained: names in a `TensorParallelPreTrainedModel`.
    """
    names = get_parameter_name_mapping(input_state_dict, tensor_parallel_config)
    prefix = "wrapped_model." if for_pretrained else ""
    made: dict[str, Tensor] = {}
    for rank in range(world_size):
        for name, tensor in input_state_dict.items():
            action = state_action(tensor_parallel_config, [name])
            part = tensor if action is None else action(tensor, rank=rank)
            made[f"{prefix}module_shards.{rank}.{names[name]}"] = part
    for rank in range(world_size):
        made[f"{prefix}_sanity_check_params.{rank}"] = torch.empty(0)
    return made


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
    """The number of the shard that a name speaks of; flat parameters go round the shards."""
    parts = name.split(".")
    for holder in ("_sanity_check_params", "module_shards", "flat_shards"):
        if holder in parts[:-1]:
            return int(parts[parts.index(holder) + 1]) % num
    raise KeyError(f"{name!r} names no shard; pass a model made by tensor_parallel")

"""Convert the state of split modules to that of the original module, and back.

A shard's tensors are found by their names in the original module, including tied names, and shards
by their numbers. Names, order and every bit are the original's.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.attendance import expect_all
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto.nested import find_tied_weight_aliases
from torchdistpackage.parallel.auto.split_root import PartOfTensor


@dataclass(frozen=True)
class OriginalEntry:
    """One name in a state dict of the original module."""

    name: str
    first: str
    in_shard: str
    action: PartOfTensor | None


@dataclass(frozen=True)
class Original:
    """The names of the state of the module before the split, in its order."""

    entries: tuple[OriginalEntry, ...]
    metadata: Any

    @classmethod
    def of(
        cls,
        module: nn.Module,
        action_of: Callable[[Sequence[str]], PartOfTensor | None],
        shard_name: Callable[[str], str] = str,
    ) -> "Original":
        """Return the names for a module.

        action_of: how a tensor with these names is divided; None: all shards hold it. shard_name:
        its name in a shard."""
        aliases = {
            name: names for names in find_tied_weight_aliases(module).values() for name in names
        }
        state = module.state_dict(keep_vars=True)
        entries = []
        for name in state:
            names = aliases.get(name, [name])
            entries.append(OriginalEntry(name, names[0], shard_name(names[0]), action_of(names)))
        return cls(tuple(entries), getattr(state, "_metadata", None))


def original_state_dict(model: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Return the `state_dict()` of the original module. With a group all of its ranks call it.

    Raises:
        LayoutError: a rule of the plan cuts and cannot join.
    """
    prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
    destination = kwargs.get("destination", args[0] if args else None)
    state_dict: Any = OrderedDict() if destination is None else destination
    if not hasattr(model, "_original"):
        inner = model.module_shards[0].state_dict(prefix=prefix)
        state_dict.update(inner)
        state_dict._metadata = getattr(inner, "_metadata", None)
        return state_dict
    original: Original = model._original
    if model._group is not None:
        expect_all("state_dict() inside save_tensor_parallel()", model._group)
    joined: dict[str, Tensor] = {}
    parts = PartsOf(model)
    for entry in original.entries:
        if entry.first not in joined:
            joined[entry.first] = parts.joined(entry)
        state_dict[prefix + entry.name] = joined[entry.first]
    if original.metadata is not None:
        metadata = OrderedDict((prefix + k, v) for k, v in original.metadata.items())
        if hasattr(state_dict, "_metadata"):
            state_dict._metadata.update(metadata)
        elif destination is None:
            state_dict._metadata = metadata
    return state_dict


class PartsOf:
    """The slices of each tensor that the shards of a split module hold."""

    def __init__(self, model: Any):
        self.group: Group | None = model._group
        self.shards = [tensors_by_any_name(shard) for shard in model.module_shards]
        self.full: dict[str, Tensor] = model.full_tensors()

    def joined(self, entry: OriginalEntry) -> Tensor:
        name = entry.in_shard
        if name in self.full:
            return self._undone(entry, [self.full[name]] * len(self.shards))
        shards = [tensors[name].detach() for tensors in self.shards]
        if self.group is None or entry.action is None:
            return self._undone(entry, shards)
        return self._undone(entry, gathered(shards[0], self.group))

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
    """Return the slices of all ranks of the group, on the CPU, in group order; their shapes may
    differ.
    """
    shapes: list[Any] = collectives.gather_objects(tuple(part.shape), group)
    lengths = [torch.Size(shape).numel() for shape in shapes]
    flat = collectives.all_gather(part.reshape(-1).contiguous(), 0, group, lengths)
    return [p.view(s).cpu() for p, s in zip(flat.split(lengths), shapes, strict=True)]


@contextmanager
def save_tensor_parallel(model: Any) -> Iterator[None]:
    """Make `state_dict()` and `save_pretrained()` of `model` return and write the unsplit model
    inside the block.

    `model` is split or has split submodules. If shards are processes, all of them enter and make
    the same calls.

    Raises:
        LayoutError: no part of it is split.
    """
    split = [part for part in model.modules() if hasattr(part, "set_preserve_shards_when_saving")]
    if not split:
        raise LayoutError(
            f"save_tensor_parallel got a {type(model).__name__} without a split module; call "
            "tensor_parallel on it, or on a part of it, first"
        )
    for part in split:
        part.set_preserve_shards_when_saving(False)
    try:
        yield
    finally:
        for part in split:
            part.set_preserve_shards_when_saving(True)

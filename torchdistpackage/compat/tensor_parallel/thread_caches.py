"""Inputs for the shards of all threads, and of their outputs the one that is returned.

Each shard has a key-value cache of its own, with the heads that it computes: a cache that comes in
is copied, what it holds already is cut by heads, and the copies go with it as twins. What a caller
does to the cache (reorder it for beams, crop it) is done to the twins too.
"""

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.compat.tensor_parallel.engine.rules import Config
from torchdistpackage.compat.tensor_parallel.nested import map_leaves
from torchdistpackage.compat.tensor_parallel.thread_maps import GradientToAll
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto.cache_heads import CacheHeads, Place, filled_places
from torchdistpackage.parallel.auto.caches import is_cache
from torchdistpackage.parallel.auto.nested import once_each

TWINS = "_tdp_twins"
MIRRORED = (
    "reorder_cache",
    "crop",
    "batch_repeat_interleave",
    "batch_select_indices",
    "reset",
    "early_initialization",
)
"""Methods of a cache that change what it holds."""


class PerDeviceTensors:
    """A tensor for each shard, which a call hands to its shard instead of copies of one."""

    def __init__(self, *tensors: Tensor):
        self.tensors = tuple(tensors)

    def __getitem__(self, i: int) -> Tensor:
        return self.tensors[i]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tensors})"

    @property
    def shape(self) -> torch.Size:
        return self.tensors[0].shape

    def size(self, dim: int) -> int:
        return self.tensors[0].size(dim)


def split_inputs(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    devices: Sequence[torch.device],
    config: Config | None = None,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments for each shard: tensors on its device, its cache, everything else as it
    is.

    Shards get copies of their own of tensors that they might write to. config: the plan, by
    which caches are cut; where each shard has full gradients the first one alone passes them back.
    """
    heads = CacheHeads() if config is None else config.cache_heads()
    return [
        map_leaves(partial(_for_shard, rank, devices, heads), (args, kwargs))
        for rank in range(len(devices))
    ]


def _for_shard(rank: int, devices: Sequence[torch.device], heads: CacheHeads, value: Any) -> Any:
    if isinstance(value, Tensor):
        source = value.detach() if heads.full_gradients and rank > 0 else value
        return _own(source, rank, devices[rank])
    if is_cache(value):
        return twins_of(value, devices, heads)[rank]
    return value


def _own(source: Tensor, rank: int, device: torch.device) -> Tensor:
    moved = source.to(device, non_blocking=True)
    return moved.clone() if moved is source and rank > 0 else moved


def joined_outputs(outputs: Sequence[Any], index: int, full_gradients: bool = False) -> Any:
    """Return the output of one shard; a cache in it has those of the others as twins.

    full_gradients: the gradient of a tensor in it goes to all shards.
    """
    return map_leaves(once_each(partial(_joined_output, index, full_gradients)), *outputs)


def _joined_output(index: int, full: bool, *outputs: Any) -> Any:
    chosen = outputs[index]
    if isinstance(chosen, Tensor):
        if full and any(output.requires_grad for output in outputs):
            return GradientToAll.apply(index, *outputs)
    elif is_cache(chosen) and getattr(chosen, TWINS, None) is None:
        _mirror(chosen, list(outputs))
    return chosen


def twins_of(value: Any, devices: Sequence[torch.device], heads: CacheHeads) -> list[Any]:
    """Return the caches of all shards, of which `value` is one.

    Raises:
        LayoutError: it is filled, but not by these shards or the model that was split.
    """
    twins = getattr(value, TWINS, None)
    if twins is None:
        filled = filled_places(value, heads.are_apart)
        for at, key in filled:
            heads.is_whole(type(value).__name__, None, at[key])
        # later shards first: the copies must not copy twins
        others = range(1, len(devices))
        twins = [value, *(_copied(value, rank, devices[rank], heads, filled) for rank in others)]
        for at, key in filled:
            at[key] = heads.part(at[key], 0)
        _mirror(value, twins)
    if len(twins) != len(devices):
        raise LayoutError(
            f"a {type(value).__name__} of {len(twins)} shards was passed to a module of "
            f"{len(devices)} shards; pass a cache to the model that made it"
        )
    return twins


def _copied(
    value: Any, rank: int, device: torch.device, heads: CacheHeads, filled: list[Place]
) -> Any:
    """Return a copy with the part of `rank` of keys and values, through which gradients pass."""
    memo: dict[int, Any] = {}
    for at, _ in filled:
        for tensor in at.values() if isinstance(at, dict) else ():
            if isinstance(tensor, Tensor):
                memo[id(tensor)] = _own(tensor, rank, device)
            elif isinstance(tensor, torch.device):
                memo[id(tensor)] = device
    for at, key in filled:
        memo[id(at[key])] = _own(heads.part(at[key], rank), rank, device)
    return copy.deepcopy(value, memo)


def _mirror(value: Any, twins: list[Any]) -> None:
    value.__dict__[TWINS] = twins
    value.__class__ = mirrored(type(value))


@cache
def mirrored(kind: type) -> type:
    """Return a subclass whose changes go to all twins."""

    def through(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            own_result = None
            for twin in self.__dict__[TWINS]:
                result = getattr(kind, name)(twin, *args, **kwargs)
                own_result = result if twin is self else own_result
            return own_result

        return call

    methods = {name: through(name) for name in MIRRORED if hasattr(kind, name)}
    return type(kind.__name__, (kind,), methods)

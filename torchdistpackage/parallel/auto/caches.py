"""Inputs for every shard, and of the outputs the one that is returned.

A key-value cache is an object that layers write to. Each shard has one of its own, with the heads
that it computes: a cache that comes in empty is copied, and the copies go with it as twins. What a
caller does to the cache (reorder it for beams, crop it) is done to the twins too.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto.nested import map_leaves
from torchdistpackage.parallel.auto.thread_maps import GradientToAll

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
    full_gradients: bool = False,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments for each shard: tensors on its device, its cache, everything else as it is.

    Shards get copies of their own of tensors that they might write to. full_gradients: the first
    shard alone passes its gradient back, as each has all of it.
    """
    num = len(devices)
    return [
        map_leaves(partial(_for_shard, rank, device, num, full_gradients), (args, kwargs))
        for rank, device in enumerate(devices)
    ]


def _for_shard(rank: int, device: torch.device, num: int, full: bool, value: Any) -> Any:
    if isinstance(value, Tensor):
        source = value.detach() if full and rank > 0 else value
        moved = source.to(device, non_blocking=True)
        return moved.clone() if moved is source and rank > 0 else moved
    if is_cache(value):
        return twins_of(value, num)[rank]
    return value


def joined_outputs(outputs: Sequence[Any], index: int, full_gradients: bool = False) -> Any:
    """The output of one shard; a cache in it has those of the others as twins.

    full_gradients: the gradient of a tensor in it goes to all shards.
    """
    return map_leaves(partial(_joined_output, index, full_gradients), *outputs)


def _joined_output(index: int, full: bool, *outputs: Any) -> Any:
    chosen = outputs[index]
    if isinstance(chosen, Tensor):
        if full and any(output.requires_grad for output in outputs):
            return GradientToAll.apply(index, *outputs)
    elif is_cache(chosen) and getattr(chosen, TWINS, None) is None:
        _mirror(chosen, list(outputs))
    return chosen


def is_cache(value: Any) -> bool:
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, (module.Cache, module.EncoderDecoderCache))


def twins_of(value: Any, num: int) -> list[Any]:
    """The caches of all shards, of which `value` is one.

    Raises:
        LayoutError: it is filled, but not by these shards.
    """
    twins = getattr(value, TWINS, None)
    if twins is None:
        if (length := num_tokens(value)) > 0:
            raise LayoutError(
                f"a {type(value).__name__} of {length} tokens was filled by another model, with "
                f"the heads of all shards; begin with an empty cache, or none"
            )
        # later shards first: the copies must not copy twins
        twins = [value, *(copy.deepcopy(value) for _ in range(num - 1))]
        _mirror(value, twins)
    if len(twins) != num:
        raise LayoutError(
            f"a {type(value).__name__} of {len(twins)} shards came to a module of {num}; pass a "
            f"cache to the model that made it"
        )
    return twins


def num_tokens(value: Any) -> int:
    """Tokens whose keys a cache holds: none where it has states of linear attention alone."""
    try:
        return int(value.get_seq_length())
    except ValueError:  # no layer of it has keys; each shard has such states whole
        return 0


def _mirror(value: Any, twins: list[Any]) -> None:
    value.__dict__[TWINS] = twins
    value.__class__ = mirrored(type(value))


@cache
def mirrored(kind: type) -> type:
    """A subclass whose changes go to all twins."""

    def through(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = None
            for twin in self.__dict__[TWINS]:
                result = getattr(kind, name)(twin, *args, **kwargs)
                found = result if twin is self else found
            return found

        return call

    methods = {name: through(name) for name in MIRRORED if hasattr(kind, name)}
    return type(kind.__name__, (kind,), methods)

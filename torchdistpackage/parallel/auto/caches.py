"""Pass key-value caches into the shard of a rank and out again.

A cache is an object that layers write to. In the cache it was given, each rank keeps the keys and
values of the heads that it computes; existing contents of the cache are cut by heads.
"""

import sys
from collections.abc import Mapping, Sequence, ValuesView
from typing import Any

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.parallel.auto.cache_heads import CacheHeads, filled_places

PART = "_tdp_is_part"


def is_cache(value: Any) -> bool:
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, (module.Cache, module.EncoderDecoderCache))


def enter_caches(values: Sequence[Any], heads: CacheHeads, group: Group) -> None:
    """Cut each cache that a rank receives to its heads, unless the shard filled the cache itself.

    Raises:
        LayoutError: it is filled, but not by these shards or the model that was split.
    """
    rank = group.rank()
    for value in values:
        if not is_cache(value) or getattr(value, PART, False):
            continue
        for at, key in filled_places(value, heads.are_apart):
            if not heads.is_whole(type(value).__name__, rank, at[key]):
                continue
            if at[key].requires_grad and (heads.are_apart or not heads.full_gradients):
                at[key] = collectives.copy(at[key], group)
            if heads.are_apart:
                at[key] = heads.part(at[key], rank)
        setattr(value, PART, True)


def with_caches_marked(output: Any) -> Any:
    """Return the output of a rank's shard with its caches marked as that rank's."""
    values = output.values() if isinstance(output, Mapping) else output
    for value in values if isinstance(values, (tuple, list, ValuesView)) else ():
        if is_cache(value):
            setattr(value, PART, True)
    return output

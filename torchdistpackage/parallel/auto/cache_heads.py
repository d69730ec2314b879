"""The key and value heads of a cache that each shard holds, and their place in the cache."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.errors import LayoutError

HEAD_DIM = 1
"""Dim of the heads in keys and values (batch, heads, tokens, width)."""
Place = tuple[Any, Any]
"""A container, and the key of a tensor in it."""


@dataclass(frozen=True)
class CacheHeads:
    """The key and value heads that each shard holds of the original model's.

    key_heads: heads by rank, in the rank's order; None: all of them. is_known: whether the plan
    knows them. full_gradients: whether each shard computes the full gradient of shared tensors.
    """

    key_heads: tuple[tuple[int, ...], ...] | None = None
    is_known: bool = True
    full_gradients: bool = False

    @property
    def are_apart(self) -> bool:
        return self.key_heads is not None or not self.is_known

    def is_whole(self, kind: str, rank: int | None, tensor: Tensor) -> bool:
        """Return whether keys or values in a `kind` have the heads of all shards; otherwise they
        have those of `rank`.

        Raises:
            LayoutError: they have another number of heads, or the plan does not say which.
        """
        num = tensor.shape[HEAD_DIM]
        if not self.is_known:
            raise LayoutError(
                f"a {kind} with keys of {num} heads was filled before it came to the split model, "
                f"whose plan splits heads and does not say which; pass key_heads to its Config, or "
                f"begin with an empty cache"
            )
        if self.key_heads is None:
            return True
        total = max(map(max, self.key_heads)) + 1
        if num == total:
            return True
        if rank is not None and num == len(self.key_heads[rank]):
            return False
        raise LayoutError(
            f"a {kind} has keys of {num} heads, but the model that was split has {total}; pass a "
            f"cache that this model or the unsplit one has filled, or begin with an empty one"
        )

    def part(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the slice with the heads of `rank` from keys or values of all heads."""
        if self.key_heads is None:
            return tensor.detach() if self.full_gradients and rank > 0 else tensor
        heads = torch.tensor(self.key_heads[rank], device=tensor.device)
        return tensor.index_select(HEAD_DIM, heads)


def filled_places(value: Any, apart: bool) -> list[Place]:
    """Return where a cache holds keys and values.

    Raises:
        LayoutError: shards have heads `apart`, and it holds something in another form, such as
            quantised.
    """
    places: list[Place] = []
    for name in ("layers", "key_cache", "value_cache"):  # the last two until transformers 4.53
        for each in caches_in(value):
            layers = vars(each).get(name)
            for at, layer in enumerate(layers if isinstance(layers, list) else ()):
                places += [(layers, at)] if name != "layers" else _places_of_layer(layer, apart)
    return [(at, key) for at, key in places if holds_numbers(at[key])]


def caches_in(value: Any) -> list[Any]:
    both = ("self_attention_cache", "cross_attention_cache")
    return [value, *(getattr(value, name) for name in both if hasattr(value, name))]


def _places_of_layer(layer: Any, apart: bool) -> list[Place]:
    attributes = vars(layer)
    others = [n for n, x in attributes.items() if n not in ("keys", "values") and holds_numbers(x)]
    if others and apart:
        raise LayoutError(
            f"a {type(layer).__name__} was filled before it came to the split model, and of its "
            f"{', '.join(others)} no part of a shard is known; begin with an empty cache"
        )
    return [(attributes, name) for name in ("keys", "values") if name in attributes]


def holds_numbers(value: Any) -> bool:
    """Return whether a value is or contains a tensor of several elements; a tensor of one element
    is a count.
    """
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return any(map(holds_numbers, value))
    return isinstance(value, Tensor) and value.numel() > 1

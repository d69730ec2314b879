"""How attention heads, and the key and value heads that they read, are dealt to shards."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.parallel.auto.actions import StateAction, TakeChunks
from torchdistpackage.parallel.auto.layerwise import even_part


@dataclass(frozen=True)
class Heads:
    """Query heads in runs, the first shards one more; key and value heads as these need them.

    queries, keys: of each shard, the heads of the model that it has, in its order.
    """

    queries: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[int, ...], ...]
    head_dim: int

    def cut_queries(self, dim: int) -> StateAction:
        return TakeChunks(dim, self.head_dim, self.queries)

    def cut_keys(self, dim: int) -> StateAction:
        return TakeChunks(dim, self.head_dim, self.keys)

    def of_folded(self, value: Tensor | None, *, rank: int) -> Tensor | None:
        """The shard's part of a tensor (batch x heads, ...) or (batch, heads, ..., ...)."""
        if value is None:
            return None
        if value.dim() == 4:
            return value[:, self.queries[rank]]
        by_head = value.unflatten(0, (-1, sum(map(len, self.queries))))
        return by_head[:, self.queries[rank]].flatten(0, 1)

    def of_mask(self, value: Tensor | None, *, rank: int) -> Tensor | None:
        """The shard's part of a mask (batch, heads, ...); one for all heads stays as it is."""
        if value is None or value.shape[1] == 1:
            return value
        return value[:, self.queries[rank]]

    def num_queries(self, value: Any = None, *, rank: int) -> int:
        return len(self.queries[rank])

    def num_keys(self, value: Any = None, *, rank: int) -> int:
        return len(self.keys[rank])

    def num_groups(self, value: Any = None, *, rank: int) -> int:
        """Query heads that share a key head."""
        return len(self.queries[rank]) // len(self.keys[rank])

    def width(self, value: Any = None, *, rank: int) -> int:
        """Elements of the shard's queries."""
        return len(self.queries[rank]) * self.head_dim


def deal_heads(
    what: str, num_heads: int, head_dim: int, world_size: int, num_key_heads: int | None = None
) -> Heads:
    """Heads for `world_size` shards.

    Where the query heads of a shard are not whole groups of one size, each gets a key head of its
    own, so that a shard's heads are again groups of one size.

    Raises:
        LayoutError: there are more shards than heads.
    """
    if num_heads < world_size:
        raise LayoutError(
            f"{what} has {num_heads} attention heads, which {world_size} shards cannot share; use "
            f"at most {num_heads}"
        )
    per_key = num_heads // (num_key_heads or num_heads)
    queries, keys, start = [], [], 0
    for size in even_sizes(num_heads, world_size):
        mine = tuple(range(start, start + size))
        start += size
        wanted = [head // per_key for head in mine]
        distinct = tuple(sorted(set(wanted)))
        counts = {wanted.count(key) for key in distinct}
        queries.append(mine)
        keys.append(distinct if len(counts) == 1 else tuple(wanted))
    return Heads(tuple(queries), tuple(keys), head_dim)


def even_part_of(world_size: int) -> Callable[..., int]:
    """An attribute rule: the shard's part of a number of things of which the first have more."""
    return partial(even_part, world_size=world_size)

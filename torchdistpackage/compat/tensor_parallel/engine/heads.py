"""Deal attention heads, and the key and value heads that they read, to shards."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchdistpackage.compat.tensor_parallel.engine.actions import StateAction, TakeChunks
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.partition import even_sizes


@dataclass(frozen=True)
class Heads:
    """Query heads in runs, the first shards one more; key and value heads as these need them.

    queries, keys: of each shard, the heads of the model that it has, in its order. per_key: query
    heads of the model to a key head.
    """

    queries: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[int, ...], ...]
    head_dim: int
    per_key: int = 1

    @property
    def num(self) -> int:
        """Query heads of the model."""
        return sum(map(len, self.queries))

    def cut_queries(self, dim: int) -> StateAction:
        return TakeChunks(dim, self.head_dim, self.queries)

    def cut_keys(self, dim: int) -> StateAction:
        return TakeChunks(dim, self.head_dim, self.keys)

    def cut_fused(self, dim: int) -> StateAction:
        """Cut a dim that holds, for each key head, its query heads, the key and the value."""
        return TakeChunks(dim, self.head_dim, [self._fused(rank) for rank in range(len(self.keys))])

    def _fused(self, rank: int) -> list[int]:
        queries, keys = self.queries[rank], self.keys[rank]
        group_size, places = len(queries) // len(keys), list[int]()
        for at, key in enumerate(keys):
            first = key * (self.per_key + 2)
            group = queries[at * group_size : (at + 1) * group_size]
            places += [first + query % self.per_key for query in group]
            places += [first + self.per_key, first + self.per_key + 1]
        return places

    def in_parts(self, num_parts: int, num_heads: int) -> list[list[int]]:
        """Return each shard's heads in a dim of parts that hold `num_heads` each."""
        return [
            [part * num_heads + head for part in range(num_parts) for head in run]
            for run in _runs(num_heads, len(self.queries))
        ]

    def of_heads(self, value: Tensor | None, *, rank: int) -> Tensor | None:
        """Return the shard's heads of a tensor (batch x heads, ...) or (batch, heads, ..., ...);
        one head may stand for all.
        """
        if value is None:
            return None
        if value.dim() == 4:
            return value if value.shape[1] == 1 else value[:, self.queries[rank]]
        return value.unflatten(0, (-1, self.num))[:, self.queries[rank]].flatten(0, 1)

    def num_queries(self, value: Any = None, *, rank: int) -> int:
        return len(self.queries[rank])

    def num_keys(self, value: Any = None, *, rank: int) -> int:
        return len(self.keys[rank])

    def num_groups(self, value: Any = None, *, rank: int) -> int:
        """Return the number of query heads that share a key head."""
        return len(self.queries[rank]) // len(self.keys[rank])

    def width(self, value: Any = None, *, rank: int) -> int:
        """Return the number of elements of the shard's queries."""
        return len(self.queries[rank]) * self.head_dim


def deal_heads(
    owner: str,
    num_heads: int,
    head_dim: int,
    world_size: int,
    num_key_heads: int | None = None,
    blocks: int = 1,
) -> Heads:
    """Return the heads of each of `world_size` shards. blocks: runs of heads; every shard has a
    part of each run.

    Where the query heads of a shard are not whole groups of one size, each gets a key head of its
    own, so that a shard's heads are again groups of one size.

    Raises:
        LayoutError: there are more shards than heads.
    """
    each = num_heads // blocks
    if each < world_size:
        where = f" in {blocks} blocks of {each}" if blocks > 1 else ""
        raise LayoutError(
            f"{owner} has {num_heads} attention heads{where}, which {world_size} shards cannot "
            f"share; use at most {each}"
        )
    per_key = num_heads // (num_key_heads or num_heads)
    queries, keys = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for run in _runs(each, world_size):
        heads = tuple(block * each + head for block in range(blocks) for head in run)
        key_heads = [head // per_key for head in heads]
        distinct = tuple(sorted(set(key_heads)))
        counts = {key_heads.count(key) for key in distinct}
        queries.append(heads)
        keys.append(distinct if len(counts) == 1 else tuple(key_heads))
    return Heads(tuple(queries), tuple(keys), head_dim, per_key)


def _runs(num: int, world_size: int) -> list[range]:
    ends = list[range]()
    for size in even_sizes(num, world_size):
        start = ends[-1].stop if ends else 0
        ends.append(range(start, start + size))
    return ends

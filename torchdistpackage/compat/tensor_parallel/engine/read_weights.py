"""Weights that a module reads of its layers, outside of their forward: whole on every shard.

A shard's layer has a part of its weight. A module that computes with the weight itself, such as a
head that multiplies by the table of an embedding, needs all of it: the parts are joined for each
operation that gets it, on all shards, which take the same way. What a part tells as well as the
whole does, such as its dtype, joins nothing. The sizes that a layer notes are whole there too, such
as the `embedding_dim` by which a model scales; inside of the layer they are those of the part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.compat.tensor_parallel.engine.actions import (
    FirstOnly,
    Split,
    SplitInChunks,
    SplitInGroupedChunks,
    StateAction,
    on_dim,
)
from torchdistpackage.compat.tensor_parallel.engine.ops import CollectiveBase, Collectives, bind
from torchdistpackage.parallel.auto import traffic


@dataclass(frozen=True)
class Join:
    """The whole weight from the parts that `action` made. collective: sums or gathers them."""

    action: StateAction
    collective: CollectiveBase
    num: int

    def has_all(self) -> bool:
        """Return whether all shards are in a forward, or all ranks in one that a backward
        recomputes.
        """
        return self.collective.has_all()

    def __call__(self, part: Tensor, rank: int) -> Tensor:
        full = self.collective(part, rank=rank)
        traffic.note(self.collective, part, full, rank)
        if not isinstance(self.action, SplitInGroupedChunks):
            return full
        dim = self.action.dim
        places, cut = torch.arange(full.shape[dim], device=full.device), on_dim(self.action, 0)
        dealt = torch.cat([cut(places, rank=index) for index in range(self.num)])
        return full.index_select(dim, dealt.argsort())


def joins(rules: Mapping[Any, StateAction], num: int, collectives: Collectives) -> dict[Any, Join]:
    """Return how the parts of weights are joined, of plans with full gradients, by patterns of
    names.
    """
    texts: dict[Any, dict[Any, str]] = {}
    for pattern, action in rules.items():
        if isinstance(action, FirstOnly):
            texts[pattern] = {0: "sum"}
        elif type(action) in (Split, SplitInChunks, SplitInGroupedChunks):
            texts[pattern] = {0: f"gather {action.dim}"}
    bound = bind(texts, collectives, full_gradients=True)
    return {pattern: Join(rules[pattern], bound[pattern][0], num) for pattern in texts}

"""Weights that a module reads of its layers, outside of their forward: whole on every shard.

A shard's layer has a part of its weight. A module that computes with the weight itself, such as a
head that multiplies by the table of an embedding, needs all of it: the parts are joined for each
operation that gets it, on all shards, which take the same way. What a part tells as well as the
whole does, such as its dtype, joins nothing. The sizes that a layer notes are whole there too, such
as the `embedding_dim` by which a model scales; inside of the layer they are those of the part.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.comm.nested import map_tensors
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto import traffic
from torchdistpackage.parallel.auto.actions import (
    FirstOnly,
    Split,
    SplitInChunks,
    SplitInGroupedChunks,
    StateAction,
    on_dim,
)
from torchdistpackage.parallel.auto.ops import CollectiveBase, Collectives, bind

ALIKE = ("dtype", "device", "layout", "requires_grad", "is_cuda", "is_meta", "ndim")
KNOWN = {getattr(Tensor, name).__get__ for name in ALIKE}
KNOWN |= {Tensor.is_floating_point, Tensor.is_complex, Tensor.dim}
"""What is asked of a tensor that its parts have alike."""
WRITES = ("__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")


@dataclass(frozen=True)
class Join:
    """The whole weight from the parts that `action` made. collective: sums or gathers them."""

    action: StateAction
    collective: CollectiveBase
    num: int

    def has_all(self) -> bool:
        """Whether all shards are in a forward, or ranks in one that a backward computes again."""
        return self.collective.has_all()

    def __call__(self, part: Tensor, rank: int) -> Tensor:
        whole = self.collective(part, rank=rank)
        traffic.note(self.collective, part, whole, rank)
        if not isinstance(self.action, SplitInGroupedChunks):
            return whole
        dim = self.action.dim
        places, cut = torch.arange(whole.shape[dim], device=whole.device), on_dim(self.action, 0)
        dealt = torch.cat([cut(places, rank=index) for index in range(self.num)])
        return whole.index_select(dim, dealt.argsort())


def joins(rules: Mapping[Any, StateAction], num: int, collectives: Collectives) -> dict[Any, Join]:
    """How the parts of weights are joined, of plans with full gradients, by patterns of names."""
    texts: dict[Any, dict[Any, str]] = {}
    for pattern, action in rules.items():
        if isinstance(action, FirstOnly):
            texts[pattern] = {0: "sum"}
        elif type(action) in (Split, SplitInChunks, SplitInGroupedChunks):
            texts[pattern] = {0: f"gather {action.dim}"}
    bound = bind(texts, collectives, full_gradients=True)
    return {pattern: Join(rules[pattern], bound[pattern][0], num) for pattern in texts}


class SplitWeight(Tensor):
    """The part of a weight, which operations get whole by `join`."""

    join: Callable[[Tensor], Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named, known = kwargs or {}, func in KNOWN
        written = named.get("out", args[0] if args and is_write(func) else None)
        if isinstance(written, SplitWeight):
            raise LayoutError(
                f"a forward writes to the weight of a layer that is split, of shape "
                f"{tuple(plain(written).shape)} on this shard, by {func.__name__}; write before "
                f"the model is split, or leave the layer whole by a tensor_parallel_config"
            )
        given = plain if known else whole
        with torch._C.DisableTorchFunctionSubclass():
            return func(*map_tensors(args, given), **map_tensors(named, given))


def plain(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor) if isinstance(x, SplitWeight) else x


def whole(x: Tensor) -> Tensor:
    """`x`, of a weight all of it. All shards call this together."""
    return x.join(plain(x)) if isinstance(x, SplitWeight) else x


def is_write(func: Any) -> bool:
    """Whether it writes to its first argument, or gives what can be written to."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in WRITES or func == Tensor.data.__get__


def split_weight(part: Tensor, join: Callable[[Tensor], Tensor]) -> SplitWeight:
    weight = part.as_subclass(SplitWeight)
    weight.join = join
    return weight

"""What clipping, scaling, checkpoints and training need of an optimizer that shards."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.zero.param_shard import ParamPartition, ParamShard


@runtime_checkable
class ShardedOptimizer(Protocol):
    """An optimizer that keeps a part of each parameter here: ZeroOptimizer.

    state: of what the inner optimizer steps. shards: what this rank owns, a piece of a parameter
    each. partitions: for each param group its parameters; `bounds` of each say who has which
    elements, all zero where it is frozen. reducer: sums the gradients.
    """

    state: Any
    shards: Sequence[ParamShard]
    partitions: Sequence[Sequence[ParamPartition]]
    reducer: Reducer

    def finish(self) -> None:
        """Wait until parameters are full and current."""

    def arrive(self) -> None:
        """Wait until no parameter is on its way."""

"""Gradients of a step around functions, whose losses may be (sum, count): divided at its end.

One rule: all ranks learn from the last stage whether there is a count before any of them divides.
They know it beforehand once a function has returned one; what is to be summed over replicas then
waits for the division, as steps before it may have left gradients that are not summed yet.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.companions import on_cpu
from torchdistpackage.comm.primitives import Group, device_of, ranks_of
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import CommError
from torchdistpackage.parallel.pipeline.losses import Addition, Losses, over_replicas, replicas
from torchdistpackage.parallel.pipeline.reducing import scatters


class LossDivision:
    """Of one step. teller: pipe index of the last stage. counted: None before the first step."""

    def __init__(
        self,
        group: Group,
        teller: int,
        counted: bool | None,
        optimizer: torch.optim.Optimizer | None,
        reducer: Reducer | None,
    ):
        self._group, self._teller, self._counted = group, ranks_of(group)[teller], counted
        self._tells = group.rank() == teller
        self._optimizer, self._reducer = optimizer, reducer
        groups = [] if optimizer is None else optimizer.param_groups
        self._holders: list[Tensor] = [p for g in groups for p in g["params"]]
        if isinstance(optimizer, ZeroOptimizer):
            # its groups are of shards, which get the sums; before the sums gradients are elsewhere
            shards = [] if counted else [shard.tensor for shard in optimizer.shards]
            self._holders = [*optimizer.reducer.parameters, *shards]
        self._addition = Addition(self._holders)

    @contextmanager
    def held(self) -> Iterator[Reducer | None]:
        """The reducer that may sum in this run."""
        reducer = self._reducer
        is_held = self._counted is True and reducer is not None
        with reducer.no_sync() if is_held and reducer is not None else nullcontext():
            yield None if is_held else reducer

    def finish(self, losses: Losses) -> bool:
        """After the run; `losses` are those of all replicas then. Whether they have a count."""
        reducer, known = self._reducer, self._counted
        if known is None:
            if reducer is not None:
                reducer.finish()
            told = primitives.broadcast_object(
                bool(losses.counted), on_cpu(self._group), self._teller
            )
            if not told:
                return False
        self._check()
        totals = losses.totals
        if totals is None:
            totals = torch.zeros(2, dtype=torch.float64, device=self._device())
        totals = primitives.broadcast(totals, self._group, self._teller)
        totals, num = over_replicas(totals, replicas(reducer))
        self._addition.divide(totals, losses.num_samples, num)
        if self._tells:
            losses.totals = totals
        if known and reducer is not None:
            with reducer.scheduled():
                pass
            reducer.finish()
        return True

    def _device(self) -> torch.device:
        return self._holders[0].device if self._holders else device_of(self._group)

    def _check(self) -> None:
        """Raises CommError: nobody says which gradients, or they are not where they could be."""
        zero = isinstance(self._optimizer, ZeroOptimizer)
        if self._optimizer is None:
            raise CommError(
                "the loss is (sum, count), and without the optimizer nobody says which gradients "
                "are to be divided by the count; give it, or accumulate with Pipeline"
            )
        if (zero and self._reducer is None) or (
            self._reducer is not None and scatters(self._reducer) and not zero
        ):
            raise CommError(
                "the loss is (sum, count), and a ZeroOptimizer holds gradients that are to be "
                "divided by the count; give both it and reducer=optimizer.reducer"
            )

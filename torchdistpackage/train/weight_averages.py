"""Exponential moving averages of the trained weights, as state of the optimizer.

Each tensor that the optimizer updates has its average beside its other state, in the same dtype. So
ZeRO shards the averages, a checkpoint stores them under the parameter's name, and a run with other
degrees continues them like any state. `ShardedEMA` (ddp/ema.py), for your own loops, averages full
parameters instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.checkpoint.manifest import Manifest
from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.errors import CheckpointError

AVERAGE = "ema"
"""Key of an average in the optimizer's state."""


def average_name(manifest: Manifest, parameter: str, path: Path) -> str:
    """Return the name under which a checkpoint stores a parameter's average, by global name; a
    buffer, which no optimizer updates, uses its own name.

    Raises:
        CheckpointError: the checkpoint has no averages.
    """
    if not any(name.endswith(f"#{AVERAGE}") for name in manifest.tensors):
        raise CheckpointError(
            f"{path} has no averages of the weights; train with optim.ema_decay, or take the "
            f"weights, without --ema"
        )
    name = f"{parameter}#{AVERAGE}"
    return name if name in manifest.tensors else parameter


class WeightAverages:
    """The averages of the tensors that `optimizer` updates. decay: of the average in each step."""

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float):
        self._optimizer, self._decay = optimizer, decay

    @torch.no_grad()
    def before_step(self) -> dict[Tensor, Tensor]:
        """Return copies of tensors that have no average yet; their average starts with the current
        value.
        """
        state: dict[Tensor, dict[str, Any]] = self._optimizer.state
        return {p: p.detach().clone() for p in self._tensors() if AVERAGE not in state.get(p, {})}

    @torch.no_grad()
    def after_step(self, initial: dict[Tensor, Tensor]) -> None:
        """Move each average towards its tensor. initial: from `before_step`."""
        state: dict[Tensor, dict[str, Any]] = self._optimizer.state
        for p, average in initial.items():
            # an optimizer makes its state in its first step, if it finds none
            state[p][AVERAGE] = average
        tensors = self._tensors()
        averages = [state[p][AVERAGE] for p in tensors]
        if averages:
            torch._foreach_mul_(averages, self._decay)
            torch._foreach_add_(averages, [p.detach() for p in tensors], alpha=1 - self._decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averages as the model's weights inside the block; all ranks enter together.

        Afterwards weights and averages have their earlier bits, even if the block raises.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        optimizer = self._optimizer
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.arrive()
        for p in self._tensors():
            average = optimizer.state.get(p, {}).get(AVERAGE)
            if average is not None:  # none before the first step
                value = p.detach().clone()
                p.copy_(average)
                average.copy_(value)
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.gather_shards()

    def _tensors(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

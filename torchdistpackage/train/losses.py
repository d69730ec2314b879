"""Losses of outputs and targets as (sum, count): our own for tokens, and a user's."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.data.source import IGNORE
from torchdistpackage.errors import DataError
from torchdistpackage.train.staged_model import LossFn


def token_cross_entropy(
    outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of outputs (..., V) and targets (...) int64; targets of -100 do not
    count.
    """
    total = F.cross_entropy(
        outputs.flatten(0, -2),
        targets.flatten(),
        ignore_index=IGNORE,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    return total, (targets != IGNORE).sum()


def smoothed(
    loss: Callable[..., tuple[Tensor, Tensor]], stage: nn.Module, label_smoothing: float
) -> LossFn:
    """Return a loss with label smoothing while `stage` trains.

    A validation does not smooth, so its perplexity is that of the tokens.
    """

    def loss_of(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if not stage.training:
            return loss(outputs, targets)
        return loss(outputs, targets, label_smoothing=label_smoothing)

    return loss_of


def from_user(
    fn: Callable[[Tensor, Tensor], object], gather: Callable[[Tensor], Tensor] | None = None
) -> LossFn:
    """Return a loss that calls a user's `fn(outputs, targets)`, which returns (sum, count) or the
    mean over dim 0.

    gather: joins outputs that one of our models leaves split over tensor ranks.
    """

    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        value = fn(outputs if gather is None else gather(outputs), targets)
        if isinstance(value, tuple) and len(value) == 2:
            total, count = value
            if isinstance(count, Tensor):
                return total, count.to(outputs.device, non_blocking=True)
            return total, _on(outputs.device, count)
        if isinstance(value, Tensor) and value.dim() == 0:
            count = _on(outputs.device, targets.shape[0])
            return value * count, count
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise DataError(
            f"model.loss returned {shape}; return the mean over the samples as a scalar tensor, "
            f"or (sum of losses, count)"
        )

    return loss


def _on(device: torch.device, number: float) -> Tensor:
    """Return a number on the device, filled in there: a copy from the host would wait for all
    queued work.
    """
    return torch.full((), number, device=device)

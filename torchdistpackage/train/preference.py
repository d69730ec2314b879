"""Direct preference optimisation: the loss of pairs of answers, beside a frozen reference.

Rafailov et al., Direct Preference Optimization, arXiv:2305.18290, equation 7; with label smoothing
of Mitchell, A note on DPO with noisy preferences and relationship to IPO, 2023.

Before each pass over the microbatches the reference runs its forwards by the same schedule, so it
needs no messages of its own kind on any layout. The reference is the model with its adapters
switched off, or else a second copy of the initial model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.data.source import IGNORE
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.losses import totals_on
from torchdistpackage.tools.undisturbed import in_eval
from torchdistpackage.train.staged_model import (
    LossFn,
    MicrobatchLoss,
    StagedModel,
)
from torchdistpackage.train.step_stats import PairSums

Run = Callable[..., None]
"""A function like `Executor.run`, with its surroundings."""


class PreferenceLoss:
    """The loss of a run on pairs. reference: frozen; None: the model without its adapters.

    rows_dim: the dim of outputs along which rows lie.
    """

    def __init__(
        self,
        reference: StagedModel | None,
        device: torch.device,
        *,
        beta: float,
        label_smoothing: float,
        rows_dim: int = 0,
    ):
        self._rows_dim = rows_dim
        self._reference, self._beta, self._smoothing = reference, beta, label_smoothing
        self._sums = totals_on(device, len(PairSums._fields))

    def take(self) -> Tensor:
        """Return this rank's `PairSums` since the last call, in float64."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums

    def beside_reference(
        self,
        model: StagedModel,
        executor: Executor,
        run: Run,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
    ) -> MicrobatchLoss:
        """Return the loss of these microbatches of rows, beside the reference's log probabilities.

        executor: forward alone; run: its `run`.
        """
        reference: dict[int, Tensor] = {}

        def keep(outputs: Tensor, targets: Tensor, m: int) -> tuple[Tensor, Tensor]:
            reference[m] = log_probs(model.loss, outputs, targets, self._rows_dim)
            return reference[m].sum(), reference[m].new_zeros(())

        with self._frozen(model) as frozen:
            unused = totals_on(model.device)
            run(frozen.forward_and_loss(executor, inputs, targets, unused, loss=keep))
        return partial(self._loss, model, reference)

    def _loss(
        self,
        model: StagedModel,
        reference_log_probs: Mapping[int, Tensor],
        outputs: Tensor,
        targets: Tensor,
        m: int,
    ) -> tuple[Tensor, Tensor]:
        """Return (sum of the pairs' losses, number of pairs); a pair without a token that counts is
        none.
        """
        model_log_probs = log_probs(model.loss, outputs, targets, self._rows_dim)
        counts = (targets != IGNORE).any(1)[::2]
        rewards = self._beta * (model_log_probs - reference_log_probs[m])
        margins = rewards[::2] - rewards[1::2]
        right, wrong = F.logsigmoid(margins), F.logsigmoid(-margins)
        losses = -right * (1 - self._smoothing) - wrong * self._smoothing
        if model.tells_loss:
            rows = (
                rewards[::2],
                rewards[1::2],
                margins > 0,
                model_log_probs[::2],
                model_log_probs[1::2],
            )
            self._sums += torch.stack([(x * counts).sum().to(self._sums) for x in rows]).detach()
        return (losses * counts).sum(), counts.sum()

    @contextmanager
    def _frozen(self, model: StagedModel) -> Iterator[StagedModel]:
        """Yield the reference in a state in which it draws no random numbers."""
        if self._reference is not None:
            yield self._reference
            return
        with in_eval(model.stage), adapters_off(model.stage):
            yield model


def log_probs(loss: LossFn, outputs: Tensor, targets: Tensor, rows_dim: int = 0) -> Tensor:
    """Return the sum (N,) over each row's tokens that count. targets (N, S); outputs (N, S, V/n),
    or (S, N, V/n) with `rows_dim` 1.

    loss: of the model, whose ranks may share the vocabulary; it is asked row by row.
    """
    rows = ((outputs.narrow(rows_dim, i, 1), targets[i : i + 1]) for i in range(len(targets)))
    return -torch.stack([loss(*row)[0] for row in rows])


@contextmanager
def adapters_off(stage: nn.Module) -> Iterator[None]:
    """Let layers of peft compute what they would without their adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [x for x in stage.modules() if isinstance(x, BaseTunerLayer)]
    # its `enable_adapters` would freeze the adapters too, whose gradients are waited for
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False

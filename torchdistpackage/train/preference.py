"""Training on pairs of answers; most losses compare with a frozen reference.

Before each pass over the microbatches the reference runs its forwards by the same schedule, so it
needs no messages of its own kind on any layout. The reference is the model with its adapters
switched off, or else a second copy of the initial model.

Ranks that share a sequence each sum the log-probabilities of their tokens, and one all-reduce a
micro-batch makes them whole. Each then has the whole loss, whose gradient with respect to its own
summand is right as it is, and one of them reports it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.config.schema import DpoSection
from torchdistpackage.data.source import IGNORE, Split
from torchdistpackage.lazy import resolve
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.losses import totals_on
from torchdistpackage.tools.undisturbed import in_eval
from torchdistpackage.train.preference_losses import PairScores
from torchdistpackage.train.staged_model import (
    LossFn,
    MicrobatchLoss,
    StagedModel,
)
from torchdistpackage.train.task import Run, TaskLoss, summed_over, told_once

ReferenceOfRound = Callable[[Split, int, int], Mapping[int, Tensor]]
"""Returns, by micro-batch, the reference's log-probabilities (N,) of a round's rows; the round is
named as for `TaskLoss.begin_round`."""


class PreferenceLoss(TaskLoss):
    """The loss of a run on pairs.

    reference: frozen; None: the model without its adapters, if the loss has a reference at all.
    context: the ranks that share each sequence. rows_dim: the dim of outputs along which rows lie.
    """

    unit = "pairs"

    def __init__(
        self,
        reference: StagedModel | None,
        device: torch.device,
        options: DpoSection,
        context: Group,
        *,
        rows_dim: int = 0,
    ):
        super().__init__(device)
        self._options, self._loss_of_pairs = options, resolve(options.spec.loss)
        self._reference, self._context, self._rows_dim = reference, context, rows_dim
        self._round: tuple[Split, int, int] = ("train", 1, 0)
        self.cached: ReferenceOfRound | None = None
        """Log-probabilities from a file, in place of a reference."""

    def begin_round(self, split: Split, number: int, index: int) -> None:
        """See `TaskLoss`."""
        self._round = split, number, index

    def means(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """Return means over pairs, by trl's names."""
        chosen, rejected, accuracy, chosen_logp, rejected_logp = (
            total / max(count, 1) for total in sums[:5]
        )
        return {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": accuracy,
            "rewards/margins": chosen - rejected,
            "logps/chosen": chosen_logp,
            "logps/rejected": rejected_logp,
        }

    def text(self, means: Mapping[str, float]) -> str:
        """See `TaskLoss`."""
        margin, accuracy = means["rewards/margins"], means["rewards/accuracies"]
        return f"margin {margin:.4f}  accuracy {accuracy:.0%}"

    def loss_of(
        self,
        model: StagedModel,
        executor: Executor,
        run: Run,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
    ) -> MicrobatchLoss:
        """Return the loss of these micro-batches of rows, relative to the reference's
        log-probabilities.

        executor: forward only; run: its `run`.
        """
        reference: dict[int, Tensor] = {}
        if not self._options.spec.has_reference:
            return partial(self._loss, model, reference)
        if self.cached is not None:
            return partial(self._loss, model, self.cached(*self._round))

        def keep(outputs: Tensor, targets: Tensor, m: int) -> tuple[Tensor, Tensor]:
            reference[m], _ = self._log_probs(model.loss, outputs, targets)
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
        """Return (sum of the pairs' losses, number of pairs); a pair without a counted token does
        not count.
        """
        log_probs, num_tokens = self._log_probs(model.loss, outputs, targets)
        reference, spec = reference_log_probs.get(m), self._options.spec
        reference = None if reference is None else reference.to(log_probs)
        per_row = num_tokens.clamp(min=1) if spec.is_mean else 1
        ratios = log_probs if reference is None else log_probs - reference
        scores, counts = ratios / per_row, num_tokens[::2] > 0
        pairs = PairScores(scores[::2], scores[1::2])
        loss = (self._loss_of_pairs(pairs, self._options) * counts).sum()
        if model.tells_loss and self._context.rank() == 0:
            # as trl does: sums beside a reference, else what the loss takes
            logged = (ratios, log_probs) if spec.has_reference else (scores, log_probs / per_row)
            rewards, logps = self._options.beta * logged[0], logged[1]
            chosen, rejected = rewards[::2], rewards[1::2]
            rows = (chosen, rejected, chosen > rejected, logps[::2], logps[1::2])
            self.add([(x * counts).sum() for x in rows])
        return told_once(self._context, loss, counts.sum())

    def _log_probs(self, loss: LossFn, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's log-probability (N,), summed over its counted tokens, and their number
        (N,), on all ranks that share the rows.
        """
        return row_log_probs(loss, outputs, targets, self._context, self._rows_dim)

    @contextmanager
    def _frozen(self, model: StagedModel) -> Iterator[StagedModel]:
        """Yield the reference in a state in which it draws no random numbers."""
        if self._reference is not None:
            yield self._reference
            return
        with in_eval(model.stage), adapters_off(model.stage):
            yield model


def row_log_probs(
    loss: LossFn, outputs: Tensor, targets: Tensor, context: Group, rows_dim: int = 0
) -> tuple[Tensor, Tensor]:
    """Return each row's log-probability (N,), summed over its counted tokens, and their number
    (N,).

    All ranks of `context`, which share the rows, get them. Other arguments: as `sum_log_probs`.
    """
    sums = sum_log_probs(loss, outputs, targets, rows_dim)
    num_tokens = (targets != IGNORE).sum(1).to(sums)
    sums, num_tokens = summed_over(context, torch.stack([sums, num_tokens])).unbind()
    return sums, num_tokens


def sum_log_probs(loss: LossFn, outputs: Tensor, targets: Tensor, rows_dim: int = 0) -> Tensor:
    """Return the sum (N,) over each row's counted tokens. targets (N, S); outputs (N, S, V/n), or
    (S, N, V/n) with `rows_dim` 1.

    loss: of the model, whose ranks may share the vocabulary; it is called for each row.
    """
    rows = ((outputs.narrow(rows_dim, i, 1), targets[i : i + 1]) for i in range(len(targets)))
    return -torch.stack([loss(*row)[0] for row in rows])


@contextmanager
def adapters_off(stage: nn.Module) -> Iterator[None]:
    """Make peft's layers, and experts with adapters, compute without these inside the block."""
    layers = [x for x in stage.modules() if hasattr(x, "_disable_adapters")]
    # its `enable_adapters` would freeze the adapters too, whose gradients are waited for
    for layer in layers:
        layer._disable_adapters = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # type: ignore[assignment]

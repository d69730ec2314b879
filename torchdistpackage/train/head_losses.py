"""The losses of heads for sequences and tokens, and the metrics of their validations.

A head gives logits at every position, and a target is set where one counts: at a sequence's last
token that is not padding, as transformers pools, or at the first token of each word. So any rank
can sum the losses of its slice of a sequence. `IGNORE` is at all other positions. An encoder pools
by itself and gives logits of each sequence.

Sums over samples travel with the numbers of a step. A validation gathers the outputs of all its
samples once, and rank 0 computes what is not a mean, such as the area under a curve.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.config.head_tasks import ModelHead
from torchdistpackage.data.source import IGNORE
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.train import head_metrics
from torchdistpackage.train.head_metrics import Array
from torchdistpackage.train.staged_model import MicrobatchLoss, StagedModel
from torchdistpackage.train.task import Run, TaskLoss, summed_over, told_once


class HeadLoss(TaskLoss):
    """Base class of the losses of heads. context: the ranks that share each sequence.

    class_weights: of the loss of each class; () for equal ones. center: the factor of the squared
    sum of a pair's rewards.
    """

    shown: ClassVar[tuple[str, ...]] = ("accuracy",)
    """Values on a log line."""

    def __init__(
        self,
        head: ModelHead,
        device: torch.device,
        context: Group,
        *,
        class_weights: Sequence[float] = (),
        center: float = 0.0,
    ):
        super().__init__(device)
        self._head, self._context, self._center = head, context, center
        weights = torch.tensor(class_weights, dtype=torch.float64, device=device)
        self._weights = weights if class_weights else None
        self._kept: list[tuple[Array, Array]] | None = None

    def loss_of(
        self,
        model: StagedModel,
        executor: Executor,
        run: Run,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
    ) -> MicrobatchLoss:
        """See `TaskLoss`; nothing runs before the model."""

        def loss(outputs: Tensor, targets: Tensor, m: int) -> tuple[Tensor, Tensor]:
            # in float32 at least, as losses are; float64 stays
            outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
            if outputs.dim() == 2:  # of a model that pools by itself
                outputs, targets = outputs.unsqueeze(1), _only(targets)
            return self._loss(outputs, targets, model.tells_loss)

        return loss

    def _loss(self, outputs: Tensor, targets: Tensor, tells: bool) -> tuple[Tensor, Tensor]:
        """Return (sum of losses, count).

        outputs (B, S, K), targets (B, S). tells: this rank reports the loss of its slice of the
        sequences, and therefore the sums.
        """
        raise NotImplementedError

    def text(self, means: Mapping[str, float]) -> str:
        """See `TaskLoss`."""
        shown = ((name, means[name]) for name in self.shown if name in means)
        return "  ".join(f"{name} {value:.4f}" for name, value in shown)

    def num_samples(self, sums: Sequence[float], count: float) -> int:
        """See `TaskLoss`; the first sum is the number of labels."""
        return round(sums[0])

    def begin_validation(self) -> None:
        """See `TaskLoss`."""
        self._kept = []

    def _keep(self, outputs: Tensor, labels: Tensor) -> None:
        """Keep outputs (N, K) and labels (N,) of a validation."""
        if self._kept is not None:
            # float64, since numpy has no bf16 and scores of near samples differ little
            self._kept.append((outputs.detach().double().cpu().numpy(), labels.cpu().numpy()))

    def end_validation(self, group: Group) -> Mapping[str, float]:
        """See `TaskLoss`."""
        batches, self._kept = self._kept or [], None
        arrays = tuple(np.concatenate(x) for x in zip(*batches, strict=True)) if batches else None

        def metrics(ranks: list[object]) -> object:
            parts = [cast(tuple[Array, Array], x) for x in ranks if x is not None]
            if not parts:
                return {}
            outputs, labels = (np.concatenate(x) for x in zip(*parts, strict=True))
            return self._metrics(outputs, labels)

        return cast(dict[str, float], primitives.reduce_objects(arrays, metrics, group))

    def _metrics(self, outputs: Array, labels: Array) -> dict[str, float]:
        """Return the metrics of all samples of a validation."""
        return {}


class ClassLoss(HeadLoss):
    """Cross entropy of classes, of sequences or words, as transformers computes it.

    With several classes per text it is the binary cross entropy of each class.
    """

    def __init__(
        self,
        head: ModelHead,
        device: torch.device,
        context: Group,
        *,
        class_weights: Sequence[float] = (),
        center: float = 0.0,
    ):
        if class_weights and not head.multi_label:
            # a mean does not depend on their scale, and a count below 1 would be none
            class_weights = [x / min(class_weights) for x in class_weights]
        super().__init__(head, device, context, class_weights=class_weights, center=center)
        if head.task.is_of_tokens:
            self.unit = "words"

    def _loss(self, outputs: Tensor, targets: Tensor, tells: bool) -> tuple[Tensor, Tensor]:
        counts = targets != IGNORE
        weights = None if self._weights is None else self._weights.to(outputs)
        if self._head.multi_label:
            expected = bits_of(targets, outputs.shape[-1]).to(outputs)
            losses = F.binary_cross_entropy_with_logits(
                outputs, expected, pos_weight=weights, reduction="none"
            )
            # not a product, which would carry what is not finite of padding along
            total = torch.where(counts.unsqueeze(-1), losses, 0.0).sum()
            count, right = (
                counts.sum() * outputs.shape[-1],
                ((outputs > 0) == (expected > 0)).all(-1),
            )
        else:
            total = F.cross_entropy(
                outputs.flatten(0, 1),
                targets.flatten(),
                weights,
                ignore_index=IGNORE,
                reduction="sum",
            )
            count, right = counts.sum(), outputs.argmax(-1) == targets
            if weights is not None:
                count = (weights[targets.clamp(min=0)] * counts).sum()
        if tells:
            self.add([counts.sum(), (right & counts).sum()])
            if self._kept is not None:
                kept_outputs = outputs[counts]
                if self._head.task.is_of_tokens:  # of which there are many
                    kept_outputs = kept_outputs.argmax(-1, keepdim=True)
                self._keep(kept_outputs, targets[counts])
        return total, count

    def means(self, sums: Sequence[float], count: float) -> Mapping[str, float]:
        """See `TaskLoss`."""
        return {"accuracy": sums[1] / max(sums[0], 1)}

    def _metrics(self, outputs: Array, labels: Array) -> dict[str, float]:
        if self._head.multi_label:
            expected = (labels[:, None] >> np.arange(outputs.shape[1])) & 1
            return head_metrics.of_label_sets(outputs, expected)
        if self._head.task.is_of_tokens:
            return head_metrics.of_classes(outputs[:, 0], labels, self._head.num_outputs)
        predicted = outputs.argmax(1)
        values = head_metrics.of_classes(predicted, labels, self._head.num_outputs)
        return values | head_metrics.areas(outputs, labels)


class SquaredLoss(HeadLoss):
    """Squared error of one number."""

    shown = ("mse", "mae", "pearson")

    def _loss(self, outputs: Tensor, targets: Tensor, tells: bool) -> tuple[Tensor, Tensor]:
        counts, predicted = targets != IGNORE, outputs.squeeze(-1)
        expected = targets.view(torch.float64).to(predicted)
        errors = torch.where(counts, predicted - expected, 0.0)
        if tells:
            self.add([counts.sum(), errors.abs().sum(), errors.square().sum()])
            if self._kept is not None:
                self._keep(outputs[counts], targets[counts])
        return errors.square().sum(), counts.sum()

    def means(self, sums: Sequence[float], count: float) -> Mapping[str, float]:
        """See `TaskLoss`."""
        number = max(sums[0], 1)
        return {"mae": sums[1] / number, "mse": sums[2] / number}

    def _metrics(self, outputs: Array, labels: Array) -> dict[str, float]:
        return head_metrics.correlations(outputs[:, 0], labels.view(np.float64))


class RewardLoss(HeadLoss):
    """The loss of a pair of answers with one reward each: `-log sigmoid(chosen - rejected -
    margin)`. ¶ trl's penalty on the pair's sum of rewards is added.

    Row 2 i is chosen, row 2 i + 1 rejected. Ranks that share sequences add up the rewards, which
    one of them has each, and all have the same loss then, which the first of them reports.
    """

    unit = "pairs"
    shown = ("accuracy", "margin")

    def _loss(self, outputs: Tensor, targets: Tensor, tells: bool) -> tuple[Tensor, Tensor]:
        is_scored = targets != IGNORE
        rewards = torch.where(is_scored, outputs.squeeze(-1), 0.0).sum(1)
        margins = torch.where(is_scored, targets, 0).sum(1).view(torch.float64).to(rewards)
        numbers = torch.stack([rewards, margins, is_scored.sum(1).to(rewards)])
        rewards, margins, number = summed_over(self._context, numbers).unbind()
        counts = number[::2] > 0
        chosen, rejected = rewards[::2], rewards[1::2]
        losses = -F.logsigmoid(chosen - rejected - margins[::2])
        losses = losses + self._center * (chosen + rejected).square()
        total, count = torch.where(counts, losses, 0.0).sum(), counts.sum()
        if tells and self._context.rank() == 0:
            values = (chosen > rejected, chosen - rejected, chosen + rejected)
            self.add([count, *((x * counts).sum() for x in values)])
        return told_once(self._context, total, count)

    def means(self, sums: Sequence[float], count: float) -> Mapping[str, float]:
        """See `TaskLoss`; the names are those of trl's RewardTrainer."""
        number = max(sums[0], 1)
        return {
            "accuracy": sums[1] / number,
            "margin": sums[2] / number,
            "mean_reward": sums[3] / (2 * number),
        }


def _only(targets: Tensor) -> Tensor:
    """Return the target (B, 1) of each row of targets (B, S), at whichever position it is."""
    return targets.gather(1, (targets != IGNORE).int().argmax(1, keepdim=True))


def bits_of(targets: Tensor, number: int) -> Tensor:
    """Return 0 or 1 (..., number) for labels (...) int64 with one bit for each class."""
    return (targets.unsqueeze(-1) >> torch.arange(number, device=targets.device)) & 1

"""Contrastive training of text embeddings with in-batch negatives. ¶ The loss is that of
sentence-transformers' MultipleNegativesRankingLoss, also for leading dimensions (MatryoshkaLoss).

Every anchor is compared with the positives and the negatives of all samples of a pass, those of all
data ranks and microbatches, so the loss does not depend on the layout. With one microbatch the
gradient goes through the gather over data ranks. With several the model first goes forward on all
of them, the gradient of the loss with respect to each embedding is kept, and the pass over the
microbatches begins from these (GradCache, Gao et al., arXiv:2101.06983).

Ranks that share a sequence each add up the hidden states of their tokens, and one all-reduce a
microbatch makes the embeddings whole. Each then has the whole loss, whose gradient with respect to
its own summand is right as it is, and one of them reports it.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.autograd import AllGather, apply
from torchdistpackage.comm.primitives import MAX, Group
from torchdistpackage.config.embedding_section import EmbeddingSection
from torchdistpackage.data.embedding_data import RowTokens
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.losses import totals_on
from torchdistpackage.tools.undisturbed import in_eval
from torchdistpackage.train.retrieval_metrics import retrieval_metrics
from torchdistpackage.train.staged_model import Microbatches, MicrobatchLoss, StagedModel
from torchdistpackage.train.task import Run, TaskLoss, summed_over, told_once

_NONE = -1
"""Class of an anchor without a text."""
_Arrays = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]


class Embedded(NamedTuple):
    """Embeddings (N, D) of rows, and the number (N,) of each one's text, negative for none."""

    vectors: Tensor
    texts: Tensor


class EmbeddingLoss(TaskLoss):
    """The loss of a run that compares texts.

    rows_per_sample: anchor, positive and hard negatives. data: ranks whose samples are compared
    with each other. context: the ranks that share each sequence.
    """

    unit = "samples"

    def __init__(
        self,
        device: torch.device,
        options: EmbeddingSection,
        rows_per_sample: int,
        data: Group,
        context: Group,
    ):
        super().__init__(device)
        self._options, self._rows = options, rows_per_sample
        self._data, self._context = data, context
        self._kept: list[_Arrays] | None = None

    def means(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """Return the fraction of anchors whose nearest text is their own positive."""
        return {"accuracy": sums[0] / max(count, 1)}

    def text(self, means: Mapping[str, float]) -> str:
        shown = [f"accuracy {means['accuracy']:.0%}"]
        shown += [f"{name} {means[name]:.4f}" for name in ("ndcg@10",) if name in means]
        return "  ".join(shown)

    def begin_validation(self) -> None:
        self._kept = []

    def end_validation(self, group: Group) -> Mapping[str, float]:
        """Return how well anchors find their positives among all texts of the validation."""
        batches, self._kept = self._kept or [], None

        def metrics(ranks: list[object]) -> object:
            parts = [x for of_rank in cast(list[list[_Arrays]], ranks) for x in of_rank]
            vectors, texts = (np.concatenate(x) for x in zip(*parts, strict=True))
            return retrieval_metrics(vectors, texts, self._rows)

        return cast(dict[str, float], primitives.reduce_objects(batches, metrics, group))

    def loss_of_batch(
        self, model: StagedModel, executor: Executor, run: Run, batch: Microbatches
    ) -> MicrobatchLoss:
        """See `TaskLoss`."""
        number = executor.schedule.num_microbatches
        embedded: dict[int, Embedded] = {}
        if number == 1 or not model.stage.training:
            return partial(self._loss_when_complete, model, embedded, number)

        def keep(outputs: Tensor, targets: Tensor, m: int) -> tuple[Tensor, Tensor]:
            vectors, texts = self._embedded(outputs, targets)
            embedded[m] = Embedded(vectors.detach(), texts)
            return vectors.sum(), vectors.new_zeros(())

        with in_eval(model.stage):
            unused = totals_on(model.device)
            forward = model.forward_and_loss(
                executor, batch.inputs, batch.targets, unused, batch.position_ids, loss=keep
            )
            run(forward)
        if not model.has_last:
            return partial(self._loss_of_gradient, {}, self._zeros(model))
        everything = _joined(embedded, number)
        vectors = everything.vectors.requires_grad_()
        with torch.enable_grad():
            total, count = self._ranking_loss(model, Embedded(vectors, everything.texts))
        (gradient,) = torch.autograd.grad(total, vectors)
        lengths = [len(embedded[m].texts) for m in range(number)]
        gradients = dict(enumerate(gradient.split(lengths)))
        return partial(self._loss_of_gradient, gradients, (total.detach(), count))

    @staticmethod
    def _zeros(model: StagedModel) -> tuple[Tensor, Tensor]:
        zero = torch.zeros((), device=model.device)
        return zero, zero

    def _loss_when_complete(
        self,
        model: StagedModel,
        embedded: dict[int, Embedded],
        number: int,
        outputs: Tensor,
        targets: Tensor,
        m: int,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of all micro-batches with the last one of them, and zeros before."""
        embedded[m] = self._embedded(outputs, targets)
        if len(embedded) < number:
            vectors = embedded[m].vectors
            return vectors.sum() * 0, vectors.new_zeros(())
        return self._ranking_loss(model, _joined(embedded, number))

    def _loss_of_gradient(
        self,
        gradients: Mapping[int, Tensor],
        totals: tuple[Tensor, Tensor],
        outputs: Tensor,
        targets: Tensor,
        m: int,
    ) -> tuple[Tensor, Tensor]:
        """Return a number with the gradient of the loss; the loss itself comes with the first
        micro-batch.
        """
        vectors, _ = self._embedded(outputs, targets)
        loss = (vectors * gradients[m]).sum()
        total, count = totals if m == 0 else (torch.zeros_like(totals[0]), totals[1] * 0)
        return loss - loss.detach() + total, count

    def _embedded(self, outputs: Tensor, targets: Tensor) -> Embedded:
        """Return the embeddings of rows, on all ranks that share them.

        outputs: hidden states (N, S, D); targets: (N, S), from `EmbeddingDataset`.
        """
        rows = RowTokens.of_targets(targets)
        by_pooling = {"mean": rows.tokens, "last": rows.last, "cls": rows.first}
        # a mean over many tokens is added up in float32, or bf16 rounds the later ones away
        hidden = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        weights = by_pooling[self._options.pooling].to(hidden)
        sums = torch.einsum("ns,nsd->nd", weights, hidden)
        both = summed_over(self._context, torch.cat([sums, weights.sum(1, keepdim=True)], 1))
        sums, number = both[:, :-1], both[:, -1:].detach()
        texts = primitives.all_reduce(rows.texts.clone(), self._context, MAX)
        return Embedded(sums / number.clamp(min=1), texts)

    def _ranking_loss(self, model: StagedModel, embedded: Embedded) -> tuple[Tensor, Tensor]:
        """Return (sum of the anchors' losses, number of anchors).

        The loss of an anchor is the cross entropy of its similarities, with its positive as the
        class.
        """
        rows, options = self._rows, self._options
        vectors = embedded.vectors.unflatten(0, (-1, rows))
        texts = embedded.texts.unflatten(0, (-1, rows))
        candidates = apply(AllGather(self._data, 0, None), vectors[:, 1:].flatten(0, 1))
        of_candidates = primitives.all_gather(texts[:, 1:].flatten(), self._data)
        counts = texts[:, 0] >= 0  # rows beyond the data's last sample are none
        first = self._data.rank() * len(vectors)
        positives = (first + torch.arange(len(vectors), device=texts.device)) * (rows - 1)
        # the same text as an anchor's positive is not a negative of it
        is_compared = (of_candidates >= 0) & (of_candidates != texts[:, 1:2])
        is_compared.scatter_(1, positives.unsqueeze(1), True)
        classes = torch.where(counts, positives, _NONE)
        dims = options.matryoshka_dims or (vectors.shape[-1],)
        weights = options.matryoshka_weights or (1.0,) * len(dims)
        loss = vectors.new_zeros(())
        correct = loss
        for number, (dim, weight) in enumerate(zip(dims, weights, strict=True)):
            anchors = F.normalize(vectors[:, 0, :dim], dim=-1)
            scores = options.scale * anchors @ F.normalize(candidates[:, :dim], dim=-1).t()
            scores = scores.masked_fill(~is_compared, -torch.inf)
            losses = F.cross_entropy(scores, classes, ignore_index=_NONE, reduction="sum")
            loss = loss + weight * losses
            if number == 0:
                correct = ((scores.argmax(1) == positives) & counts).sum()
        if model.tells_loss and self._context.rank() == 0:
            self.add([correct])
            if self._kept is not None and not model.stage.training:
                # float64, since numpy has no bf16 and cosines of near texts differ little
                arrays = (
                    embedded.vectors.detach().double().cpu().numpy(),
                    embedded.texts.cpu().numpy(),
                )
                self._kept.append(arrays)
        return told_once(self._context, loss, counts.sum())


def _joined(embedded: Mapping[int, Embedded], number: int) -> Embedded:
    parts = [embedded[m] for m in range(number)]
    return Embedded(torch.cat([x.vectors for x in parts]), torch.cat([x.texts for x in parts]))

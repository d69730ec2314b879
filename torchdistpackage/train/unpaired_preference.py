"""Training on answers that were each labelled good or bad: KTO (Ethayarajh et al.,
arXiv:2402.01306).

An answer is worth what the model has moved towards it, over the reference, beyond how far it has
moved from the reference at all. This is estimated from mismatched answers, whose rows are beside
those of the answers (data/unpaired_data.py): before each pass over the microbatches the reference
goes forward on both, the model on the mismatched ones, and the ranks of all replicas sum what they
found, so that every layout has one estimate. The model is trained on the answers alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.data.unpaired_data import without_label
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.losses import totals_on
from torchdistpackage.tools.undisturbed import in_eval
from torchdistpackage.train.preference import PreferenceLoss
from torchdistpackage.train.preference_losses import kto
from torchdistpackage.train.staged_model import Microbatches, MicrobatchLoss, StagedModel
from torchdistpackage.train.task import Run, told_once


@dataclass
class _Pass:
    """Facts about the micro-batches of one pass, by number, computed before the model is trained.

    reference: log-probabilities (N,) of the answers. is_desirable: (N,). kl: the estimate, a scalar
    of at least 0.
    """

    reference: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    is_desirable: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    kl: Tensor = field(default_factory=lambda: torch.zeros(()))


class UnpairedLoss(PreferenceLoss):
    """The loss of a run on labelled answers; its arguments are those of `PreferenceLoss`."""

    unit: ClassVar[str] = "samples"

    def means(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """Return means over the desirable (chosen) and the other answers, under trl's names."""
        num_chosen, kl = sums[4:6]
        num_rejected = count - num_chosen
        values = {"kl": kl / max(count, 1)}
        for side, number in enumerate((num_chosen, num_rejected)):
            name = ("chosen", "rejected")[side]
            if number > 0:
                values[f"rewards/{name}"] = sums[side] / number
                values[f"logps/{name}"] = sums[2 + side] / number
        if num_chosen > 0 and num_rejected > 0:
            values["rewards/margins"] = values["rewards/chosen"] - values["rewards/rejected"]
        return values

    def text(self, means: Mapping[str, float]) -> str:
        """See `TaskLoss`."""
        margin = means.get("rewards/margins")
        return f"kl {means['kl']:.4f}" + ("" if margin is None else f"  margin {margin:.4f}")

    def trained(self, batch: Microbatches) -> Microbatches:
        """Return the answers, without the mismatched rows, and with plain targets."""
        return Microbatches(
            [x[::2] for x in batch.inputs],
            [without_label(x[::2])[0] for x in batch.targets],
            batch.position_ids,
        )

    def loss_of(
        self,
        model: StagedModel,
        executor: Executor,
        run: Run,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
    ) -> MicrobatchLoss:
        """Return the loss of these micro-batches of rows, relative to the reference and the
        mismatched answers.
        """
        facts = _Pass()
        labelled = [without_label(x) for x in targets]
        facts.is_desirable = {m: desirable[::2] for m, (_, desirable) in enumerate(labelled)}
        sides = [
            ([x[side::2] for x in inputs], [plain[side::2] for plain, _ in labelled])
            for side in (0, 1)
        ]

        def log_probs_of(of: StagedModel, side: int) -> dict[int, tuple[Tensor, Tensor]]:
            log_probs: dict[int, tuple[Tensor, Tensor]] = {}

            def keep(outputs: Tensor, targets: Tensor, m: int) -> tuple[Tensor, Tensor]:
                log_probs[m] = self._log_probs(model.loss, outputs, targets)
                return log_probs[m][0].sum(), log_probs[m][0].new_zeros(())

            unused = totals_on(model.device)
            run(of.forward_and_loss(executor, *sides[side], unused, loss=keep))
            return log_probs

        with self._frozen(model) as frozen:
            facts.reference = {m: x for m, (x, _) in log_probs_of(frozen, 0).items()}
            reference = log_probs_of(frozen, 1)
        with in_eval(model.stage):
            now = log_probs_of(model, 1)
        if model.has_last:
            moved = [
                torch.stack([((now[m][0] - x) * (n > 0)).sum(), (n > 0).sum().to(x)])
                for m, (x, n) in reference.items()
            ]
            total = primitives.all_reduce(
                # float64, so that the sum does not depend on how the batch is shared
                torch.stack(moved).sum(0).to(torch.float64),
                tpc.get_group("data"),
            )
            facts.kl = (total[0] / total[1].clamp(min=1)).clamp(min=0)
        return partial(self._loss_beside, model, facts)

    def _loss_beside(
        self, model: StagedModel, facts: _Pass, outputs: Tensor, targets: Tensor, m: int
    ) -> tuple[Tensor, Tensor]:
        """Return (sum of the answers' losses, number of answers); an answer without a counted token
        does not count.
        """
        log_probs, num_tokens = self._log_probs(model.loss, outputs, targets)
        counts, is_desirable = num_tokens > 0, facts.is_desirable[m]
        ratios = log_probs - facts.reference[m]
        kl = facts.kl.to(ratios)
        loss = (kto(ratios, is_desirable, kl, self._options) * counts).sum()
        if model.tells_loss and self._context.rank() == 0:
            chosen, rejected = is_desirable & counts, ~is_desirable & counts
            rewards = self._options.beta * ratios
            masked = [(x * side).sum() for x in (rewards, log_probs) for side in (chosen, rejected)]
            self.add([*masked, chosen.sum(), kl * counts.sum()])
        return told_once(self._context, loss, counts.sum())

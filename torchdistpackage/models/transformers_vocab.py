"""The vocabulary of transformers' models over the tensor ranks of a run.

The plan of a family joins the logits, for whoever calls the model. A stage needs them for the loss,
which is computed of a rank's own columns: no rank ever holds all.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.models.transformers_layout import TransformersShape
from torchdistpackage.parallel.auto.rules import Config
from torchdistpackage.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy


def split_logits(plan: Config, shape: TransformersShape) -> Config:
    """`plan` without the gather behind a head that is cut by rows."""
    if shape.sizes.tied:
        return plan
    output = shape.kind.output
    kept = {key: what for key, what in plan.output_rules.items() if not key.search(output)}
    return replace(plan, output_rules=kept)


@dataclass(frozen=True, slots=True)
class SplitLogits:
    """Logits (..., my columns of vocab), which the first ranks of the group have one more of."""

    group: Group
    vocab: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return even_sizes(self.vocab, self.group.size())

    def joined(self, logits: Tensor) -> Tensor:
        """All (..., vocab), with which every rank goes on alike."""
        return collectives.gather(logits, -1, self.group, self.sizes)

    def loss_sum(self, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        return vocab_parallel_cross_entropy(
            logits,
            targets,
            self.group,
            vocab=self.vocab,
            sizes=self.sizes,
            ignore_index=ignore_index,
            reduction="sum",
        )

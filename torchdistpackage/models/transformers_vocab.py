"""The logits of transformers' models over the tensor ranks of a run.

A stage needs them for the loss alone, which is computed of each rank's own columns, so no rank ever
holds all.
"""

from dataclasses import dataclass

from torch import Tensor

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy


@dataclass(frozen=True, slots=True)
class SplitVocab:
    """The tokens of a vocabulary in runs, one for each rank; the first ranks have one more."""

    group: Group
    vocab: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return even_sizes(self.vocab, self.group.size())

    def join(self, logits: Tensor) -> Tensor:
        """Logits (..., V), equal over the group, from this rank's columns."""
        return collectives.gather(logits, -1, self.group, self.sizes)

    def loss_sum(self, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        """Of all tokens, from this rank's columns of logits (..., V/n)."""
        return vocab_parallel_cross_entropy(
            logits,
            targets,
            self.group,
            vocab=self.vocab,
            sizes=self.sizes,
            ignore_index=ignore_index,
            reduction="sum",
        )

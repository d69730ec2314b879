"""The vocabulary of transformers' models over the tensor ranks of a run.

The plan of a family joins the logits, for whoever calls the model. A stage needs them for the loss
alone, which is computed of each rank's own columns, so no rank ever holds all. The head is cut by
rows of its matrix, and so is the embedding where the two are one.
"""

import re
from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.models.transformers_layout import TransformersShape
from torchdistpackage.parallel.auto.actions import Split
from torchdistpackage.parallel.auto.rules import Actions, Config
from torchdistpackage.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from torchdistpackage.parallel.tensor.embedding import vocab_embedding


def split_by_vocab(plan: Config, shape: TransformersShape, num: int) -> Config:
    """The `plan` of a family, but the head gives each of `num` ranks its own columns of logits.

    A tied embedding is left to `look_up_by_rows`.
    """
    table, saved = shape.kind.table, [x.rpartition(".")[0] for x in shape.kind.saved_names]
    outputs = (shape.kind.output, *saved)
    cut = (*outputs, table) if shape.sizes.tied else outputs

    def others(rules: dict[re.Pattern[str], Actions]) -> dict[re.Pattern[str], Actions]:
        return {key: rules[key] for key in rules if not any(map(key.search, cut))}

    rows = {re.compile(rf"^{re.escape(name)}\.weight$"): Split(num, 0) for name in cut}
    enter: dict[re.Pattern[str], Actions] = {
        re.compile(rf"^{re.escape(name)}$"): {0: "copy"} for name in outputs
    }
    return replace(
        plan,
        state_rules=rows | plan.state_rules,
        input_rules=others(plan.input_rules) | enter,
        output_rules=others(plan.output_rules),
    )


@dataclass(frozen=True, slots=True)
class SplitVocab:
    """The tokens of a vocabulary in runs, one for each rank; the first ranks have one more."""

    group: Group
    vocab: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return even_sizes(self.vocab, self.group.size())

    def look_up(self, ids: Tensor, rows: Tensor, padding: int | None) -> Tensor:
        """Vectors (..., D) of ids (...), equal over the group, from this rank's rows."""
        options = {"vocab": self.vocab, "sizes": self.sizes, "padding_idx": padding}
        return collectives.reduce(vocab_embedding(ids, rows, self.group, **options), self.group)

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


class RowEmbedding(nn.Embedding):
    """The rows of an embedding that this rank holds; looks up as the whole one does."""

    _vocab: SplitVocab

    def forward(self, ids: Tensor) -> Tensor:
        return self._vocab.look_up(ids, self.weight, self.padding_idx)


@cache
def _of_rows(kind: type[nn.Module]) -> type[nn.Module]:
    """A kind of embedding whose look-up, to which it may add, is that of `RowEmbedding`."""
    if kind is nn.Embedding:
        return RowEmbedding
    return type(kind.__name__, (kind, RowEmbedding), {"__module__": kind.__module__})


def look_up_by_rows(decoder: nn.Module, shape: TransformersShape, vocab: SplitVocab) -> None:
    """Let the embedding of a shard, if this stage has it, be one of rows where it is tied."""
    embedding = decoder.get_submodule(shape.kind.table)
    if shape.sizes.tied and isinstance(embedding, nn.Embedding):
        embedding.__class__ = _of_rows(type(embedding))
        embedding._vocab = vocab  # type: ignore[assignment]

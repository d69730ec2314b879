"""Split embeddings of other libraries' models, keeping their additions to `nn.Embedding`.

transformers' embeddings derive from `nn.Embedding`: OPT's positions begin at 2, Gemma's rows are
scaled. So the split look-up is inserted between such a class and `nn.Embedding`, in a class derived
from both.
"""

from functools import cache

from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.parallel.tensor.embedding import feature_embedding, vocab_embedding
from torchdistpackage.parallel.tensor.weight_reads import own, read_whole


@read_whole("weight", by_any=True)
class _SplitLookup(nn.Embedding):
    """An embedding of which this rank has a slice; its result is complete and equal on all ranks.

    size: rows, or columns, of the whole table.
    """

    tdp_group: Group
    tdp_size: int

    @property
    def _sizes(self) -> tuple[int, ...]:
        return even_sizes(self.tdp_size, self.tdp_group.size())


class RowLookup(_SplitLookup):
    """A look-up in a table with split rows."""

    def forward(self, ids: Tensor) -> Tensor:
        options = {"vocab": self.tdp_size, "sizes": self._sizes, "padding_idx": self.padding_idx}
        rows = vocab_embedding(ids, own(self, "weight"), self.tdp_group, **options)
        return collectives.reduce(rows, self.tdp_group)


class ColumnLookup(_SplitLookup):
    """A look-up in a table with split columns."""

    def forward(self, ids: Tensor) -> Tensor:
        columns = feature_embedding(
            ids, own(self, "weight"), self.tdp_group, padding_idx=self.padding_idx
        )
        return collectives.gather(columns, -1, self.tdp_group, self._sizes)


@cache
def _kind_of(base: type[nn.Embedding], split: type[_SplitLookup]) -> type[_SplitLookup]:
    if base is nn.Embedding:
        return split
    return type(base.__name__, (base, split), {"__module__": base.__module__})


def split_lookup(embedding: nn.Embedding, by_rows: bool, size: int, group: Group) -> nn.Embedding:
    """Return a copy of `embedding` that looks up in a slice of the table; its weight is still the
    full one.

    size: rows of the table, or, where it is split by columns, columns.
    """
    kind = _kind_of(type(embedding), RowLookup if by_rows else ColumnLookup)
    split = kind.__new__(kind)
    split.__dict__.update(embedding.__dict__)
    split._parameters = dict(embedding._parameters)
    split.tdp_group, split.tdp_size = group, size
    return split

"""Token embedding with the vocabulary cut over the tensor group.

One rule: each id is foreign to all ranks but one; the others add zero, so the sum over the
group is the row, exactly. The vocabulary need not divide: the first ranks hold more, the
last ones may hold nothing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import DataError
from torchdistpackage.layout.derive import chunk
from torchdistpackage.parallel.tensor import layouts as cut
from torchdistpackage.parallel.tensor.grouped import Grouped
from torchdistpackage.parallel.tensor.init import NORMAL, Initial, make_parameters
from torchdistpackage.parallel.tensor.layouts import Layouts


class VocabParallelEmbedding(Grouped):
    """Rows of a table (vocab, dim) by id: ids (S, ...) int64, equal on all ranks, to (S, ..., dim).

    Under sequence parallelism the result is (S/n, ..., dim).
    """

    def __init__(
        self,
        vocab: int,
        dim: int,
        *,
        sequence_parallel: bool = False,
        initial: Initial = NORMAL,
        group: Group | None = None,
        axis: str = "tensor",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(group, axis)
        self.vocab, self.dim = vocab, dim
        self.sequence_parallel, self.initial = sequence_parallel, initial
        self.start = chunk(vocab, self.group.size(), self.group.rank())[0]
        make_parameters(self, dtype, device)

    def layouts(self) -> Layouts:
        return cut.vocab_embedding(self.vocab, self.dim, self.axis)

    def initials(self) -> dict[str, Initial]:
        return {"weight": self.initial}

    def extra_repr(self) -> str:
        return f"{self.vocab}, {self.dim}, over {self.group.size()} {self.axis} ranks"

    def forward(self, ids: Tensor) -> Tensor:
        """Look the ids up.

        Raises:
            DataError: an id is outside 0..vocab-1. Seen on the CPU only: a GPU would have to
                stop for the answer, and gives a zero vector (one rank: its own assertion).
            LayoutError: under sequence parallelism, S is not a multiple of the group's size.
        """
        check_ids(ids, self.vocab, "ids")
        partial = self._mine(ids)
        if self.sequence_parallel:
            return collectives.reduce_scatter(partial, 0, self.group)
        return collectives.reduce(partial, self.group)

    def _mine(self, ids: Tensor) -> Tensor:
        num_rows = self.weight.shape[0]
        if num_rows == self.vocab:
            return F.embedding(ids, self.weight)
        if num_rows == 0:
            # the sum of nothing keeps the graph, so that all ranks join in the same backward
            return self.weight.new_zeros((*ids.shape, self.dim)) + self.weight.sum()
        local = ids - self.start
        foreign = (local < 0) | (local >= num_rows)
        rows = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return rows.masked_fill(foreign.unsqueeze(-1), 0)


def check_ids(ids: Tensor, vocab: int, what: str) -> None:
    """Refuse ids outside 0..vocab-1 where looking costs nothing: on the CPU.

    Raises:
        DataError: names the smallest and the largest id.
    """
    if ids.device.type != "cpu" or not ids.numel():
        return
    low, high = (int(edge) for edge in torch.aminmax(ids))
    if low < 0 or high >= vocab:
        raise DataError(
            f"{what} of shape {tuple(ids.shape)} hold values from {low} to {high}, but the "
            f"vocabulary is 0 to {vocab - 1}; use the tokenizer of this model, or a larger vocab"
        )

"""Token embeddings with the vocabulary, or the features, split over the tensor group.

With a split vocabulary each id belongs to one rank; all others add zero, so the sum over the group
is exactly the row. The vocabulary need not divide: the first ranks hold one row more. With split
features each rank looks up its slice of every row.
"""

from dataclasses import replace
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.comm import collectives
from torchdistpackage.comm.operators import is_traced
from torchdistpackage.comm.primitives import MAX, Group, Sizes, all_reduce, sizes_of_ranks
from torchdistpackage.errors import DataError, LayoutError
from torchdistpackage.layout.derive import even_share
from torchdistpackage.layout.partition import even_sizes, feature_problems, refuse
from torchdistpackage.parallel.tensor import layouts as cut
from torchdistpackage.parallel.tensor.init import NORMAL, Initial, make_parameters
from torchdistpackage.parallel.tensor.layouts import Layouts
from torchdistpackage.parallel.tensor.marked import Grouped
from torchdistpackage.parallel.tensor.weight_reads import own, plain, read_whole


class LookupOptions(TypedDict, total=False):
    """Options of `torch.nn.Embedding`, with its defaults.

    padding_idx: an id whose row gets no gradient; a layer's starts as zeros.
    max_norm: rows that are looked up are first shrunk to this norm, in place.
    norm_type: of max_norm; inf: the largest element.
    scale_grad_by_freq: divide a row's gradient by how often the ids name it.
    sparse: a sparse gradient; on ranks that hold no row, a dense one without elements.
    """

    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool


@read_whole("weight")
class _Embedding(Grouped):
    """The base of both splits: sizes, options, and a table made from its layout."""

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
        **options: Unpack[LookupOptions],
    ):
        super().__init__(group, axis)
        self.vocab, self.dim, self.sequence_parallel = vocab, dim, sequence_parallel
        self.options = _checked(options, vocab, type(self).__name__)
        padding = self.options.get("padding_idx")
        self.initial = initial if padding is None else replace(initial, zero_row=padding)
        refuse(type(self).__name__, self.problems())
        make_parameters(self, dtype, device)

    def problems(self) -> list[str]:
        """Return why the group cannot share the table of this layer."""
        return []

    def initials(self) -> dict[str, Initial]:
        return {"weight": self.initial}

    def extra_repr(self) -> str:
        return f"{self.vocab}, {self.dim}, over {self.group.size()} {self.axis} ranks"


class VocabParallelEmbedding(_Embedding):
    """Rows of a table (vocab, dim) by id: ids (S, ...) int64, equal on all ranks, to (S, ..., dim).

    Under sequence parallelism the result is (S/n, ..., dim). Takes `LookupOptions`.
    """

    def layouts(self) -> Layouts:
        return cut.vocab_embedding(self.vocab, self.dim, self.axis)

    def forward(self, ids: Tensor, sizes: Sizes | None = None) -> Tensor:
        """Look the ids up.

        sizes: under sequence parallelism the length of each rank's result, where they differ.

        Raises:
            DataError: an id is outside 0..vocab-1. Seen on the CPU only: a GPU would have to
                stop for the answer, and gives a zero vector (one rank: its own assertion).
            LayoutError: under sequence parallelism without `sizes`, S is not a multiple of the
                group's size.
        """
        partial = vocab_embedding(
            ids, own(self, "weight"), self.group, vocab=self.vocab, **self.options
        )
        if self.sequence_parallel:
            return collectives.reduce_scatter(partial, 0, self.group, sizes)
        return collectives.reduce(partial, self.group)


class FeatureParallelEmbedding(_Embedding):
    """The same look-up with the table split along dim: each rank holds a slice of every row.

    gather_output: False leaves the result cut along its last dim, (S, ..., dim/n), for a RowLinear.
    Under sequence parallelism the result is (S/n, ..., dim). Takes `LookupOptions`.

    Raises:
        LayoutError: a rank would have no part of dim, or the result is to stay cut along two dims.
    """

    def __init__(self, vocab: int, dim: int, *, gather_output: bool = True, **options: Any):
        self.gather_output = gather_output
        super().__init__(vocab, dim, **options)

    def problems(self) -> list[str]:
        reasons = feature_problems("dim", self.dim, self.group.size())
        if self.sequence_parallel and not self.gather_output:
            reasons.append("sequence_parallel joins the features; leave gather_output=False out")
        return reasons

    def layouts(self) -> Layouts:
        return cut.feature_embedding(self.vocab, self.dim, self.axis)

    def forward(self, ids: Tensor, sizes: Sizes | None = None) -> Tensor:
        """Look the ids up; `sizes` and errors as in `VocabParallelEmbedding`."""
        check_ids(ids, self.vocab, "ids")
        columns = feature_embedding(ids, own(self, "weight"), self.group, **self.options)
        size, last = self.group.size(), ids.dim()
        widths = None
        if self.dim % size:
            widths = even_sizes(self.dim, size)
        if self.sequence_parallel:
            # what each rank gets are all features of its rows
            return collectives.all_to_all(columns, 0, last, self.group, sizes, widths)
        if not self.gather_output:
            return columns
        return collectives.gather(columns, last, self.group, widths)


def vocab_embedding(
    ids: Tensor,
    weight: Tensor,
    group: Group,
    *,
    vocab: int,
    sizes: Sizes | None = None,
    **options: Unpack[LookupOptions],
) -> Tensor:
    """Look up ids in this rank's rows of the table (its slice of vocab, D); ids of other ranks give
    zeros: (..., D).

    The sum over the group is `F.embedding` of the whole table, with its options. On a GPU those
    that look at which rows were met (max_norm, scale_grad_by_freq, sparse) stop for the host.
    sizes: number of each rank's rows; None: `even_sizes`.

    Raises:
        LayoutError: `weight` is not this rank's share of the vocabulary.
        DataError: an id is outside 0..vocab-1. Seen on the CPU only.
    """
    check_ids(ids, vocab, "ids")
    weight = plain(weight)
    start, num_rows = vocab_range(vocab, group, sizes)
    if weight.shape[0] != num_rows:
        raise LayoutError(
            f"an embedding table of {weight.shape[0]} rows, but index {group.rank()} of "
            f"{group.size()} ranks holds {num_rows} of a vocabulary of {vocab}; pass this rank's "
            "rows alone, or sizes"
        )
    if num_rows == vocab:
        return F.embedding(ids, weight, **options)
    if num_rows == 0:
        # the sum of nothing keeps the graph, so that all ranks join in the same backward
        return weight.new_zeros((*ids.shape, weight.shape[1])) + weight.sum()
    local = ids - start
    foreign = (local < 0) | (local >= num_rows)
    if (padding := options.get("padding_idx")) is not None:
        padding = padding % vocab - start
        options["padding_idx"] = padding if 0 <= padding < num_rows else None
    looks = ("max_norm", "scale_grad_by_freq", "sparse")
    if not any(options.get(name) not in (None, False) for name in looks):
        rows = F.embedding(local.masked_fill(foreign, 0), weight, options.get("padding_idx"))
        return rows.masked_fill(foreign.unsqueeze(-1), 0)
    is_local = ~foreign.flatten()
    met = F.embedding(local.flatten()[is_local], weight, **options)
    rows = met.new_zeros((ids.numel(), weight.shape[1])).index_put((is_local,), met)
    return rows.view(*ids.shape, weight.shape[1])


def feature_embedding(
    ids: Tensor, weight: Tensor, group: Group, **options: Unpack[LookupOptions]
) -> Tensor:
    """Look up ids in this rank's columns of the table (V, its slice of D): (..., its slice of D).

    The joined slices equal `F.embedding` of the full table, with its options; max_norm is the norm
    of the full row, for which the group sums once.
    """
    max_norm, weight = options.pop("max_norm", None), plain(weight)
    if max_norm is not None:
        renormalise(weight, ids, max_norm, options.get("norm_type", 2.0), group)
    return F.embedding(ids, weight, **options)


@torch.no_grad()
def renormalise(
    weight: Tensor, ids: Tensor, max_norm: float, norm_type: float, group: Group
) -> None:
    """Shrink the rows of `ids`, whose columns the group shares, to a norm of at most `max_norm`."""
    met = ids.unique()
    parts = weight[met].abs()
    if norm_type == torch.inf:
        norms = parts.amax(1) if parts.shape[1] else parts.new_zeros(len(met))
        all_reduce(norms, group, MAX)
    else:
        norms = parts.pow(norm_type).sum(1)
        all_reduce(norms, group)
        norms = norms.pow(1 / norm_type)
    scale = torch.where(norms > max_norm, max_norm / (norms + 1e-7), 1.0)
    weight[met] *= scale.unsqueeze(1)


def vocab_range(vocab: int, group: Group, sizes: Sizes | None = None) -> tuple[int, int]:
    """Return (first, number) of the classes that this rank holds.

    sizes: number of each rank's, in group order; None: `even_sizes`.

    Raises:
        LayoutError: `sizes` are not one number for each rank, or do not add up to `vocab`.
    """
    if sizes is None:
        return even_share(vocab, group.size(), group.rank())
    rank_sizes, rank = sizes_of_ranks(sizes, group, "sizes"), group.rank()
    if sum(rank_sizes) != vocab:
        raise LayoutError(
            f"sizes={rank_sizes} add up to {sum(rank_sizes)}, but the vocabulary has {vocab} "
            f"classes; pass the number of each rank's"
        )
    return sum(rank_sizes[:rank]), rank_sizes[rank]


def check_ids(ids: Tensor, vocab: int, noun: str) -> None:
    """Refuse ids outside 0..vocab-1 if checking is free: on the CPU. A graph checks when it runs,
    and raises RuntimeError.

    Raises:
        DataError: names the smallest and the largest id.
    """
    if ids.device.type != "cpu" or not ids.numel():
        return
    if is_traced():
        fits = ((ids >= 0) & (ids < vocab)).all()
        torch._assert_async(fits, f"{noun} hold values outside 0 to {vocab - 1}")
        return
    low, high = (int(edge) for edge in torch.aminmax(ids))
    if low < 0 or high >= vocab:
        raise DataError(
            f"{noun} of shape {tuple(ids.shape)} hold values from {low} to {high}, but the "
            f"vocabulary is 0 to {vocab - 1}; use the tokenizer of this model, or a larger vocab"
        )


def _checked(options: LookupOptions, vocab: int, where: str) -> LookupOptions:
    """Return the options, with `padding_idx` counted from the first row.

    Raises:
        LayoutError: padding_idx is not in the vocabulary.
    """
    padding = options.get("padding_idx")
    if padding is None:
        return options
    if not -vocab <= padding < vocab:
        raise LayoutError(
            f"{where}: padding_idx {padding} is not in a vocabulary of {vocab}; "
            f"use {-vocab} to {vocab - 1}"
        )
    return {**options, "padding_idx": padding % vocab}

"""torchshard.nn.functional: linear, embedding and cross entropy over this rank's group.

dim 1 or -1 splits the outputs (of an embedding: the features), 0 the inputs (the vocabulary), None
nothing. The mark of an input says whether it is a slice. Slices may differ in length.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.comm import collectives
from torchdistpackage.compat.torchshard.chunks import chunk
from torchdistpackage.compat.torchshard.cuts import Cut, check_tensors, cut_of
from torchdistpackage.compat.torchshard.marks import LAST, mark, unmarked
from torchdistpackage.compat.torchshard.model_groups import get_group
from torchdistpackage.compat.torchshard.reduction import legacy_get_string
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from torchdistpackage.parallel.tensor.embedding import check_ids, feature_embedding, vocab_embedding
from torchdistpackage.parallel.tensor.weight_reads import plain, refuse_nested

ParallelDim = int | None


def check_dim(dim: ParallelDim) -> None:
    """Check the argument `dim`.

    Raises:
        ValueError: it is not one of None, 0, 1, -1.
    """
    if dim is not None and (type(dim) is not int or dim not in (0, *LAST)):
        raise ValueError(
            f"dim is {dim!r}; use 1 or -1 to split the outputs, 0 to split the inputs, or None"
        )


def check_sizes(caller: str, lowest: int, **sizes: object) -> None:
    """Check that all sizes are whole numbers of at least `lowest`.

    Raises:
        ValueError: some are not; it names all of them.
    """
    wrong = [
        f"{name} {value!r}"
        for name, value in sizes.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest
    ]
    if wrong:
        raise ValueError(f"{caller}: {', '.join(wrong)}; use whole numbers of at least {lowest}")


def lengths(length: int) -> list[int]:
    """Return the lengths of all ranks' slices of `length`; the first ranks may have one more."""
    size = get_group().size()
    return [chunk(length, size, index)[1] for index in range(size)]


def parallel_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dim: ParallelDim = None,
    out_features: int | None = None,
) -> Tensor:
    """Return x W^T + b, computed with this rank's slice of W (Dout, Din).

    dim 1 or -1: W (Dout/n, Din), b (Dout/n,), x (..., Din), not split; the result is
        (..., Dout/n) and marked.
    dim 0: W (Dout, Din/n), b (Dout,); x is not split, or marked as split along its last dim; the
        result is not split.

    out_features: Dout, if it is not n times this rank's.

    Raises:
        ValueError: dim is not one of None, 0, 1, -1, or an operand is not a tensor.
        LayoutError: x is split where it must be whole, or has another length.
    """
    check_dim(dim)
    check_tensors("parallel_linear", input=input, weight=weight)
    refuse_nested(input, "parallel_linear")
    if dim is not None:
        weight = plain(weight)
        bias = None if bias is None else plain(bias)
    if weight.dim() != 2:
        raise LayoutError(
            f"the weight of a product is (out, in), not {tuple(weight.shape)}; pass a matrix"
        )
    if dim is None:
        return F.linear(input, weight, bias)
    group = get_group()
    cut = cut_of(input)
    width = weight.shape[1]
    if dim in LAST and cut is None and input.shape[-1:] != (width,):
        raise LayoutError(
            f"a product of an input of shape {tuple(input.shape)}, whose last dim must be the "
            f"{width} inputs of the weight {tuple(weight.shape)}"
        )
    if dim in LAST:
        if cut is not None:
            raise LayoutError(
                f"a product split by outputs needs all of its input, but dim {cut.dim} of the "
                f"{tuple(input.shape)} is split (of {cut.length} in all); gather it first, or "
                f"split this layer by inputs, dim=0"
            )
        y = F.linear(collectives.copy(input, group), weight, bias)
        return mark(y, y.dim() - 1, out_features)
    part = own_part(input, cut, weight.shape[1])
    y = collectives.reduce(F.linear(part, weight), group)
    return y if bias is None else y + bias


def own_part(x: Tensor, cut: Cut | None, width: int) -> Tensor:
    """Return this rank's columns of `x`; scatter `x` unless `cut` says that it has only those."""
    if cut is None:
        sizes = lengths(x.shape[-1]) if x.dim() else []
        if not sizes or sizes[get_group().rank()] != width:
            raise LayoutError(
                f"a product split by inputs takes {width} of them on this rank, but an input of "
                f"shape {tuple(x.shape)} is shared as {sizes} by the {get_group().size()} ranks"
            )
        return collectives.scatter(x, -1, get_group(), sizes)
    if cut.dim != x.dim() - 1 or x.shape[-1] != width:
        raise LayoutError(
            f"a layer split by inputs takes {width} of them on this rank, but its input "
            f"{tuple(x.shape)} is split along dim {cut.dim}; split the input along its last dim "
            f"into slices of {width}"
        )
    return unmarked(x)


def parallel_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    num_embeddings: int | None = None,
    dim: ParallelDim = None,
    embedding_dim: int | None = None,
) -> Tensor:
    """Return rows of a table by id, in full on every rank.

    dim 0: weight (V/n, D), num_embeddings is V. dim 1 or -1: weight (V, D/n), embedding_dim is D.
    By default they are n times this rank's.

    Raises:
        ValueError: dim is not one of None, 0, 1, -1, or ids and table are not tensors.
        DataError: an id is outside the vocabulary.
    """
    check_dim(dim)
    check_tensors("parallel_embedding", input=input, weight=weight)
    options: dict[str, Any] = {
        "padding_idx": padding_idx,
        "max_norm": max_norm,
        "norm_type": norm_type,
        "scale_grad_by_freq": scale_grad_by_freq,
        "sparse": sparse,
    }
    if input.is_floating_point():
        raise ValueError(f"ids are {input.dtype}; pass whole numbers, such as torch.int64")
    if dim is None:
        return F.embedding(input, weight, **options)
    group = get_group()
    weight = plain(weight)
    if dim == 0:
        if num_embeddings is None:
            num_embeddings = weight.shape[0] * group.size()
        sizes = lengths(num_embeddings)
        rows = vocab_embedding(input, weight, group, vocab=num_embeddings, sizes=sizes, **options)
        return collectives.reduce(rows, group)
    check_ids(input, weight.shape[0], "ids")
    columns = feature_embedding(input, weight, group, **options)
    sizes = None if embedding_dim is None else lengths(embedding_dim)
    return collectives.gather(columns, -1, group, sizes)


def parallel_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return `torch.nn.functional.cross_entropy`, also for logits that are split by class.

    input (N, C) and target (N,); with more dims (N, ..., C) and (N, ...), or torch's own order
    (N, C, ...). The classes are the split dim; if logits are not split, target tells which of the
    two dims they are. Class weights are for all C classes. "none" returns the shape of target.

    Raises:
        LayoutError: the split dim is neither dim 1 nor the last one, shapes do not fit, or logits
            that are not split fit target in both orders.
        DataError: a target is outside 0..C-1.
        ValueError: an operand is not a tensor.
    """
    class_weights = {} if weight is None else {"weight": weight}
    check_tensors("parallel_cross_entropy", input=input, target=target, **class_weights)
    reduction = reduction_of(size_average, reduce, reduction)
    cut = cut_of(input)
    if cut is None:
        logits = input.movedim(-1, 1) if _classes_are_last(input, target) else input
        return F.cross_entropy(
            logits,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    if cut.dim != input.dim() - 1 and cut.dim != 1:
        raise LayoutError(
            f"cross entropy takes logits that are split along their classes, dim 1 or the last "
            f"one, not {tuple(input.shape)} split along dim {cut.dim}"
        )
    return vocab_parallel_cross_entropy(
        unmarked(input).movedim(cut.dim, -1),
        target,
        get_group(),
        vocab=cut.length,
        sizes=lengths(cut.length),
        weight=weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,  # type: ignore[arg-type]
    )


def reduction_of(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """Return the reduction that torch's earlier two flags ask for, or else `reduction`."""
    if size_average is None and reduce is None:
        return reduction
    return legacy_get_string(size_average, reduce)


def _classes_are_last(logits: Tensor, target: Tensor) -> bool:
    """Return whether logits are (N, ..., C) with more than two dims; torch's are (N, C, ...).

    Raises:
        LayoutError: target fits both orders, and they mean different losses.
    """
    if logits.dim() < 3 or target.shape != logits.shape[:-1]:
        return False
    if target.shape == (logits.shape[0], *logits.shape[2:]):
        raise LayoutError(
            f"the classes of logits {tuple(logits.shape)} with targets {tuple(target.shape)} may "
            f"be dim 1 or the last one; give them as (N, C) and (N,)"
        )
    return True


def torch_cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return `torch.nn.functional.cross_entropy` of logits that may be split.

    torchshard leaves torch's function alone: it takes logits as not split, whatever their mark
    says. So a mark that the user set is ambiguous and refused; any other split is followed.

    Raises:
        LayoutError: the user marked the logits, or their classes are not dim 1. Also as
            `parallel_cross_entropy`.
    """
    cut = cut_of(input)
    if cut is not None and input.dim() > 1:
        shape = tuple(input.shape)
        width = input.shape[cut.dim]
        if cut.by_hand and width != cut.length:
            raise LayoutError(
                f"torch.nn.functional.cross_entropy of logits {shape} that were marked as split by "
                f"register_parallel_dim: they may be all {width} classes or this rank's part of "
                f"{cut.length}; leave the mark out where they are whole, and call "
                f"torchshard.nn.functional.parallel_cross_entropy (ParallelCrossEntropyLoss) where "
                f"they are a part"
            )
        if cut.dim != 1:
            raise LayoutError(
                f"torch.nn.functional.cross_entropy takes classes as dim 1, not logits {shape} "
                f"split along dim {cut.dim}; torchshard.nn.functional.parallel_cross_entropy takes "
                f"them as the last one too"
            )
    return parallel_cross_entropy(input, target, *args, **kwargs)


cross_entropy_loss = parallel_cross_entropy
"""The name on torchshard's page."""


class ParallelCrossEntropy(torch.autograd.Function):
    """The name that forks import; `apply` calls `parallel_cross_entropy` with split logits."""

    @staticmethod
    def apply(input: Tensor, *arguments: Any) -> Tensor:
        if cut_of(input) is None:
            mark(input := input.view(input.shape), input.dim() - 1)
        return parallel_cross_entropy(input, *arguments)

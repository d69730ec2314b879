"""Building blocks of a cross entropy over split logits: terms, targets, and a softmax by columns.

Each rank reads its own columns once, a few rows at a time, and keeps for each row their maximum,
the sum of exponentials below it and the target's logit. Two all-reduces join these for all rows.
The gradient is computed in the logits' own memory, so no second tensor of their size is kept.

With p the softmax, t the target, w the class weights, W their sum over the vocabulary of V classes,
s the label smoothing and z the weight of the log partition function (z-loss of PaLM,
arXiv:2204.02311, section 5):

    loss = (1 - s) w_t (lse - x_t) + s / V sum_c w_c (lse - x_c) + z lse^2
    d loss / d x_c = p_c ((1 - s) w_t + s W / V + 2 z lse) - (1 - s) w_t [c = t] - s w_c / V
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdistpackage.comm.primitives import MAX, Group, Sizes, all_reduce
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.tensor.embedding import check_ids, vocab_range

CACHED_BYTES = 1 << 20
"""Bytes of logits that a CPU processes at a time, so that its cache keeps them between operations.
"""
BLOCK_BYTES = 1 << 28
"""The same on a GPU, where few large operations count."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The terms of the loss, equal for all tokens.

    sizes: columns of each rank, or None for those of `chunk`.
    """

    group: Group
    vocab: int
    smoothing: float
    z: float
    sizes: Sizes | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing <= 1 or not self.z >= 0:
            raise LayoutError(
                f"cross entropy with label_smoothing={self.smoothing} and z_loss={self.z}; "
                f"use a label_smoothing of 0 to 1 and a z_loss of 0 or more"
            )

    @property
    def columns(self) -> tuple[int, int]:
        """(first, number) of this rank's columns."""
        return vocab_range(self.vocab, self.group, self.sizes)

    @property
    def width(self) -> int:
        return self.columns[1]


@dataclass(frozen=True, slots=True)
class LossTargets:
    """The targets of N tokens, flat.

    column: (N,) the target's column on this rank, 0 if another rank has it.
    is_local: (N,) True if this rank has the target's column and the token is not ignored.
    kept: (N,) 1 if the token counts, 0 if it is ignored.
    factor: (N,) class weight of the target, 0 if it is ignored.
    own_weights: class weights of this rank's columns; None: each is 1. all_weights: their sum over
    V.
    """

    shape: torch.Size
    column: Tensor
    is_local: Tensor
    kept: Tensor
    factor: Tensor
    own_weights: Tensor | None
    all_weights: Tensor | float

    @classmethod
    def of(
        cls,
        target: Tensor,
        terms: LossTerms,
        ignore_index: int,
        weight: Tensor | None,
        logits_dtype: torch.dtype,
    ) -> "LossTargets":
        flat = target.flatten().long()
        ignored = flat == ignore_index
        ids = flat.masked_fill(ignored, 0)
        check_ids(ids, terms.vocab, "targets")
        start, width = terms.columns
        column = ids - start
        is_local = (column >= 0) & (column < width) & ~ignored
        # a factor of losses, so of their dtype
        is_counted = (~ignored).to(torch.promote_types(logits_dtype, torch.float32))
        factor, own_weights, total = is_counted, None, float(terms.vocab)
        if weight is not None:
            if weight.shape != (terms.vocab,):
                raise LayoutError(
                    f"class weights of shape {tuple(weight.shape)} for a vocabulary of "
                    f"{terms.vocab}; pass all {terms.vocab} of them on every rank"
                )
            weight = weight.detach().to(is_counted.device, is_counted.dtype)
            own_weights, total = weight[start : start + width], weight.sum()
            factor = weight[ids.clamp(0, terms.vocab - 1)] * is_counted
        return cls(
            target.shape,
            column.masked_fill(~is_local, 0),
            is_local,
            is_counted,
            factor,
            own_weights,
            total,
        )

    def split(self, num_tokens: int) -> "Iterator[tuple[slice, LossTargets]]":
        """Yield the same targets, `num_tokens` at a time."""
        by_token = (self.column, self.is_local, self.kept, self.factor)
        for start in range(0, max(len(self.column), 1), num_tokens):  # no tokens: once
            at = slice(start, start + num_tokens)
            parts = [t[at] for t in by_token]
            yield at, LossTargets(parts[0].shape, *parts, self.own_weights, self.all_weights)


def check_classes(target: Tensor) -> None:
    """
    Raises:
        LayoutError: targets are not whole numbers.
    """
    if target.dtype.is_floating_point or target.dtype.is_complex or target.dtype == torch.bool:
        raise LayoutError(
            f"targets are {target.dtype}; use the numbers of classes, int64, or, for classes "
            f"by probability, torch.nn.functional.cross_entropy of gathered logits"
        )


def reduced(losses: Tensor, targets: LossTargets, reduction: str) -> Tensor:
    if reduction == "none":
        return losses.view(targets.shape)
    if reduction == "sum":
        return losses.sum()
    if reduction != "mean":
        raise LayoutError(f"reduction is {reduction!r}; use none, mean or sum")
    return losses.sum() / targets.factor.sum()


def rows_at_once(x: Tensor) -> Iterator[slice]:
    """Return slices of rows of x (N, C) to process at a time, so that a block stays in the
    cache.
    """
    at_once = CACHED_BYTES if x.device.type == "cpu" else BLOCK_BYTES
    size = max(at_once // max(x.shape[-1] * x.element_size(), 1), 1)
    return (slice(start, start + size) for start in range(0, len(x), size))


def look(x: Tensor, smooths: bool, targets: LossTargets) -> Tensor:
    """Return the statistics that the loss needs of this rank's columns x (N, C), as rows of (4, N).

    Maximum h (-inf without columns), sum of exp(x - h), logit of the target or 0, and with
    smoothing the sum of w_c (x_c - h), where an h of -inf counts as 0.
    """
    statistics = x.new_zeros((4, len(x)), dtype=targets.kept.dtype)
    highest, total, hit, smooth = statistics
    highest.fill_(-torch.inf)
    if not x.shape[-1]:
        return statistics
    hit.copy_(x.gather(-1, targets.column.unsqueeze(-1)).squeeze(-1))
    hit.masked_fill_(~targets.is_local, 0)
    own_weights = targets.own_weights
    for at in rows_at_once(x):
        # exp and sums over a vocabulary are in float32; a block at a time, to save memory
        block = x[at].to(statistics.dtype)
        torch.amax(block, -1, out=highest[at])
        below = block - highest[at].masked_fill(highest[at] == -torch.inf, 0).unsqueeze(-1)
        if smooths:
            smooth[at] = below.sum(-1) if own_weights is None else below @ own_weights
        torch.sum(below.exp_(), -1, out=total[at])
    return statistics


@dataclass(frozen=True, slots=True)
class SoftmaxRows:
    """The numbers that turn logits x of N rows into a softmax: exp(x - highest) / total. Each
    (N,).
    """

    highest: Tensor
    total: Tensor

    def split(self, at: slice) -> "SoftmaxRows":
        return SoftmaxRows(self.highest[at], self.total[at])


def join(stats: Tensor, terms: LossTerms, targets: LossTargets) -> tuple[Tensor, SoftmaxRows]:
    """Return losses (N,) and the softmax, from the statistics that each rank has of its own
    columns.
    """
    own_highest, own_total, hit, smooth = stats
    highest = own_highest.clone()
    all_reduce(highest, terms.group, MAX)

    sums = stats.new_zeros((3 if terms.smoothing else 2, stats.shape[1]))
    torch.mul(own_total, (own_highest - highest).exp_(), out=sums[0])
    sums[1] = (hit - highest).masked_fill_(~targets.is_local, 0)
    if terms.smoothing and terms.width:
        own_weights = targets.own_weights
        weight = float(terms.width) if own_weights is None else own_weights.sum()
        start = own_highest.masked_fill(own_highest == -torch.inf, 0)
        sums[2] = smooth + weight * (start - highest)
    all_reduce(sums, terms.group)

    total, log_sum = sums[0].clone(), sums[0].log()
    ignored = targets.kept == 0
    losses = targets.factor * (log_sum - sums[1]).masked_fill(ignored, 0)
    if terms.smoothing:
        smoothed = (targets.all_weights * log_sum - sums[2]).masked_fill(ignored, 0)
        losses = (1 - terms.smoothing) * losses + terms.smoothing / terms.vocab * smoothed
    if terms.z:
        log_partition = log_sum + highest
        losses = losses + terms.z * log_partition.square().masked_fill(ignored, 0)
    return losses, SoftmaxRows(highest, total)


def gradient(
    grad: Tensor, x: Tensor, softmax: SoftmaxRows, terms: LossTerms, targets: LossTargets
) -> Tensor:
    """Return the gradient of this rank's logits x (N, C), in their dtype, from that of the losses
    (N,).
    """
    grad = grad * targets.kept
    at_target = grad * targets.factor * (1 - terms.smoothing)
    scale, smooth = at_target, None
    if terms.smoothing:
        smooth = grad * (terms.smoothing / terms.vocab)
        scale = scale + smooth * targets.all_weights
    if terms.z:
        scale = scale + grad * (softmax.total.log() + softmax.highest) * (2 * terms.z)
    scale = (scale / softmax.total).unsqueeze(-1)
    highest, own_weights = softmax.highest.unsqueeze(-1), targets.own_weights
    hit = at_target.masked_fill(~targets.is_local, 0).unsqueeze(-1)
    column = targets.column.unsqueeze(-1)

    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.shape[-1]:
        return out
    for at in rows_at_once(x):
        direct = x.dtype == grad.dtype
        block = torch.sub(x[at], highest[at], out=out[at]) if direct else x[at] - highest[at]
        block.exp_().mul_(scale[at])
        if smooth is not None:
            if own_weights is None:
                block.sub_(smooth[at].unsqueeze(-1))
            else:
                block.addr_(smooth[at], own_weights, alpha=-1)
        block.scatter_add_(-1, column[at], -hit[at])
        if not direct:
            out[at] = block
    return out

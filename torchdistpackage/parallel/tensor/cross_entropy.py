"""Cross entropy of logits whose vocabulary is split over the tensor group.

No rank ever sees a row of all logits: two all-reduces of a few numbers a token make the losses of
all tokens, and the gradient is a matter of each rank's own columns (loss_terms.py).
`linear_cross_entropy` multiplies with the output weight too, a chunk of tokens at a time, so that
not even a rank's own logits exist as a whole.
"""

from typing import Literal

import torch
from torch import Tensor

from torchdistpackage.comm.operators import is_traced
from torchdistpackage.comm.primitives import Group, Sizes, all_reduce
from torchdistpackage.errors import LayoutError, NotAvailableError
from torchdistpackage.parallel.tensor.loss_terms import (
    LossTargets,
    LossTerms,
    SoftmaxRows,
    check_classes,
    gradient,
    join,
    look,
    reduced,
)
from torchdistpackage.parallel.tensor.traced_loss import traced_linear_losses, traced_losses

Reduction = Literal["none", "mean", "sum"]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: Group,
    *,
    vocab: int,
    sizes: Sizes | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "none",
) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy` with the class dim last, equal on all ranks of
    the group.

    logits (..., my columns of vocab); target (...) int64, equal on all ranks. Result (...), or
    0-dim for "mean" and "sum"; float32, or float64 for float64 logits. Half precisions are computed
    in float32. An ignored token's loss is 0; "mean" divides by the class weights of the others.

    sizes: number of each rank's columns, the same on all ranks; None: `even_sizes`.
    weight: (vocab,) a factor for each class, the same on all ranks.
    z_loss: factor of the squared log partition function, which is added to the loss of each token.

    Raises:
        LayoutError: the columns are not this rank's share of the vocabulary, shapes differ, or an
            option is out of its range.
        DataError: a target is outside 0..vocab-1. Seen on the CPU only: on a GPU
            such a token's loss lacks the target's logit.
    """
    check_classes(target)
    terms = LossTerms(group, vocab, label_smoothing, z_loss, sizes)
    if logits.shape[-1:] != (terms.width,) or logits.shape[:-1] != target.shape:
        raise LayoutError(
            f"cross entropy of logits {tuple(logits.shape)} and targets {tuple(target.shape)}: "
            f"index {group.rank()} of {group.size()} ranks holds {terms.width} of {vocab} "
            f"vocabulary columns, so logits must be {(*target.shape, terms.width)}"
        )
    targets = LossTargets.of(target, terms, ignore_index, weight, logits.dtype)
    if is_traced():
        return traced_losses(logits, terms, targets, reduction)
    losses = _CrossEntropy.apply(logits, terms, targets)
    return reduced(losses, targets, reduction)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    group: Group,
    *,
    vocab: int,
    sizes: Sizes | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "none",
    chunk_tokens: int = 1024,
) -> Tensor:
    """Compute `vocab_parallel_cross_entropy` of x W^T, whose logits exist for only `chunk_tokens`
    at a time.

    x (..., D), whole on every rank, whose gradient is summed over the group; weight
    (my rows of vocab, D); target (...). The backward multiplies again. Other arguments and the
    result are those of `vocab_parallel_cross_entropy`; class_weight is its `weight`.

    Raises:
        LayoutError: as there, or chunk_tokens is less than 1.
        DataError: as there.
    """
    check_classes(target)
    terms = LossTerms(group, vocab, label_smoothing, z_loss, sizes)
    if weight.shape != (terms.width, x.shape[-1]) or x.shape[:-1] != target.shape:
        raise LayoutError(
            f"cross entropy of x {tuple(x.shape)}, weight {tuple(weight.shape)} and targets "
            f"{tuple(target.shape)}: index {group.rank()} of {group.size()} ranks holds "
            f"{terms.width} of {vocab} vocabulary rows, so weight must be "
            f"{(terms.width, x.shape[-1])} and targets {tuple(x.shape[:-1])}"
        )
    if chunk_tokens < 1:
        raise LayoutError(f"chunk_tokens is {chunk_tokens}; use 1 or more")
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        # a custom function is not seen by autocast, which would cast the matmul of nn.Linear
        x, weight = x.to(dtype), weight.to(dtype)
    targets = LossTargets.of(target, terms, ignore_index, class_weight, x.dtype)
    if is_traced():
        return traced_linear_losses(x, weight, terms, targets, chunk_tokens, reduction)
    losses = _LinearCrossEntropy.apply(x, weight, terms, targets, chunk_tokens)
    return reduced(losses, targets, reduction)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, terms: LossTerms, targets: LossTargets) -> Tensor:
        flat = logits.reshape(len(targets.column), terms.width)
        losses, softmax = join(look(flat, bool(terms.smoothing), targets), terms, targets)
        ctx.terms, ctx.targets = terms, targets
        ctx.save_for_backward(logits, softmax.highest, softmax.total)
        return losses

    @staticmethod
    def backward(ctx, grad: Tensor):
        logits, *softmax = ctx.saved_tensors
        with torch.no_grad():
            flat = logits.reshape(len(ctx.targets.column), ctx.terms.width)
            out = gradient(grad, flat, SoftmaxRows(*softmax), ctx.terms, ctx.targets)
        return _once((logits, grad), out.view(logits.shape))[0], None, None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, terms: LossTerms, targets: LossTargets, num_tokens: int
    ) -> Tensor:
        flat = x.reshape(len(targets.column), x.shape[-1])
        smooths = bool(terms.smoothing)
        terms_by_chunk = [
            look(flat[at] @ weight.t(), smooths, part) for at, part in targets.split(num_tokens)
        ]
        losses, softmax = join(torch.cat(terms_by_chunk, 1), terms, targets)
        ctx.terms, ctx.targets, ctx.num_tokens = terms, targets, num_tokens
        ctx.save_for_backward(x, weight, softmax.highest, softmax.total)
        return losses

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, *softmax = ctx.saved_tensors
        terms, shares = ctx.terms, SoftmaxRows(*softmax)
        # a backward inside autocast would multiply in another dtype than the forward did
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            flat = x.reshape(len(ctx.targets.column), x.shape[-1])
            grad_x = torch.empty_like(flat)
            grad_weight = torch.zeros_like(weight, dtype=ctx.targets.kept.dtype)
            for at, part in ctx.targets.split(ctx.num_tokens):
                logits = flat[at] @ weight.t()
                out = gradient(grad[at], logits, shares.split(at), terms, part)
                grad_x[at] = out @ weight
                grad_weight += out.t() @ flat[at]
            all_reduce(grad_x, terms.group)
        # the chunks were added in float32, and are rounded once here
        grads = grad_x.view(x.shape), grad_weight.to(weight.dtype)
        return *_once((x, weight, grad), *grads), None, None, None


def _once(inputs: tuple[Tensor, ...], *grads: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients; a further derivative of them is refused when it is requested."""
    return _Once.apply(len(grads), *grads, *inputs) if torch.is_grad_enabled() else grads


class _Once(torch.autograd.Function):
    """Refuse a second derivative, as torch's `once_differentiable` does, and name the loss in the
    error.

    The inputs of the loss are among its own, so that it is in the graph also where the incoming
    gradient is a constant, as that of a loss is.
    """

    @staticmethod
    def forward(ctx, num_grads: int, *grads_and_inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.clone() for each in grads_and_inputs[:num_grads])

    @staticmethod
    def backward(ctx, *grads: Tensor):
        raise NotAvailableError(
            "the gradient of vocab_parallel_cross_entropy and linear_cross_entropy has no "
            "derivative of its own; for a second derivative gather the logits and use "
            "torch.nn.functional.cross_entropy"
        )

"""Cross entropy of split logits in graph form, by the formula of loss_terms.py.

It consists of operations that autograd differentiates, so a compiler fuses them: statistics of each
rank's own columns, and two all-reduces over the group. For logits that never exist in full, the
statistics are one operator, which multiplies chunk by chunk, and again in the backward; it does not
communicate.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.comm import operators
from torchdistpackage.comm.autograd import KINDS, Code, IdentityForward, Reduce, apply
from torchdistpackage.comm.primitives import Group
from torchdistpackage.parallel.tensor.loss_terms import LossTargets, LossTerms, look, reduced


def traced_losses(logits: Tensor, terms: LossTerms, targets: LossTargets, reduction: str) -> Tensor:
    """Return the losses of `vocab_parallel_cross_entropy`."""
    x = logits.reshape(len(targets.column), terms.width).to(targets.kept.dtype)
    # not `look`, which writes to its parts
    if terms.width:
        highest = x.detach().amax(-1)
        below = x - highest.masked_fill(highest == -torch.inf, 0).unsqueeze(-1)
        hit = x.gather(-1, targets.column.unsqueeze(-1)).squeeze(-1)
        own_weights = targets.own_weights
        smooth = below.sum(-1) if own_weights is None else below @ own_weights
        statistics = torch.stack([highest, below.exp().sum(-1), hit, smooth])
    else:
        statistics = (
            x.new_zeros((4, len(x))) + x.sum()
        )  # keeps the graph, as every rank has a backward
        statistics = torch.cat([torch.full_like(statistics[:1], -torch.inf), statistics[1:]])
    return reduced(_joined(statistics, terms, targets), targets, reduction)


def traced_linear_losses(
    x: Tensor,
    weight: Tensor,
    terms: LossTerms,
    targets: LossTargets,
    num_tokens: int,
    reduction: str,
) -> Tensor:
    """Return the losses of `linear_cross_entropy`."""
    x = apply(IdentityForward(terms.group), x)
    statistics = _look(
        x.reshape(len(targets.column), x.shape[-1]),
        weight,
        targets.column,
        targets.is_local,
        targets.kept,
        targets.own_weights,
        bool(terms.smoothing),
        num_tokens,
    )
    return reduced(_joined(statistics, terms, targets), targets, reduction)


def _joined(stats: Tensor, terms: LossTerms, targets: LossTargets) -> Tensor:
    """Return losses (N,) as `loss_terms.join` does."""
    own_highest, own_total, hit, smooth = stats.unbind(0)
    own_highest = own_highest.detach()
    highest = apply(_Largest(terms.group), own_highest)
    terms_of_rank = [
        own_total * (own_highest - highest).exp(),
        (hit - highest).masked_fill(~targets.is_local, 0),
    ]
    if terms.smoothing:
        own_weights = targets.own_weights
        weight = float(terms.width) if own_weights is None else own_weights.sum()
        start = own_highest.masked_fill(own_highest == -torch.inf, 0)
        terms_of_rank.append(smooth + weight * (start - highest) if terms.width else smooth * 0)
    sums = apply(Reduce(terms.group), torch.stack(terms_of_rank))

    log_sum, ignored = sums[0].log(), targets.kept == 0
    losses = targets.factor * (log_sum - sums[1]).masked_fill(ignored, 0)
    if terms.smoothing:
        smoothed = (targets.all_weights * log_sum - sums[2]).masked_fill(ignored, 0)
        losses = (1 - terms.smoothing) * losses + terms.smoothing / terms.vocab * smoothed
    if terms.z:
        losses = losses + terms.z * (log_sum + highest).square().masked_fill(ignored, 0)
    return losses


@dataclass(frozen=True, slots=True)
class _Largest:
    """An operator for the maximum: not a linear map, and without a gradient."""

    group: Group

    def __call__(self, x: Tensor, calls: Any = operators) -> Tensor:
        return calls.all_reduce(x, self.group, "max")

    def transposed(self) -> "_Largest":
        raise NotImplementedError

    def code(self) -> Code:
        return "max", (), None, None


KINDS["max"] = lambda group, first, second: _Largest(group)


# -- the look at logits in chunks ----------------------------------------------------------------


@torch.library.custom_op("torchdistpackage::linear_look", mutates_args=())
def _look(
    x: Tensor,
    weight: Tensor,
    column: Tensor,
    is_local: Tensor,
    kept: Tensor,
    own_weights: Tensor | None,
    smooths: bool,
    num_tokens: int,
) -> Tensor:
    """Return `look` at x W^T, (4, N)."""
    targets = LossTargets(column.shape, column, is_local, kept, kept, own_weights, 0.0)
    with torch.autocast(x.device.type, enabled=False):
        statistics = [look(x[at] @ weight.t(), smooths, p) for at, p in targets.split(num_tokens)]
    return torch.cat(statistics, 1)


@_look.register_fake
def _(x, weight, column, is_local, kept, own_weights, smooths, num_tokens):
    return kept.new_empty((4, x.shape[0]))


@torch.library.custom_op("torchdistpackage::linear_look_backward", mutates_args=())
def _look_backward(
    grad: Tensor,
    stats: Tensor,
    x: Tensor,
    weight: Tensor,
    column: Tensor,
    is_local: Tensor,
    own_weights: Tensor | None,
    smooths: bool,
    num_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight from those of the statistics; the maxima have none."""
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    grad_weight = torch.zeros(weight.shape, dtype=stats.dtype, device=weight.device)
    of_hit = grad[2].masked_fill(~is_local, 0)
    with torch.autocast(x.device.type, enabled=False):
        for start in range(0, len(x), num_tokens):
            at = slice(start, start + num_tokens)
            # exp is taken in the dtype of the statistics, from which the maxima were subtracted
            part = (x[at] @ weight.t()).to(stats.dtype)
            if part.shape[-1]:
                part.sub_(stats[0, at].unsqueeze(-1)).exp_().mul_(grad[1, at].unsqueeze(-1))
                part.scatter_add_(-1, column[at].unsqueeze(-1), of_hit[at].unsqueeze(-1))
            if smooths:
                part += grad[3, at].unsqueeze(-1) * (1 if own_weights is None else own_weights)
            # both matmuls take one dtype, that of the model
            part = part.to(x.dtype)
            grad_x[at] = part @ weight
            grad_weight += part.t() @ x[at]
    return grad_x, grad_weight.to(weight.dtype)


@_look_backward.register_fake
def _(grad, stats, x, weight, column, is_local, own_weights, smooths, num_tokens):
    return torch.empty_like(x, memory_format=torch.contiguous_format), weight.new_empty(
        weight.shape
    )


def _keep(ctx, inputs, output) -> None:
    x, weight, column, is_local, _, own_weights, ctx.smooths, ctx.num_tokens = inputs
    ctx.save_for_backward(output, x, weight, column, is_local, own_weights)


def _backward(ctx, grad: Tensor):
    grads = _look_backward(grad.contiguous(), *ctx.saved_tensors, ctx.smooths, ctx.num_tokens)
    return *grads, None, None, None, None, None, None


_look.register_autograd(_backward, setup_context=_keep)

"""Cross entropy of logits whose vocabulary is cut over the tensor group.

One rule: no rank ever sees a row of all logits. Two all-reduces make the loss, one of the
row maxima and one of the sums of exponentials packed with the target's logit; the gradient
is then a matter of each rank's own columns.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchdistpackage.comm.primitives import MAX, Group, all_reduce
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.derive import chunk
from torchdistpackage.parallel.tensor.embedding import check_ids


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, group: Group, *, vocab: int, ignore_index: int = -100
) -> Tensor:
    """Loss of each token, -log softmax(logits)[target], equal on all ranks of the group.

    logits (..., my columns of vocab); target (...) int64, equal on all ranks; result (...),
    float32, or float64 for float64 logits, and 0 where the target is `ignore_index`. Half
    precisions are computed in float32.

    Raises:
        LayoutError: the columns are not this rank's share of the vocabulary, or the shapes differ.
        DataError: a target is outside 0..vocab-1. Seen on the CPU only: on a GPU
            such a token's loss lacks the target's logit.
    """
    start, width = chunk(vocab, group.size(), group.rank())
    if logits.shape[-1] != width or logits.shape[:-1] != target.shape:
        raise LayoutError(
            f"cross entropy of logits {tuple(logits.shape)} and targets {tuple(target.shape)}: "
            f"index {group.rank()} of {group.size()} ranks holds {width} of {vocab} vocabulary "
            f"columns, so logits must be {(*target.shape, width)}"
        )
    ignored = target == ignore_index
    check_ids(target.masked_fill(ignored, 0), vocab, "targets")
    local = target - start
    mine = (local >= 0) & (local < width) & ~ignored
    return _CrossEntropy.apply(logits, local.masked_fill(~mine, 0), mine, ignored, group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits: Tensor, local: Tensor, mine: Tensor, ignored: Tensor, group: Group
    ) -> Tensor:
        """local (...): my column of the target, 0 where `mine` is false."""
        x = logits.to(torch.promote_types(logits.dtype, torch.float32))
        has_columns = x.shape[-1] > 0
        highest = x.amax(-1) if has_columns else x.new_full(local.shape, -torch.inf)
        all_reduce(highest, group, MAX)

        shifted = x - highest.unsqueeze(-1)
        packed = x.new_zeros((2, *local.shape))
        if has_columns:
            hit = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1)
            packed[1] = hit.masked_fill(~mine, 0)
        exponentials = shifted.exp_()
        packed[0] = exponentials.sum(-1)
        all_reduce(packed, group)

        total, hit = packed
        softmax = exponentials.div_(total.unsqueeze(-1))
        ctx.dtype = logits.dtype
        ctx.save_for_backward(softmax, local, mine, ignored)
        return (total.log() - hit).masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        softmax, local, mine, ignored = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0)
        out = softmax * grad.unsqueeze(-1)
        if out.shape[-1]:
            hit = grad.masked_fill(~mine, 0)
            out.scatter_add_(-1, local.unsqueeze(-1), -hit.unsqueeze(-1))
        return out.to(ctx.dtype), None, None, None, None

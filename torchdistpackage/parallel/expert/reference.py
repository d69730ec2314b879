"""A mixture of experts in one process, with a loop over experts, as the reference for tests.

Tests compare `MoELayer` with it. Nothing here is fast or parallel.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.layout.moe import MoEShape
from torchdistpackage.lazy import resolve


def reference_layer(
    x: Tensor,
    weights: Mapping[str, Tensor],
    shape: MoEShape,
    activation: Callable[[Tensor], Tensor] = F.silu,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (y, loss) of x (S, B, D): y without the shared expert; loss with its coefficients.

    weights: by the names of a state dict: router.weight, experts.0.up.weight, ... bias: (E,), added
    to scores for the choice.
    """
    logits = x @ weights["router.weight"].T
    scores = logits.softmax(-1) if shape.score == "softmax" else logits.sigmoid()
    chosen_by = scores if bias is None else scores + bias
    y = torch.zeros_like(x)
    loss = shape.z_loss * logits.logsumexp(-1).square().mean()
    share = scores / scores.sum(-1, keepdim=True)
    counts = x.new_zeros(x.shape[1], shape.num_experts)
    places = capacity_of(shape, x.shape[0])
    for b in range(x.shape[1]):
        num_taken = [0] * shape.num_experts
        for s in range(x.shape[0]):
            chosen = _best(chosen_by[s, b].tolist(), shape)
            weight = scores[s, b, chosen]
            if shape.normalize:
                weight = weight / weight.sum()
            for e, w in zip(chosen, weight * shape.route_scale, strict=True):
                counts[b, e] += 1
                num_taken[e] += 1
                if num_taken[e] <= places:
                    y[s, b] += w * _expert(x[s, b], e, weights, shape, activation)
    if shape.has_balance_loss:
        busy = counts / (x.shape[0] * shape.top_k)
        by_hand = resolve(shape.balancing.by_hand)
        loss = loss + shape.aux_loss * by_hand(shape, busy, share.mean(0))
    return y, loss


def loss_of_sequences(shape: MoEShape, busy: Tensor, share: Tensor) -> Tensor:
    """Return the mean of Switch's loss over sequences.

    busy (B, E): fraction of a sequence's choices that each expert got. share (B, E): its mean
    score.
    """
    return shape.num_experts * (busy * share).sum(-1).mean()


def loss_of_batch(shape: MoEShape, busy: Tensor, share: Tensor) -> Tensor:
    """Return Switch's loss from the fractions of all choices in the batch."""
    return loss_of_sequences(shape, busy.mean(0, keepdim=True), share)


def capacity_of(shape: MoEShape, seq_len: int) -> int:
    """Return the places of an expert in one sequence."""
    if shape.capacity_factor is None:
        return seq_len * shape.top_k
    mean_rows = shape.capacity_factor * seq_len * shape.top_k / shape.num_experts
    return -int(-mean_rows // 1)


def _best(scores: Sequence[float], shape: MoEShape) -> list[int]:
    """Return the experts of the top k scores within the best groups, best first."""
    width, experts = shape.num_experts // shape.num_groups, range(shape.num_experts)
    groups = [scores[g * width : (g + 1) * width] for g in range(shape.num_groups)]
    value = [sum(sorted(group)[-2:]) for group in groups]
    best_groups = sorted(range(len(groups)), key=lambda g: -value[g])[: shape.top_groups]
    return sorted((e for e in experts if e // width in best_groups), key=lambda e: -scores[e])[
        : shape.top_k
    ]


def _expert(
    x: Tensor,
    e: int,
    weights: Mapping[str, Tensor],
    shape: MoEShape,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the output of expert `e` for one token."""

    def product(name: str, x: Tensor) -> Tensor:
        path = f"experts.{e}.{name}"
        return F.linear(x, weights[f"{path}.weight"], weights.get(f"{path}.bias"))

    up = product("up", x)
    hidden = activation(product("gate", x)) * up if shape.gated else activation(up)
    return product("down", hidden)

"""Balance of experts: counts of choices, and the losses and biases that follow them.

Counts belong to one sequence, or to all tokens of a step. Both are independent of the layout,
unlike the counts of one rank's micro-batch.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.operators import is_traced
from torchdistpackage.comm.primitives import Group
from torchdistpackage.ddp.param_spec import batch_group
from torchdistpackage.layout.moe import MoEShape
from torchdistpackage.parallel.expert.groups import ExpertGroups


def balance_of_sequences(
    shape: MoEShape, scores: Tensor, experts: Tensor, groups: ExpertGroups, state: Tensor | None
) -> Tensor:
    """Return `switch_loss` for the choices of each sequence.

    scores (S, B, E), of which sigmoids are divided by their sum; experts (S, B, k). state: that of
    the balance, where its loss goes by the last step and not by these choices.
    """
    counts = counts_of(experts, shape.num_experts).to(scores.dtype)
    return switch_loss(shape, scores, primitives.all_reduce(counts, groups.sequence))


def balance_of_batch(
    shape: MoEShape, scores: Tensor, experts: Tensor, groups: ExpertGroups, state: Tensor | None
) -> Tensor:
    """Return `switch_loss` for the choices of the global batch, or of the last step (`state`)."""
    if state is None:
        counts = counts_of(experts, shape.num_experts).sum(0).to(scores.dtype)
        return switch_loss(shape, scores, primitives.all_reduce(counts, groups.batch))
    # before the first step nothing is known: then all are taken to be equally busy
    counts = torch.where(state.sum() > 0, state, torch.ones_like(state))
    return switch_loss(shape, scores, counts.to(scores.dtype))


def switch_loss(shape: MoEShape, scores: Tensor, counts: Tensor) -> Tensor:
    """Return Switch's loss (arXiv:2101.03961, equation 4) without its coefficient; 1 if balanced.

    It is experts x sum over experts of (share of the choices) x (mean score), and the mean over
    this rank's tokens, each by the counts of its sequence (B, E) or of the batch (E,); so its mean
    over ranks with equally many tokens is that of all tokens. No gradient goes through counts.
    """
    busy = counts / counts.sum(-1, keepdim=True)
    return shape.num_experts * (busy * scores.mean(0)).sum(-1).mean()


def z_loss(logits: Tensor) -> Tensor:
    """Return the mean over tokens of the squared log-sum of logits (..., E): ST-MoE,
    arXiv:2202.08906.
    """
    return logits.logsumexp(-1).square().mean()


def counts_of(experts: Tensor, num_experts: int) -> Tensor:
    """Count how often each expert was chosen in each sequence: experts (S, B, k) -> (B, E)
    int64.
    """
    chosen = experts.transpose(0, 1).flatten(1)
    counts = chosen.new_zeros(chosen.shape[0], num_experts)
    return counts.scatter_add_(1, chosen, torch.ones_like(chosen))


class LoadCounter:
    """Counts of each expert's choices over the forwards of a step, and of refused choices.

    It is not a buffer: replicas differ in it, and nobody saves it. A copy or a pickle starts at
    zero.
    """

    def __init__(self, num_experts: int):
        self.num_experts = num_experts
        self.total: Tensor | None = None
        self.dropped: Tensor | None = None

    def add(self, experts: Tensor, *, is_training: bool) -> None:
        """Count experts (S, B, k), as `add_counts` does."""
        self.add_counts(counts_of(experts, self.num_experts).sum(0), is_training=is_training)

    def add_counts(self, counts: Tensor, *, is_training: bool) -> None:
        """Add counts (E,) int64 of a training forward, but not of a recomputation."""
        if is_training and (is_traced() or torch._C._current_graph_task_id() == -1):
            self.total = counts if self.total is None else self.total + counts

    def add_dropped(self, number: Tensor) -> None:
        """Count choices that found no place, except in a recomputation during the backward."""
        if torch._C._current_graph_task_id() == -1:
            self.dropped = number if self.dropped is None else self.dropped + number

    def take(self, device: torch.device) -> Tensor:
        """Return the choices of each expert, then those dropped, int64 (E + 1,), and reset the
        counts.
        """
        counts = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=device)
        if self.total is not None:
            counts[:-1] += self.total
        if self.dropped is not None:
            counts[-1] += self.dropped
        self.dropped = None
        # zeros, as a graph of a step that begins with nothing would be another one
        self.total = torch.zeros_like(counts[:-1])
        return counts

    def __deepcopy__(self, memo: dict[int, object]) -> "LoadCounter":
        return LoadCounter(self.num_experts)

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return LoadCounter, (self.num_experts,)


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The choices of each expert of one layer in one step, over all ranks, and those dropped."""

    choices: tuple[int, ...]
    dropped: int = 0

    @property
    def imbalance(self) -> float:
        """The busiest expert's choices over the mean; 1 is balanced."""
        return max(self.choices) * len(self.choices) / max(sum(self.choices), 1)

    @property
    def dropped_share(self) -> float:
        """Fraction of choices that found no place."""
        return self.dropped / max(sum(self.choices), 1)

    @property
    def dead(self) -> tuple[int, ...]:
        """Experts that no token chose."""
        return tuple(e for e, n in enumerate(self.choices) if n == 0)


def routers_in(module: nn.Module) -> dict[str, nn.Module]:
    """Return every router in `module` by its path."""
    return {
        path: part
        for path, part in module.named_modules()
        if isinstance(getattr(part, "counter", None), LoadCounter)
    }


@torch.no_grad()
def balance_experts(module: nn.Module, group: Group | None = None) -> dict[str, ExpertLoad]:
    """End a step of every mixture in `module`: sum its counts, update biases and last loads. Return
    the load of each router by path.

    All ranks call it once a step, after the last backward. group: ranks that see different tokens;
    None: tpc's data and context ranks, or all. By path of each router its load.
    """
    routers = routers_in(module)
    if not routers:
        return {}
    counts = [r.counter.take(r.weight.device) for r in routers.values()]
    sizes = [len(x) for x in counts]
    total = primitives.all_reduce(torch.cat(counts), group or batch_group())
    apply_counts(routers.values(), total.split(sizes))
    return {p: load_of(x.tolist()) for p, x in zip(routers, total.split(sizes), strict=True)}


def load_of(numbers: Iterable[float]) -> ExpertLoad:
    """Return the load from the numbers of `LoadCounter.take`, summed over ranks."""
    *choices, dropped = (int(n) for n in numbers)
    return ExpertLoad(tuple(choices), dropped)


@torch.no_grad()
def apply_counts(
    routers: Iterable[nn.Module], counts: Iterable[Tensor], valid: Tensor | None = None
) -> None:
    """Update the state of each router's balance from a step's counts (E + 1,).

    valid: a bool scalar, whether the step counts; no host waits for it.
    """
    for router, numbers in zip(routers, counts, strict=True):
        if (old := router.balance_state) is not None:
            # counts travel in the dtype of the loss, which may be wider than that of the state
            new = router.moved_state(router.shape, old, numbers[:-1].to(old.dtype))
            old.copy_(new if valid is None else torch.where(valid, new, old))


def moved_bias(shape: MoEShape, bias: Tensor, choices: Tensor) -> Tensor:
    """Return the bias moved by its rate towards experts that were chosen less often than the mean.

    arXiv:2408.15664, algorithm 1.
    """
    return bias + shape.bias_rate * (choices.mean() - choices).sign()


def counted_load(shape: MoEShape, last_load: Tensor, choices: Tensor) -> Tensor:
    """Return the choices of this step as the last load."""
    return choices

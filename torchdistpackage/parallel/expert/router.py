"""The router: it chooses the experts of each token, and their weights.

Logits and scores are float32, or float64 for a float64 model, in every precision of the model: in
bfloat16 many scores would be equal. Ties go to the lower index, so every layout makes the same
choices.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.comm.primitives import ranks_of
from torchdistpackage.errors import DataError
from torchdistpackage.layout.moe import MoEShape
from torchdistpackage.lazy import resolve
from torchdistpackage.parallel.expert.balance import LoadCounter, z_loss
from torchdistpackage.parallel.expert.groups import ExpertGroups
from torchdistpackage.parallel.tensor.init import NORMAL, ZEROS, Initial, fill


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of N tokens.

    experts: (N, k) int64, best first. weights: (N, k).
    loss: a scalar, the layer's balance and z-loss with their coefficients; None: there are none.
    bad: a bool scalar, True if a logit is NaN.
    """

    experts: Tensor
    weights: Tensor
    loss: Tensor | None
    bad: Tensor


class TopKRouter(nn.Module):
    """The scores of tokens for experts, the top k of them, and the losses that balance these.

    groups: a sequence's counts are added up over `sequence`, with `global_aux_loss` over `batch`.
    step_counts: `global_aux_loss` goes by `last_load` instead, that of the last step, as
        `balance_experts` or a trainer leaves it. So it must be where a step has several
        microbatches, if the loss is not to depend on how many.
    name: of the layer, in errors.
    """

    def __init__(
        self,
        dim: int,
        shape: MoEShape,
        groups: ExpertGroups,
        *,
        step_counts: bool = False,
        name: str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.shape, self.groups, self.name = shape, groups, name
        self.step_counts = step_counts
        self.weight = nn.Parameter(torch.empty(shape.num_experts, dim, dtype=dtype, device=device))
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        balance = shape.balancing
        # resolved here and not in the forward, which may be traced
        self._balance_loss = resolve(balance.loss) if balance.loss else None
        self.moved_state = resolve(balance.move) if balance.move else None
        if balance.state:
            # a parameter without a gradient, so that checkpoints and replica checks have it
            zeros = torch.zeros(shape.num_experts, dtype=wide, device=device)
            self.register_parameter(balance.state, nn.Parameter(zeros, requires_grad=False))
        if not self.weight.is_meta:
            fill(self.weight, NORMAL)
        self.counter = LoadCounter(shape.num_experts)

    @property
    def balance_state(self) -> Tensor | None:
        """The state that the balance moves after each step; None if it has none."""
        name = self.shape.balancing.state
        return getattr(self, name) if name else None

    def initials(self) -> dict[str, Initial]:
        """Return the initial values of each parameter, by name."""
        state = self.shape.balancing.state
        return {"weight": NORMAL} | ({state: ZEROS} if state else {})

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        """Load the weight; a state that the saved layer lacked starts at zero."""
        key = prefix + self.shape.balancing.state
        if (state := self.balance_state) is not None and key not in state_dict:
            state_dict = {**state_dict, key: torch.zeros_like(state)}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor) -> Routing:
        """Route x (S, B, D), whole sequences in dim 0; N = S * B tokens in the order of x.

        Raises:
            DataError: x has no tokens of three dims.
        """
        if x.dim() != 3:
            raise DataError(
                f"{self.name or 'the router'} got x of shape {tuple(x.shape)}; give (S, B, D), "
                f"sequences in the first dim"
            )
        shape = self.shape
        # autocast would narrow this matmul again
        with torch.autocast(x.device.type, enabled=False):
            # at least float32: in bf16 close scores round to ties, and ranks could choose other
            # experts
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            x = x.to(wide)
            if self.training and shape.jitter:
                x = x * torch.empty_like(x).uniform_(1 - shape.jitter, 1 + shape.jitter)
            logits = F.linear(x, self.weight.to(wide))
            is_softmax = shape.score == "softmax"
            scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
            # a choice has no gradient; the weights of the chosen experts have
            experts = self._choose(scores.detach())
            weights = scores.gather(-1, experts)
            if shape.normalize:
                weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
            if shape.route_scale != 1:
                weights = weights * shape.route_scale
            loss = self._loss(logits, scores, experts) if self._wants_loss else None
        self.counter.add(experts, is_training=self.training)
        flat = experts.flatten(0, 1), weights.flatten(0, 1)
        return Routing(*flat, loss, logits.detach().isnan().any())

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the experts (..., k) of scores (..., E): best first, ties to the lower index."""
        shape = self.shape
        if shape.balancing.shifts_scores:
            scores = scores + self.balance_state
        if shape.num_groups > shape.top_groups:
            grouped = scores.unflatten(-1, (shape.num_groups, -1))
            of_group = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
            best = of_group.sort(dim=-1, descending=True, stable=True).indices[
                ..., : shape.top_groups
            ]
            is_allowed = torch.zeros_like(of_group, dtype=torch.bool).scatter_(-1, best, True)
            scores = grouped.masked_fill(~is_allowed.unsqueeze(-1), -torch.inf).flatten(-2)
        # topk leaves open which of equal scores it takes
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., : shape.top_k]

    @property
    def _wants_loss(self) -> bool:
        """True in a training forward with a gradient and a loss to add."""
        shape = self.shape
        has_balance = shape.has_balance_loss and shape.aux_loss > 0
        return self.training and torch.is_grad_enabled() and (has_balance or shape.z_loss > 0)

    def _loss(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        """Return the sum of the balance and z-loss, with their coefficients."""
        shape = self.shape
        loss = scores.new_zeros(())
        if self._balance_loss is not None and shape.aux_loss:
            if shape.score == "sigmoid":
                scores = scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
            state = self.balance_state if self.step_counts else None
            balance = self._balance_loss(shape, scores, experts, self.groups, state)
            loss = loss + shape.aux_loss * balance
        if shape.z_loss:
            loss = loss + shape.z_loss * z_loss(logits)
        return loss

    def refuse_nan(self, x: Tensor) -> None:
        """Raise DataError if x (S, B, D) leads to NaN scores on this rank.

        Raises:
            DataError: names the layer, the rank and the first token.
        """
        bad = F.linear(x.detach().to(self.weight.dtype), self.weight.detach()).isnan().any(-1)
        number = int(bad.sum())
        where = ranks_of(self.groups.expert)[self.groups.expert.rank()]
        if not number:
            return
        s, b = (int(i) for i in bad.nonzero()[0])
        source = "the layer's input" if x[s, b].isnan().any() else "the router's weights or product"
        raise DataError(
            f"{self.name or 'mixture of experts'} on rank {where}: the router's scores are NaN for "
            f"{number} of {bad.numel()} tokens, first for token {s} of sequence {b}, from "
            f"{source}; look for what overflowed before it, or lower the learning rate"
        )

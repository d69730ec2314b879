"""A mixture of experts as numbers: what fits what. No torch.

How its parameters are cut follows in parallel/expert/shape.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from torchdistpackage.layout.partition import refuse

Score = Literal["softmax", "sigmoid"]
Balance = Literal["aux_loss", "global_aux_loss", "bias", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEShape:
    """One mixture of experts, besides the width of the model.

    num_experts, top_k: of which each token goes to `top_k`. hidden: width of one expert.
    score: what the router makes of its logits. normalize: the weights of a token's experts are
        divided by their sum; `route_scale` multiplies them after that.
    num_groups, top_groups: experts are in `num_groups` equal groups, of which a token may choose
        from the best `top_groups` (DeepSeek-V3, arXiv:2412.19437, node-limited routing).
    balance: `aux_loss` (Switch, arXiv:2101.03961) from the counts of each sequence,
        `global_aux_loss` from those of the global batch, `bias` (loss-free, arXiv:2408.15664).
    aux_loss: coefficient of either loss. z_loss: of the squared log-sum of the logits (ST-MoE,
        arXiv:2202.08906). bias_rate: by which a bias moves each step.
    capacity_factor: places of an expert in each sequence, as a multiple of the mean; None: as many
        as are wanted.
    shared_hidden: width of an MLP that every token goes through; None: there is none.
    shared_gate: it is weighted by a sigmoid of its own.
    jitter: in training the router's input is multiplied by 1 +- jitter.

    Raises:
        LayoutError: lists everything that does not fit.
    """

    num_experts: int
    top_k: int
    hidden: int
    gated: bool = True
    bias: bool = False
    score: Score = "softmax"
    normalize: bool = True
    route_scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    balance: Balance = "aux_loss"
    aux_loss: float = 0.01
    z_loss: float = 0.0
    bias_rate: float = 0.001
    capacity_factor: float | None = None
    shared_hidden: int | None = None
    shared_gate: bool = False
    jitter: float = 0.0

    def __post_init__(self) -> None:
        refuse("mixture of experts", self.problems())

    def problems(self) -> list[str]:
        """What is wrong, each with its numbers and what to change."""
        found: list[str] = []
        least = {"num_experts": self.num_experts, "top_k": self.top_k, "hidden": self.hidden}
        found += [
            f"{name}={value}; set it to 1 or more" for name, value in least.items() if value < 1
        ]
        if not found and self.top_k > self.num_experts:
            found.append(
                f"top_k={self.top_k} experts for each token, of num_experts={self.num_experts}; "
                f"set top_k to {self.num_experts} or less"
            )
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            found.append(
                f"capacity_factor={self.capacity_factor:g} leaves the experts no place; set it "
                f"above 0, or leave it out to drop nothing"
            )
        for name, known in (("score", Score), ("balance", Balance)):
            if (value := getattr(self, name)) not in known.__args__:
                found.append(f"{name}={value!r} is unknown; use {', '.join(known.__args__)}")
        for name in ("aux_loss", "z_loss", "bias_rate"):
            if not getattr(self, name) >= 0:
                found.append(f"{name}={getattr(self, name)}; set it to 0 or more")
        if not 0 <= self.jitter < 1:
            found.append(f"jitter={self.jitter:g}; set it between 0 and 1")
        if self.shared_hidden is not None and self.shared_hidden < 1:
            found.append(
                f"shared_hidden={self.shared_hidden}; set it to 1 or more, or leave it out"
            )
        if self.shared_gate and self.shared_hidden is None:
            found.append("shared_gate without shared_hidden; give the shared expert a width")
        is_sized = min(*least.values(), self.num_experts - self.top_k + 1) >= 1
        return found + (self._group_problems() if is_sized else [])

    def _group_problems(self) -> list[str]:
        groups, top = self.num_groups, self.top_groups
        if groups < 1 or self.num_experts % groups:
            return [
                f"num_experts={self.num_experts} cannot be num_groups={groups} equal groups; set "
                f"num_groups to a divisor of {self.num_experts}"
            ]
        if not 1 <= top <= groups:
            return [f"top_groups={top} of num_groups={groups}; set it between 1 and {groups}"]
        reach = top * (self.num_experts // groups)
        if reach < self.top_k:
            least = math.ceil(self.top_k / (self.num_experts // groups))
            return [
                f"top_groups={top} of num_groups={groups} leave {reach} experts, but "
                f"top_k={self.top_k}; set top_groups to {least} or more"
            ]
        return []

    def check_split(self, num_ranks: int, tensor: int = 1) -> list[str]:
        """Why so many expert ranks, and tensor ranks in each expert, cannot share the experts."""
        found: list[str] = []
        if num_ranks > self.num_experts:
            found.append(
                f"{self.num_experts} experts over {num_ranks} expert ranks, of which each needs "
                f"one; use {self.num_experts} ranks or fewer"
            )
        for name, width in (("hidden", self.hidden), ("shared_hidden", self.shared_hidden)):
            if width is not None and width < tensor:
                found.append(
                    f"{name}={width} over {tensor} tensor ranks, of which each needs a channel; "
                    f"use {tensor} or more"
                )
        return found

    @property
    def has_balance_loss(self) -> bool:
        return self.balance in ("aux_loss", "global_aux_loss")


def shape_of_options(options: Mapping[str, Any]) -> MoEShape:
    """The shape that options of these names describe; others are passed over, and those that are
    None have the defaults.

    Raises:
        LayoutError: lists everything that does not fit.
    """
    known = {field.name for field in fields(MoEShape)}
    given = {name: x for name, x in options.items() if name in known and x is not None}
    return MoEShape(**given)

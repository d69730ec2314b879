"""Sizes of a mixture of experts, and checks that they fit together. No torch.

`parallel/expert/shape.py` derives the layouts of its parameters.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from torchdistpackage.layout.balances import BALANCES, BalanceSpec
from torchdistpackage.layout.partition import refuse

Score = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEShape:
    """Sizes and options of one mixture of experts, without the width of the model.

    num_experts, top_k: each token goes to `top_k` of `num_experts`. hidden: width of one expert.
    score: function that the router applies to its logits.
    normalize: divide the weights of a token's experts by their sum; `route_scale` multiplies them
        after that.
    num_groups, top_groups: experts are in `num_groups` equal groups, of which a token may choose
        from the best `top_groups` (DeepSeek-V3, arXiv:2412.19437, node-limited routing).
    balance: a name in `BALANCES`: `aux_loss` (Switch, arXiv:2101.03961) from the counts of each
        sequence, `global_aux_loss` from those of the global batch, `bias` (loss-free,
        arXiv:2408.15664), ...
    aux_loss: coefficient of that loss. z_loss: coefficient of the squared log-sum-exp of the
        logits (ST-MoE, arXiv:2202.08906). bias_rate: how far a bias moves in each step.
    capacity_factor: tokens that an expert accepts from each sequence, as a multiple of the mean;
        None: no limit.
    pad_to_capacity: in training each expert is sent all its places, empty ones as zeros, so sizes
        of messages follow from the shape of the input and no host reads counts of a device.
    shared_hidden: width of an MLP that every token goes through; None: there is none.
    shared_gate: a sigmoid gate of its own weights the shared expert.
    jitter: multiply the router's input in training by a random factor of 1 +- jitter.

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
    balance: str = "aux_loss"
    aux_loss: float = 0.01
    z_loss: float = 0.0
    bias_rate: float = 0.001
    capacity_factor: float | None = None
    pad_to_capacity: bool = False
    shared_hidden: int | None = None
    shared_gate: bool = False
    jitter: float = 0.0

    def __post_init__(self) -> None:
        refuse("mixture of experts", self.problems())

    def problems(self) -> list[str]:
        """Return one sentence for each misfit, with its numbers and what to change."""
        problems: list[str] = []
        sizes = {"num_experts": self.num_experts, "top_k": self.top_k, "hidden": self.hidden}
        problems += [
            f"{name}={value}; set it to 1 or more" for name, value in sizes.items() if value < 1
        ]
        if not problems and self.top_k > self.num_experts:
            problems.append(
                f"top_k={self.top_k} experts for each token, of num_experts={self.num_experts}; "
                f"set top_k to {self.num_experts} or less"
            )
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            problems.append(
                f"capacity_factor={self.capacity_factor:g} leaves the experts no place; set it "
                f"above 0, or leave it out to drop nothing"
            )
        if self.pad_to_capacity and self.capacity_factor is None:
            problems.append(
                f"pad_to_capacity fills the places that capacity_factor counts, which is not "
                f"given; set it, to {self.num_experts / max(self.top_k, 1):g} (num_experts / "
                f"top_k) if no token may be dropped"
            )
        for name, names in (("score", get_args(Score)), ("balance", BALANCES)):
            if (value := getattr(self, name)) not in names:
                problems.append(f"{name}={value!r} is unknown; use {', '.join(names)}")
        for name in ("aux_loss", "z_loss", "bias_rate"):
            if not getattr(self, name) >= 0:
                problems.append(f"{name}={getattr(self, name)}; set it to 0 or more")
        if not 0 <= self.jitter < 1:
            problems.append(f"jitter={self.jitter:g}; set it between 0 and 1")
        if self.shared_hidden is not None and self.shared_hidden < 1:
            problems.append(
                f"shared_hidden={self.shared_hidden}; set it to 1 or more, or leave it out"
            )
        if self.shared_gate and self.shared_hidden is None:
            problems.append("shared_gate without shared_hidden; give the shared expert a width")
        is_sized = min(*sizes.values(), self.num_experts - self.top_k + 1) >= 1
        return problems + (self._group_problems() if is_sized else [])

    def _group_problems(self) -> list[str]:
        """Return why the experts cannot form `num_groups` groups of which a token uses
        `top_groups`.
        """
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

    def capacity(self, seq_len: int) -> int:
        """Return the places of an expert in a sequence: `capacity_factor` times the mean, rounded
        up, at most one for each token.
        """
        assert self.capacity_factor is not None
        places = math.ceil(self.capacity_factor * seq_len * self.top_k / self.num_experts)
        return min(places, seq_len)

    def padded_rows(self, seq_len: int, batch: int) -> int | None:
        """Return the rows that each expert gets in training; None: as many as tokens choose it."""
        return self.capacity(seq_len) * batch if self.pad_to_capacity else None

    def check_split(self, num_ranks: int, tensor: int = 1) -> list[str]:
        """Return why `num_ranks` expert ranks with `tensor` tensor ranks each cannot share the
        experts.
        """
        problems: list[str] = []
        if num_ranks > self.num_experts:
            problems.append(
                f"{self.num_experts} experts over {num_ranks} expert ranks, of which each needs "
                f"one; use {self.num_experts} ranks or fewer"
            )
        for name, width in (("hidden", self.hidden), ("shared_hidden", self.shared_hidden)):
            if width is not None and width < tensor:
                problems.append(
                    f"{name}={width} over {tensor} tensor ranks, of which each needs a channel; "
                    f"use {tensor} or more"
                )
        return problems

    @property
    def balancing(self) -> BalanceSpec:
        """The row of the balance."""
        return BALANCES[self.balance]

    @property
    def has_balance_loss(self) -> bool:
        """True if balancing adds a loss, not a bias."""
        return bool(self.balancing.loss)


def shape_of_options(options: Mapping[str, Any]) -> MoEShape:
    """Build a `MoEShape` from the options of its field names; ignore other names and None values.

    Raises:
        LayoutError: lists everything that does not fit.
    """
    field_names = {field.name for field in fields(MoEShape)}
    values = {name: x for name, x in options.items() if name in field_names and x is not None}
    return MoEShape(**values)

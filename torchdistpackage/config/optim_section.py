"""The optim section of the YAML file: the optimizer, and the learning rate over the run."""

from collections import Counter
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import Field

from torchdistpackage.config import types as k
from torchdistpackage.config.optimizers import OPTIMIZERS, OWN, OptimizerSpec
from torchdistpackage.config.types import Section

SCHEDULE_ARGS: Mapping[str, tuple[str, ...]] = {
    "warmup_cosine": (),
    "constant": (),
    "constant_with_warmup": (),
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        "num_decay_steps",
        "num_stable_steps",
        "warmup_type",
        "decay_type",
        "min_lr_ratio",
        "num_cycles",
    ),
}
"""Arguments that optim.schedule_args accepts, by optim.schedule, with their names in
transformers.
"""
SCHEDULE_SHAPES = ("linear", "cosine", "1-sqrt")
"""Values of warmup_type and decay_type of warmup_stable_decay."""


class ParamGroupSection(Section):
    """Parameters with their own learning rate or weight decay."""

    params: k.Patterns = Field(
        default=(),
        description="Patterns of names of parameters, as those of files: `*` stands for any "
        "letters. tdp checkpoint show prints the names.",
    )
    lr: k.PositiveOrNull = Field(
        default=None,
        description="Highest learning rate of these parameters; optim.schedule changes it in the "
        "same proportion. null: optim.lr.",
    )
    weight_decay: k.NotNegativeOrNull = Field(
        default=None,
        description="Weight decay of these parameters; biases and "
        "norms have none even here. null: optim.weight_decay.",
    )

    def matches(self, name: str) -> bool:
        """Return whether this global parameter name matches one of the patterns."""
        return any(fnmatchcase(name, pattern) for pattern in self.params)


ParamGroups = Annotated[
    tuple[ParamGroupSection, ...],
    k.Listed,
    k.Expected(f"a list of mappings with {', '.join(ParamGroupSection.model_fields)}"),
]


class OptimSection(Section):
    """The optimizer, and the learning rate over the run."""

    name: k.OptimizerName = Field(
        default="adamw",
        description="Optimizer. muon updates matrices, and leaves embeddings, the head and all "
        "else to AdamW. adamw8bit keeps its state in 8 bits (bitsandbytes), except for embeddings "
        "and the head.",
    )
    target: k.ImportPath = Field(
        default=None,
        description="Import path of your own optimizer, such as mine:MyOptimizer, instead of name. "
        "It is called as target(groups, lr=lr, **args) and returns a torch.optim.Optimizer "
        "(docs/own_code.md).",
    )
    args: k.FreeForm = Field(
        default_factory=dict, description="Keyword arguments of target, besides lr."
    )
    lr: k.Positive = Field(
        default=1e-3, description="Highest learning rate, reached at the end of warm-up."
    )
    weight_decay: k.NotNegative = Field(
        default=0.1,
        description="Weight decay of parameters with two or more dims; biases and norms have "
        "none. It is decoupled from the gradient, except for sgd.",
    )
    betas: k.Betas = Field(
        default=(0.9, 0.95),
        description="Decay rates of AdamW's running means of the gradient and of its square.",
    )
    momentum: k.Fraction = Field(default=0.95, description="Momentum of sgd and muon.")
    muon_scale: k.MuonScale = Field(
        default="moonlight",
        description="Scale of muon's updates. With moonlight they have the size of AdamW's, so "
        "that one lr serves both; with original they are larger for tall matrices alone.",
    )
    muon_exchange: k.MuonExchange = Field(
        default="auto",
        description="How tensor ranks update the matrices that they share. gather brings each to "
        "an owner; with together all iterate on their parts and sum the products. auto chooses "
        "for each matrix by bytes and time.",
    )
    eps: k.Positive = Field(
        default=1e-8,
        description="Small number that AdamW adds to the denominator of an update, against "
        "division by zero.",
    )
    groups: ParamGroups = Field(
        default=(),
        description="List of parameters with a learning rate or weight decay of their own, each a "
        "mapping with params, lr and weight_decay. The first that matches a parameter decides.",
    )
    clip: k.NotNegative = Field(
        default=1.0,
        description="Largest norm of the gradient over all parameters. A larger gradient is "
        "scaled down to it; 0 is off.",
    )
    ema_decay: k.DecayOrNull = Field(
        default=None,
        description="Decay in each step of exponential moving averages of the weights, such as "
        "0.999, which checkpoints hold besides; tdp export --ema and tdp eval --ema take them. "
        "null is off.",
    )
    schedule: k.LrSchedule = Field(
        default="warmup_cosine",
        description="How the learning rate changes over the run: warmup_cosine of this package, "
        "or a schedule of transformers by its name.",
    )
    schedule_args: k.FreeForm = Field(
        default_factory=dict,
        description="Arguments of a schedule of transformers, such as {num_cycles: 2}.",
    )
    warmup_steps: k.StepsOrNull = Field(
        default=None,
        description="Number of steps in which the learning rate rises from 0 to lr; null: 20, but "
        "at most a tenth of train.steps.",
    )
    min_lr_ratio: k.Fraction = Field(
        default=0.1,
        description="Only for warmup_cosine: learning rate at the end of the run, divided by lr.",
    )

    @property
    def spec(self) -> OptimizerSpec:
        """Return the row of the optimizer: that of `name`, or the row for a user's optimizer."""
        return OPTIMIZERS[self.name] if self.target is None else OWN

    def group_of(self, name: str) -> int | None:
        """Return the index of the group of the parameter with this global name, or None."""
        return next((i for i, group in enumerate(self.groups) if group.matches(name)), None)

    def unmatched_groups(self, names: Collection[str]) -> dict[str, str]:
        """Return, by key, the problem of each group that matches no trained parameter.

        names: global names of the trained parameters.
        """
        counts = Counter(self.group_of(name) for name in names)
        problems: dict[str, str] = {}
        for index, group in enumerate(self.groups):
            if counts[index]:
                continue
            patterns = ", ".join(group.params)
            if matches := [name for name in names if group.matches(name)]:
                why = (
                    f"each of its {len(matches)} parameters, such as {matches[0]}, is in an "
                    f"earlier group; put it first"
                )
            else:
                near = get_close_matches(patterns.strip("*"), names, 3, 0.0)
                why = f"their names are such as {', '.join(near)}; correct the pattern"
            problems[f"optim.groups[{index}]"] = (
                f"optim.groups[{index}] (params {patterns}) matches none of the {len(names)} "
                f"parameters that train: {why}"
            )
        return problems

    def warmup(self, num_steps: int) -> int:
        """Return the number of warm-up steps in a run of `num_steps`."""
        return min(20, num_steps // 10) if self.warmup_steps is None else self.warmup_steps

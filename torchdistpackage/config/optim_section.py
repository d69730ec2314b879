"""The optim section of the YAML file: the optimizer, and the learning rate over the run."""

from collections.abc import Mapping

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
"""Arguments that optim.schedule_args may hold, by optim.schedule; their names in transformers."""
SCHEDULE_SHAPES = ("linear", "cosine", "1-sqrt")
"""Values of warmup_type and decay_type of warmup_stable_decay."""


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
    eps: k.Positive = Field(
        default=1e-8,
        description="Small number that AdamW adds to the denominator of an update, against "
        "division by zero.",
    )
    clip: k.NotNegative = Field(
        default=1.0,
        description="Largest norm of the gradient over all parameters. A larger gradient is "
        "scaled down to it; 0 is off.",
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
        """Return the row of the optimizer: that of `name`, or of every optimizer of a user."""
        return OPTIMIZERS[self.name] if self.target is None else OWN

    def warmup(self, num_steps: int) -> int:
        """Return the number of warm-up steps in a run of `num_steps`."""
        return min(20, num_steps // 10) if self.warmup_steps is None else self.warmup_steps

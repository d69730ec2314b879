"""The optim section of the YAML file: the optimizer, and the learning rate over time."""

from collections.abc import Mapping

from pydantic import Field

from torchdistpackage.config import types as k
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
        *("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type"),
        *("min_lr_ratio", "num_cycles"),
    ),
}
"""What optim.schedule_args may name, for each optim.schedule: arguments of transformers."""
NEEDS_WHOLE: Mapping[str, str] = {
    "muon": "makes the update of a whole matrix orthogonal",
    "adafactor": "follows means over whole rows and columns",
    "adamw8bit": "scales its statistics by blocks of a whole parameter",
}
"""Optimizers whose update of an element reads others of its parameter: optim.name, and how."""
STATE_KEYS: Mapping[str, tuple[str, ...]] = {
    "adamw": ("exp_avg",),
    "adamw8bit": ("state1",),
    "adafactor": ("row_var", "variance"),
}
"""What optimizers that cannot begin on the state of another one keep, one of these at least."""
MIN_8BIT_SIZE, BLOCK_SIZE = 4096, 256
"""Of adamw8bit: elements from which a parameter's statistics have 8 bits, and of a block of them
with one scale."""
SCHEDULE_SHAPES = ("linear", "cosine", "1-sqrt")
"""warmup_type and decay_type of warmup_stable_decay."""


class OptimSection(Section):
    """How weights follow gradients, and the learning rate over time."""

    name: k.OptimizerName = Field(
        default="adamw",
        description="Optimizer; muon: of matrices but for embeddings and the head, AdamW of the "
        "rest; adamw8bit: of bitsandbytes, AdamW of embeddings and the head.",
    )
    lr: k.Positive = Field(default=1e-3, description="Learning rate after warm-up.")
    weight_decay: k.NotNegative = Field(
        default=0.1,
        description="Decoupled weight decay (of sgd added to the gradient), of parameters of two "
        "dims or more: none of biases and norms, also where these have two dims, as those of heads "
        "or experts.",
    )
    betas: k.Betas = Field(
        default=(0.9, 0.95), description="Of adamw: decay of the two running means."
    )
    momentum: k.Fraction = Field(default=0.95, description="Of sgd and muon.")
    eps: k.Positive = Field(
        default=1e-8, description="Added to the denominator of the update; not of adafactor."
    )
    clip: k.NotNegative = Field(default=1.0, description="Largest global gradient norm; 0 is off.")
    schedule: k.LrSchedule = Field(
        default="warmup_cosine",
        description="Learning rate over the steps: ours, or one by its name in transformers.",
    )
    schedule_args: k.FreeForm = Field(
        default_factory=dict, description="Arguments of a schedule of transformers."
    )
    warmup_steps: k.StepsOrNull = Field(
        default=None,
        description="Steps of linear warm-up from 0; null: 20, but at most a tenth of train.steps. "
        "A shorter run ends within it.",
    )
    min_lr_ratio: k.Fraction = Field(
        default=0.1, description="Of warmup_cosine: learning rate at the end, over lr."
    )

    def warmup(self, num_steps: int) -> int:
        """Steps of warm-up in a run of so many steps."""
        return min(20, num_steps // 10) if self.warmup_steps is None else self.warmup_steps

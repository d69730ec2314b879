"""Rotary position settings as numbers: the base of the frequencies and their scaling. No torch.

Names and meanings are those of `rope_parameters` in a transformers configuration. A scaling makes
a model that was trained on `original_max_position_embeddings` tokens read `factor` times as many:

- linear: every frequency over `factor` (Chen et al., arXiv:2306.15595).
- llama3: low frequencies over `factor`, high ones as they are, smoothly in between (Llama 3.1).
- yarn: the same by a linear ramp over channels, and larger attention logits (Peng et al.,
  arXiv:2309.00071).
"""

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

from torchdistpackage.errors import LayoutError

RopeType = Literal["default", "linear", "llama3", "yarn"]
_ORIGINAL = "original_max_position_embeddings"
NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
}
"""Fields that each type requires."""
TAKES = {
    **NEEDS,
    "yarn": (
        *NEEDS["yarn"],
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
"""Fields that each type reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Settings of rotary positions. Fields that `type` does not read are None.

    theta: base of the frequencies.
    low_freq_factor, high_freq_factor: for llama3. Wavelengths of at least
        original_max_position_embeddings / low_freq_factor are scaled in full, those of at most
        original_max_position_embeddings / high_freq_factor not at all.
    beta_fast, beta_slow: for yarn. Channels with at least beta_fast rotations within the original
        length are not scaled, those with at most beta_slow in full; default 32 and 1.
    attention_factor: for yarn. It multiplies both tables; default 0.1 ln(factor) + 1, or the value
        that follows from `mscale` and `mscale_all_dim`.
    truncate: for yarn. The ramp begins and ends at whole channels; default true.

    Raises:
        LayoutError: lists the numbers that are missing, unread or impossible.
    """

    theta: float = 10000.0
    type: RopeType = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise LayoutError(f"rope: {'; '.join(problems)}")

    def problems(self) -> list[str]:
        """Return one sentence for each problem, with its numbers and what to change."""
        if self.type not in NEEDS:
            return [f"type={self.type!r} is unknown; use {', '.join(get_args(RopeType))}"]
        fields_set = {x.name for x in fields(self) if getattr(self, x.name) is not None}
        fields_set -= {"theta", "type"}
        problems: list[str] = []
        if missing := [name for name in NEEDS[self.type] if name not in fields_set]:
            problems.append(f"type={self.type} needs {', '.join(missing)}")
        if unread := sorted(fields_set - {*TAKES[self.type]}):
            problems.append(
                f"{', '.join(unread)} would not be read with type={self.type}; remove it"
            )
        below = self.theta <= 1, self.factor is not None and self.factor < 1
        for name, wrong in zip(("theta", "factor"), below, strict=True):
            if wrong:
                least = "above 1" if name == "theta" else "1 or more"
                problems.append(f"{name}={getattr(self, name):g}; set it to {least}")
        low_factor, high_factor = self.low_freq_factor, self.high_freq_factor
        if low_factor is not None and high_factor is not None and not 0 < low_factor < high_factor:
            problems.append(
                f"low_freq_factor={low_factor:g} and high_freq_factor={high_factor:g}; set the "
                "first above 0 and below the second"
            )
        if (self.beta_fast or 32) <= (self.beta_slow or 1):
            problems.append(
                f"beta_fast={self.beta_fast or 32:g} and beta_slow={self.beta_slow or 1:g}; set "
                "the first above the second"
            )
        return problems

    @property
    def table_factor(self) -> float:
        """Factor that multiplies cosines and sines: 1 for every type but yarn."""
        if self.type != "yarn" or self.factor is None:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            over = _logit_factor(self.factor, self.mscale_all_dim)
            return _logit_factor(self.factor, self.mscale) / over
        return _logit_factor(self.factor, 1.0)

    def yarn_ramp(self, head_dim: int) -> tuple[float, float]:
        """Return the two channel pairs between which yarn changes from no scaling to full
        scaling.
        """
        assert self.original_max_position_embeddings is not None
        original = self.original_max_position_embeddings
        low, high = (
            head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
            for turns in (self.beta_fast or 32, self.beta_slow or 1)
        )
        if self.truncate is None or self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, head_dim - 1)


UNSCALED = Rope()


def scaled_length(positions: int, factor: float | None, original: int | None) -> int:
    """Return the number of tokens that a model serves with `positions` and a scaling by `factor`.

    It is the larger of two readings of `max_position_embeddings` (`positions`): some configurations
    count before the scaling, others after it.
    """
    return max(positions, int((original or positions) * (factor or 1.0)))


def _logit_factor(factor: float, mscale: float) -> float:
    """Return yarn's factor of attention logits for a scaling by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

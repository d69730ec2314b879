"""Rotary positions as numbers: the base of their frequencies and how it is scaled. No torch.

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
"""Of each type the numbers that it cannot do without."""
TAKES = {
    **NEEDS,
    "yarn": (
        *NEEDS["yarn"],
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
"""Of each type the numbers that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """theta: base of the frequencies. What `type` does not read is None.

    low_freq_factor, high_freq_factor: of llama3: a wavelength of
        original_max_position_embeddings / low_freq_factor or more is scaled in full, one of
        original_max_position_embeddings / high_freq_factor or less not at all.
    beta_fast, beta_slow: of yarn: the rotations within the original length from which a channel
        is not scaled, and up to which it is in full; default 32 and 1.
    attention_factor: of yarn: both tables are multiplied by it; default 0.1 ln(factor) + 1, or as
        `mscale` and `mscale_all_dim` say.
    truncate: of yarn: the ramp begins and ends at whole channels; default true.

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
        if found := self.problems():
            raise LayoutError(f"rope: {'; '.join(found)}")

    def problems(self) -> list[str]:
        """What is wrong, each with its numbers and what to change."""
        if self.type not in NEEDS:
            return [f"type={self.type!r} is unknown; use {', '.join(get_args(RopeType))}"]
        given = {x.name for x in fields(self) if getattr(self, x.name) is not None}
        given -= {"theta", "type"}
        found: list[str] = []
        if missing := [name for name in NEEDS[self.type] if name not in given]:
            found.append(f"type={self.type} needs {', '.join(missing)}")
        if unread := sorted(given - {*TAKES[self.type]}):
            found.append(f"{', '.join(unread)} would not be read with type={self.type}; remove it")
        below = self.theta <= 1, self.factor is not None and self.factor < 1
        for name, wrong in zip(("theta", "factor"), below, strict=True):
            if wrong:
                least = "above 1" if name == "theta" else "1 or more"
                found.append(f"{name}={getattr(self, name):g}; set it to {least}")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and not 0 < low < high:
            found.append(
                f"low_freq_factor={low:g} and high_freq_factor={high:g}; the first is above 0 and "
                f"below the second"
            )
        if (self.beta_fast or 32) <= (self.beta_slow or 1):
            found.append(
                f"beta_fast={self.beta_fast or 32:g} and beta_slow={self.beta_slow or 1:g}; the "
                f"first is above the second"
            )
        return found

    @property
    def table_factor(self) -> float:
        """What cosines and sines are multiplied by: 1 but for yarn."""
        if self.type != "yarn" or self.factor is None:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            over = _logit_factor(self.factor, self.mscale_all_dim)
            return _logit_factor(self.factor, self.mscale) / over
        return _logit_factor(self.factor, 1.0)

    def yarn_ramp(self, head_dim: int) -> tuple[float, float]:
        """Channel pairs between which yarn goes from no scaling to full scaling."""
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
    """Tokens that `positions` (max_position_embeddings) are made for with a scaling by `factor`.

    The larger of both readings: some configurations count them before the scaling, others after it.
    """
    return max(positions, int((original or positions) * (factor or 1.0)))


def _logit_factor(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

"""Which dim of an activation is split over my group."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Cut:
    """A dim (>= 0) of a tensor that is split over the group, and its length over all ranks.

    loose: here it is 1 long and a view made it, in front of a dim that may be meant as well, since
        one head of 24 and 24 features behind a new dim are the same shape.
    """

    dim: int
    length: int
    loose: bool = field(default=False, compare=False)

    def behind(self, x: Tensor) -> "Cut":
        """A loose one, as that of the next dim of `x`."""
        return Cut(self.dim + 1, self.length * x.shape[self.dim + 1])


class Touches(Exception):
    """An operation would mix what different ranks hold."""


Args, Kwargs = Sequence[Any], Mapping[str, Any]
Rule = Callable[[Args, Kwargs, Any], Cut | None]
"""Arguments and the result of a call -> the cut of the result, of each tensor in it."""


def cut_of(x: object) -> Cut | None:
    """How an activation is split; None: it is whole. Parameters are not followed."""
    found = getattr(x, "__dict__", {}).get("_cut")
    return None if found is None or isinstance(x, nn.Parameter) else found

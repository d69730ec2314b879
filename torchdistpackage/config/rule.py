"""What a rule across sections is, and the words that rules share.

One rule about rules: each declares the keys it reads, so that it can be left out when one of
them is already wrong.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torchdistpackage.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Rule:
    """`fields`: the keys it reads; `says`: what is wrong, given the run and the world size."""

    fields: tuple[str, ...]
    message: Callable[[RunConfig, int | None], str | None]


def rule(*fields: str) -> Callable[[Callable[[RunConfig, int | None], str | None]], Rule]:
    return lambda says: Rule(fields, says)


def divisors(number: int, near: int) -> str:
    """The divisors of `number` at or around `near`, e.g. "2 or 4"."""
    near = min(near, number)
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    found = {*small, *(number // d for d in small)}
    below = max(d for d in found if d <= near)
    above = min((d for d in found if near < d <= 64 * near), default=below)
    return f"{below}" if above == below else f"{below} or {above}"


def multiples(number: int, near: int) -> str:
    """The multiples of `number` around `near`, e.g. "96 or 104"."""
    below = near // number * number
    return f"{below} or {below + number}" if below else f"{number}"

"""Orders in which asynchronous calls complete, each named by a token. No torch.

    late        a call completes when it is waited for
    late:early  a call completes when it is issued, or as soon as its peers have come
    late:7      at each issue and each wait, seed 7 decides for each group whether the next call
                of its queue completes
    late,strict any of them, and tensors in host memory are refused (strict.py)

A token replays its order: decisions depend on the seed, the rank and their number alone.
"""

import random
from dataclasses import dataclass, field

from torchdistpackage.errors import ConfigError

LATE = "late"


def is_late(transport: str) -> bool:
    """Return whether this names an order of the late transport, and not a back end.

    Raises:
        ConfigError: it names neither.
    """
    if transport == "gloo":
        return False
    Order(transport)
    return True


@dataclass
class Order:
    """The decisions of one rank under the order that `token` names; ConfigError: it names none."""

    token: str
    rank: int = 0
    strict: bool = field(default=False, init=False)
    _draws: random.Random | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        order, comma, more = self.token.partition(",")
        name, colon, seed_or_early = order.partition(":")
        is_valid = not colon or seed_or_early == "early" or seed_or_early.isdecimal()
        if name != LATE or not is_valid or more != ("strict" if comma else ""):
            raise ConfigError(
                f"transport {self.token!r} is not known; use gloo, late, late:early, or late:N "
                f"with a whole number N as the seed of an order of completion, each of the last "
                f"three also followed by ,strict"
            )
        self.strict = bool(comma)
        self._early = seed_or_early == "early"
        if seed_or_early.isdecimal():
            self._draws = random.Random(f"{seed_or_early}/{self.rank}")

    @property
    def at_wait_only(self) -> bool:
        return not self._early and self._draws is None

    def completes(self) -> bool:
        """Return whether the next call of a queue completes now."""
        return self._early or (self._draws is not None and self._draws.random() < 0.5)

"""The request of a bench: operations, sizes, element types, axes, and the rounds. No torch.

Sizes are those that are counted (comm/collective_table.py), in bytes. A *unit* is the ranks that
take part in one call: a group for a collective, two neighbours for a message. Within a round no
rank is in two units, and between rounds all ranks meet.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torchdistpackage.comm.collective_table import COLLECTIVES
from torchdistpackage.config.errors import nearest
from torchdistpackage.errors import ConfigError

ELEMENT_BYTES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bf16": 2,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}
"""Element types by their names in a configuration."""

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6}
_UNITS |= {"k": 2**10, "m": 2**20, "g": 2**30, "gb": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([a-z]*)", re.IGNORECASE)

Participants = tuple[int, ...]
Round = tuple[Participants, ...]

NODE, NETWORK = "node", "network"
"""The link of a unit: within one host, or over the network between hosts."""
ISOLATED, CONCURRENT = "alone", "together"
"""Modes: one unit at a time, or all units of an axis at once."""


@dataclass(frozen=True, slots=True)
class Request:
    """One bench.

    over: names of groups as tpc knows them; () for every axis longer than 1.
    sizes_bytes: counted bytes, ascending. isolated: how many groups of a kind are measured while
    all others are silent; 0 for none. pairs: also each rank with each other one. device: also how
    fast each rank computes. timeout_s: for one
    round, all iterations of one operation at one size.
    """

    operations: tuple[str, ...] = tuple(COLLECTIVES)
    sizes_bytes: tuple[int, ...] = (2**10, 2**14, 2**18, 2**22)
    dtypes: tuple[str, ...] = ("float32",)
    over: tuple[str, ...] = ()
    iterations: int = 20
    warmup: int = 3
    isolated: int = 2
    pairs: bool = False
    device: bool = False
    timeout_s: float = 60.0

    @property
    def gives_lines(self) -> bool:
        """Return whether there are two sizes in full elements, as a line through times needs."""
        return any(len(self.counted_sizes(dtype, 1)) > 1 for dtype in self.dtypes)

    def counted_sizes(self, dtype: str, num_parts: int) -> list[int]:
        """Return the sizes in bytes after rounding to full elements, each once."""
        width = ELEMENT_BYTES[dtype]
        sizes = [whole_elements(x, dtype, num_parts) * width for x in self.sizes_bytes]
        return list(dict.fromkeys(sizes))


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return sizes in bytes: `1KiB,3MiB` lists them, `1KiB:16MiB` doubles, `...:x4` quadruples.

    Raises:
        ConfigError: a part reads as no size, is zero, or a range goes down.
    """
    sizes: set[int] = set()
    for part in parts_of(text, "size"):
        first, *rest = part.split(":")
        low = _size(first)
        high, factor = _size(rest[0]) if rest else low, 2
        if len(rest) == 2:
            step = rest[1].strip().removeprefix("x")
            factor = int(step) if step.isdecimal() else 0
            if factor < 2:
                raise ConfigError(
                    f"sizes {part!r}: {rest[1]!r} is not a step; write x2, x4 or another factor"
                )
        if len(rest) > 2 or high < low:
            raise ConfigError(
                f"sizes {part!r}: a range is FROM:TO or FROM:TO:xN and goes up, e.g. 1KiB:16MiB:x4"
            )
        while low <= high:
            sizes.add(low)
            low *= factor
    return tuple(sorted(sizes))


def parse_names(text: str, noun: str, names: Collection[str]) -> tuple[str, ...]:
    """Return the names between commas in the text, each once; all must be among `names`.

    Raises:
        ConfigError: there is no such name; lists those there are.
    """
    parts = parts_of(text, noun)
    for part in parts:
        if part not in names:
            close = nearest(part, names)
            suggestion = f" (did you mean {close}?)" if close else ""
            raise ConfigError(
                f"there is no {noun} {part!r}{suggestion}; use one of {', '.join(names)}"
            )
    return tuple(dict.fromkeys(parts))


def whole_elements(size_bytes: int, dtype: str, num_parts: int) -> int:
    """Return the elements of `size_bytes`, rounded up to a multiple of `num_parts`."""
    return -(-size_bytes // (ELEMENT_BYTES[dtype] * num_parts)) * num_parts


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(
            f"{text!r} is not a size; write a number and B, KiB, MiB or GiB, e.g. 4MiB"
        )
    size_bytes = float(match[1]) * _UNITS[match[2].lower()]
    if size_bytes < 1 or size_bytes != int(size_bytes):
        raise ConfigError(
            f"size {text!r} is {size_bytes:g} bytes; use a whole number of bytes, 1 or more"
        )
    return int(size_bytes)


def parts_of(text: str, noun: str) -> Sequence[str]:
    """Return the fields of a text between commas; raises ConfigError if there are none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"no {noun} is named in {text!r}; write one, or several with commas")
    return parts


def link_of(unit: Participants, hosts: Sequence[str]) -> str:
    """Return NODE if all ranks are on one host, else NETWORK; `hosts` by rank."""
    return NODE if len({hosts[rank] for rank in unit}) == 1 else NETWORK


def units_of(groups: Iterable[Sequence[int]], is_message: bool) -> list[Participants]:
    """Return the groups of more than one rank, or the neighbours in them: (0, 1), (1, 2), ..."""
    units: list[Participants] = []
    for ranks in map(tuple, groups):
        if is_message:
            units += itertools.pairwise(ranks)
        elif len(ranks) > 1:
            units.append(ranks)
    return units


def one_by_one(units: Sequence[Participants], hosts: Sequence[str], limit: int) -> list[Round]:
    """Return rounds of one unit each: up to `limit` units of each link, spread over all units."""
    chosen: list[Participants] = []
    for link in (NODE, NETWORK):
        same = [unit for unit in units if link_of(unit, hosts) == link]
        number = min(limit, len(same))
        chosen += [same[i * len(same) // number] for i in range(number)]
    return [(unit,) for unit in chosen]


def all_at_once(units: Sequence[Participants]) -> list[Round]:
    """Split the pairs greedily into few rounds: one for groups, two for neighbours along a line."""
    rounds: list[tuple[list[Participants], set[int]]] = []
    for unit in units:
        for members, busy in rounds:
            if busy.isdisjoint(unit):
                members.append(unit)
                busy.update(unit)
                break
        else:
            rounds.append(([unit], set(unit)))
    return [tuple(members) for members, _ in rounds]


def tournament(num_ranks: int) -> list[Round]:
    """Return rounds of pairs in which every rank meets every other rank exactly once.

    The circle method: rank 0 sits still, the others move on by one seat a round and meet the one
    opposite; with an odd number one of them pauses. num_ranks - 1 rounds, or num_ranks if odd.
    """
    seats = list(range(num_ranks)) + ([-1] if num_ranks % 2 else [])
    rounds: list[Round] = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append(tuple((min(p), max(p)) for p in pairs if -1 not in p))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds

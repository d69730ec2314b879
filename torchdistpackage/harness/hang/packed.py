"""Dumps of thousands of ranks in few bytes: what all ranks repeat is left out. No torch.

Ranks of a group lie on a mesh, so a few numbers say them all; calls and stacks compress well.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

_PACKED = "z"
"""First letter of a packed text; a JSON text begins with a bracket."""

_EACH = ("sequence", "age_s", "state")
"""Fields that differ between calls of one kind."""


class RankTuple(tuple[int, ...]):
    """Ranks of a group; hashed once, however many calls name them."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


class CallRows(Sequence[dict[str, Any]]):
    """Calls of a snapshot, each put together when it is asked for: few of thousands of ranks' are.

    kinds: what calls repeat. rows: of each call the place of its kind, and the values of `_EACH`.
    """

    def __init__(self, kinds: Sequence[Mapping[str, Any]], rows: Sequence[Sequence[Any]]) -> None:
        if {len(row) for row in rows} - {4} or {row[0] for row in rows} - {*range(len(kinds))}:
            raise ValueError("a call is incomplete")
        self.kinds, self.rows = kinds, rows

    @classmethod
    def of(cls, calls: Sequence[dict[str, Any]]) -> "CallRows":
        """Return calls that are not packed as if they were."""
        if isinstance(calls, CallRows):
            return calls
        return cls(calls, [(i, *(call[name] for name in _EACH)) for i, call in enumerate(calls)])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place, sequence, age_s, state = self.rows[index]
        return {**self.kinds[place], "sequence": sequence, "age_s": age_s, "state": state}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def pack(fields: dict[str, Any]) -> str:
    """Return the fields of a dump as text. The lists of ranks in its snapshot become short."""
    kinds: list[dict[str, Any]] = []
    if snapshot := fields.get("snapshot"):
        groups = [{**group, "ranks": _strides(group["ranks"])} for group in snapshot["groups"]]
        places: dict[str, int] = {}
        rows: list[list[Any]] = []
        for call in snapshot["calls"]:
            kind = {name: x for name, x in call.items() if name not in _EACH}
            place = places.setdefault(str(kind), len(kinds))
            if place == len(kinds):
                kinds.append(kind)
            rows.append([place, *(call[name] for name in _EACH)])
        fields = {**fields, "snapshot": {**snapshot, "groups": groups, "calls": rows}}
    # apart from what differs: most ranks say the same, which is then read once
    parts = [{**fields, "stacks": ()}, kinds, list(fields["stacks"])]
    text = "\0".join(json.dumps(part, separators=(",", ":")) for part in parts)
    return _PACKED + base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def unpack(text: str) -> dict[str, Any]:
    """Return the fields. ValueError: the text is none of `pack`."""
    try:
        if not text.startswith(_PACKED):
            return json.loads(text)
        parts = zlib.decompress(base64.b64decode(text[1:])).decode().split("\0")
    except zlib.error as error:
        raise ValueError(f"it is incomplete: {error}") from error
    fields: dict[str, Any] = json.loads(parts[0])
    kinds, fields["stacks"] = _known(parts[1]), _known(parts[2])
    if snapshot := fields.get("snapshot"):
        snapshot["calls"] = CallRows(kinds, snapshot["calls"])
    for group in (fields.get("snapshot") or {}).get("groups", ()):
        if isinstance(strides := group["ranks"], dict):
            first, *dims = strides["strides"]
            group["ranks"] = _ranks(first, tuple(map(tuple, dims)))
    return fields


@lru_cache(256)
def _known(text: str) -> list[Any]:
    return json.loads(text)


def _strides(ranks: Sequence[int]) -> Sequence[int] | dict[str, list[Any]]:
    """Return the first rank and (number, distance) of each dim; the ranks where no mesh has them.

    `{"strides": [0, [4, 2]]}` are ranks 0, 2, 4, 6.
    """
    dims: list[tuple[int, int]] = []
    remaining = list(ranks)
    while len(remaining) > 1 and len(dims) < 4:
        step = remaining[1] - remaining[0]
        number = next(
            (i for i in range(1, len(remaining)) if remaining[i] - remaining[i - 1] != step),
            len(remaining),
        )
        if len(remaining) % number:
            break
        dims.insert(0, (number, step))
        remaining = remaining[::number]
    if len(remaining) != 1 or _ranks(remaining[0], tuple(dims)) != tuple(ranks):
        return list(ranks)
    return {"strides": [remaining[0], *map(list, dims)]}


@lru_cache(1 << 14)
def _ranks(first: int, dims: tuple[tuple[int, int], ...]) -> RankTuple:
    unpacked = [first]
    for number, step in dims:
        unpacked = [rank + i * step for rank in unpacked for i in range(number)]
    return RankTuple(unpacked)

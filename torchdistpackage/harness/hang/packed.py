"""Dumps of thousands of ranks in few bytes, without what all ranks repeat. No torch.

Ranks of a group lie on a mesh, so a few numbers describe them; calls and stacks compress well.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
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


class CallColumns:
    """Calls of a snapshot by column, but for their ages; ranks that say the same share one.

    kinds: what calls repeat. places: of each call the place of its kind. sequences, states: of
    each call.
    """

    def __init__(
        self,
        kinds: Sequence[Mapping[str, Any]],
        places: Sequence[int],
        sequences: Sequence[int],
        states: Sequence[str],
    ) -> None:
        if len({len(places), len(sequences), len(states)}) > 1:
            raise ValueError("a call is incomplete")
        if set(places) - {*range(len(kinds))}:
            raise ValueError("a call has no kind")
        self.kinds, self.places = kinds, places
        self.sequences, self.states = sequences, states

    @cached_property
    def waiting(self) -> list[int]:
        """Return the positions of the calls that block the host."""
        return [i for i, state in enumerate(self.states) if state == "waiting"]

    @cached_property
    def last(self) -> list[tuple[int, int]]:
        """Return (group, position) of the last call of each line among those that do not block the
        host.
        """
        lines = [_line(kind) for kind in self.kinds]
        last = {lines[position]: i for i, position in enumerate(self.places)}
        return [(call_line[0], i) for call_line, i in last.items() if self.states[i] != "waiting"]

    @cached_property
    def by_sequence(self) -> dict[int, list[int]]:
        """Return a map from the number of a call to the positions of calls with it, last first."""
        positions: dict[int, list[int]] = {}
        for i in range(len(self.places) - 1, -1, -1):
            positions.setdefault(self.sequences[i], []).append(i)
        return positions


def _line(call: Mapping[str, Any]) -> tuple[int, Any, str]:
    """The fields shared by calls that wait for each other in turn, of one rank; see
    `RecordedCall.line`.
    """
    peer = call["peer"]
    return call["group"], peer, call["operation"] if peer is not None else ""


class CallRows(Sequence[dict[str, Any]]):
    """Calls of a snapshot, each put together when it is asked for: few of thousands of ranks' are.

    ages: of each call in seconds, or the text of their list.
    """

    def __init__(self, columns: CallColumns, ages: Sequence[float] | str) -> None:
        self.columns, self._ages = columns, ages

    @classmethod
    def of(cls, calls: Sequence[dict[str, Any]]) -> "CallRows":
        """Return unpacked calls in the same form."""
        if isinstance(calls, CallRows):
            return calls
        kinds = [{name: x for name, x in call.items() if name not in _EACH} for call in calls]
        numbers, states = ([call[name] for call in calls] for name in ("sequence", "state"))
        columns = CallColumns(kinds, range(len(calls)), numbers, states)
        return cls(columns, [call["age_s"] for call in calls])

    @property
    def ages(self) -> Sequence[float]:
        if isinstance(self._ages, str):
            self._ages = json.loads(self._ages)
        if len(self._ages) != len(self):
            raise ValueError("a call is incomplete")
        return self._ages

    def __len__(self) -> int:
        return len(self.columns.places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        columns = self.columns
        each = {"sequence": columns.sequences[index], "state": columns.states[index]}
        return {**columns.kinds[columns.places[index]], **each, "age_s": self.ages[index]}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def pack(fields: dict[str, Any]) -> str:
    """Return the fields of a dump as text. The lists of ranks in its snapshot become short."""
    kinds: list[dict[str, Any]] = []
    places: list[int] = []
    calls: Sequence[dict[str, Any]] = ()
    if snapshot := fields.get("snapshot"):
        groups = [{**group, "ranks": _strides(group["ranks"])} for group in snapshot["groups"]]
        calls = snapshot["calls"]
        place_of: dict[str, int] = {}
        for call in calls:
            kind = {name: x for name, x in call.items() if name not in _EACH}
            kind_index = place_of.setdefault(str(kind), len(kinds))
            if kind_index == len(kinds):
                kinds.append(kind)
            places.append(kind_index)
        fields = {**fields, "snapshot": {**snapshot, "groups": groups, "calls": ()}}
    sequences, ages, states = ([call[name] for call in calls] for name in _EACH)
    # apart from what differs: most ranks say the same, which is then read once
    alike = {"kinds": kinds, "places": places, "sequences": sequences, "states": states}
    parts = [{**fields, "stacks": ()}, alike, list(fields["stacks"]), ages]
    text = "\0".join(json.dumps(part, separators=(",", ":")) for part in parts)
    return _PACKED + base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def unpack(text: str) -> dict[str, Any]:
    """Return the fields. ValueError: the text was not made by `pack`."""
    try:
        if not text.startswith(_PACKED):
            return json.loads(text)
        parts = zlib.decompress(base64.b64decode(text[1:])).decode().split("\0")
    except zlib.error as error:
        raise ValueError(f"it is incomplete: {error}") from error
    if len(parts) != 4:
        raise ValueError(f"it has {len(parts)} parts, not 4")
    fields: dict[str, Any] = json.loads(parts[0])
    columns, fields["stacks"] = _columns(parts[1]), _known(parts[2])
    if snapshot := fields.get("snapshot"):
        snapshot["calls"] = CallRows(columns, parts[3])
    for group in (fields.get("snapshot") or {}).get("groups", ()):
        if isinstance(strides := group["ranks"], dict):
            first, *dims = strides["strides"]
            group["ranks"] = _ranks(first, tuple(map(tuple, dims)))
    return fields


@lru_cache(256)
def _known(text: str) -> list[Any]:
    return json.loads(text)


@lru_cache(256)
def _columns(text: str) -> CallColumns:
    return CallColumns(**json.loads(text))


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

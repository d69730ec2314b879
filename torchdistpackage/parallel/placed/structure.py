"""Nested arguments and outputs: their leaves in one order, and the rest as a skeleton.

Lists, tuples (named ones too), dicts and dataclasses nest; dicts are read by sorted key, so that
the order does not depend on how a rank has filled one. Anything else is carried as it is.
"""

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torchdistpackage.errors import PlacementError


class Hole(NamedTuple):
    """Stands in a skeleton for leaf number `index`."""

    index: int


_SCALARS = (str, bool, int, float, type(None))


def _is_dataclass(x: object) -> bool:
    return dataclasses.is_dataclass(x) and not isinstance(x, type)


def _keys(x: object) -> list[Any]:
    """What the parts of a container are called, in order; of anything else none."""
    if isinstance(x, dict):
        try:
            return sorted(x)
        except TypeError:
            return sorted(x, key=lambda key: (type(key).__name__, repr(key)))
    if isinstance(x, list | tuple):
        return list(range(len(x)))
    if _is_dataclass(x):
        return [field.name for field in dataclasses.fields(x)]  # type: ignore[arg-type]
    return []


def _part(x: Any, key: Any) -> Any:
    return x[key] if isinstance(x, dict | list | tuple) else getattr(x, key)


def _with(x: Any, parts: dict[Any, Any]) -> Any:
    """A container like `x` with these parts."""
    if isinstance(x, list):
        return list(parts.values())
    if isinstance(x, tuple):
        values = list(parts.values())
        named = hasattr(x, "_fields")
        return type(x)(*values) if named else type(x)(values)
    made = copy.copy(x)
    for key, value in parts.items():
        if isinstance(made, dict):
            made[key] = value
        else:
            object.__setattr__(made, key, value)
    return made


def flatten(x: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], Any]:
    """(the leaves in order, `x` with a `Hole` in the place of each)."""
    leaves: list[Any] = []

    def go(y: Any) -> Any:
        if is_leaf(y):
            leaves.append(y)
            return Hole(len(leaves) - 1)
        before = len(leaves)
        if type(y) is tuple:
            found = tuple([go(part) for part in y])
            return found if len(leaves) > before else y
        parts = {key: go(_part(y, key)) for key in _keys(y)}
        return _with(y, parts) if len(leaves) > before else y

    return leaves, go(x)


def fill(skeleton: Any, leaves: Sequence[Any] | Mapping[int, Any]) -> Any:
    """The value again, from its leaves; given other holes, the skeleton with those."""
    if type(skeleton) is Hole:
        return leaves[skeleton.index]
    if type(skeleton) is tuple:
        found = tuple([fill(part, leaves) for part in skeleton])
        changed = any(a is not b for a, b in zip(found, skeleton, strict=True))
        return found if changed else skeleton
    parts = {key: _part(skeleton, key) for key in _keys(skeleton)}
    if not parts:
        return skeleton
    filled = {key: fill(part, leaves) for key, part in parts.items()}
    if all(filled[key] is part for key, part in parts.items()):
        return skeleton
    return _with(skeleton, filled)


def holes(skeleton: Any) -> list[int]:
    """Numbers of the leaves in a skeleton, in order."""
    if isinstance(skeleton, Hole):
        return [skeleton.index]
    return [index for key in _keys(skeleton) for index in holes(_part(skeleton, key))]


def parts_of(skeleton: Any) -> tuple[str, list[Any]]:
    """(kind, names of the parts): `tensor`, `sequence`, `named` or `value`; plain enough for JSON.

    Tuples with names and dataclasses are `named`, so are dicts.
    """
    if isinstance(skeleton, Hole):
        return "tensor", []
    if isinstance(skeleton, tuple | list):
        return "sequence", _keys(skeleton)
    if isinstance(skeleton, dict) or _is_dataclass(skeleton):
        return "named", _keys(skeleton)
    return "value", []


def member(skeleton: Any, key: Any) -> Any:
    """The part of a skeleton that is called `key`.

    Raises:
        PlacementError: it has no such part.
    """
    names = _keys(skeleton)
    if isinstance(key, int) and key < 0 and isinstance(skeleton, list | tuple):
        key += len(names)
    if key not in names:
        raise PlacementError(f"an output has no part {key!r}; its parts are {names}")
    return _part(skeleton, key)


def to_text(skeleton: Any) -> str:
    """A skeleton for another rank.

    Raises:
        PlacementError: there is a value in it that another rank could not make.
    """
    return json.dumps(_plain(skeleton))


def from_text(text: str) -> Any:
    """What `to_text` wrote; named tuples come as tuples, dataclasses as dicts."""
    return _from_plain(json.loads(text))


def signature(skeleton: Any) -> str:
    """A text that is equal on all ranks for equal arguments; of what has no text, its type."""
    return json.dumps(_plain(skeleton, lambda x: {"type": type(x).__name__}))


def _plain(x: Any, other: Callable[[Any], Any] | None = None) -> Any:
    scalar = _scalar if other is None else lambda y: y if isinstance(y, _SCALARS) else other(y)
    if isinstance(x, Hole):
        return {"hole": x.index}
    if isinstance(x, dict) or _is_dataclass(x):
        return {"dict": [[scalar(key), _plain(_part(x, key), other)] for key in _keys(x)]}
    if isinstance(x, list | tuple):
        kind = "list" if isinstance(x, list) else "tuple"
        return {kind: [_plain(part, other) for part in x]}
    return scalar(x)


def _scalar(x: Any) -> Any:
    if isinstance(x, _SCALARS):
        return x
    raise PlacementError(
        f"a {type(x).__name__} is part of what moves to another rank, which could not make it "
        f"there; move tensors, numbers, strings and None in lists, tuples and dicts, or make the "
        f"{type(x).__name__} inside the function that uses it"
    )


def _from_plain(x: Any) -> Any:
    if not isinstance(x, dict):
        return x
    ((kind, value),) = x.items()
    if kind == "hole":
        return Hole(value)
    if kind == "dict":
        return {key: _from_plain(part) for key, part in value}
    parts = [_from_plain(part) for part in value]
    return parts if kind == "list" else tuple(parts)

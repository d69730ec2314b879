"""Nested arguments and outputs: their leaves in one order, and the rest as a skeleton.

Lists, tuples, named tuples, dicts and dataclasses nest. Dicts are read by sorted key, so that the
order does not depend on how a rank has filled one. Other values stay as they are.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torchdistpackage.comm.nested import items_of, leaves_of, map_leaves
from torchdistpackage.errors import PlacementError


class Hole(NamedTuple):
    """A placeholder in a skeleton for leaf number `index`."""

    index: int


_SCALARS = (str, bool, int, float, type(None))


_NESTING = {"by_key": True, "plain_lists": True}


def _is_hole(x: object) -> bool:
    return type(x) is Hole


def flatten(x: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], Any]:
    """Return (the leaves in order, `x` with a `Hole` in place of each)."""
    leaves: list[Any] = []

    def take(leaf: Any) -> Hole:
        leaves.append(leaf)
        return Hole(len(leaves) - 1)

    return leaves, map_leaves(take, x, is_leaf, **_NESTING)


def fill(skeleton: Any, leaves: Sequence[Any] | Mapping[int, Any]) -> Any:
    """Return the skeleton with its holes filled by leaves, which may be holes too."""
    return map_leaves(lambda hole: leaves[hole.index], skeleton, _is_hole, **_NESTING)


def holes(skeleton: Any) -> list[int]:
    """Return the numbers of the leaves in a skeleton, in order."""
    return [hole.index for hole in leaves_of(skeleton, _is_hole, by_key=True)]


def parts_of(skeleton: Any) -> tuple[str, list[Any]]:
    """Return (kind, names of the parts); the kind is `tensor`, `sequence`, `named` or `value`.

    JSON can hold both. Dicts and dataclasses are `named`.
    """
    if isinstance(skeleton, Hole):
        return "tensor", []
    if isinstance(skeleton, tuple | list):
        return "sequence", list(range(len(skeleton)))
    items = items_of(skeleton, by_key=True)
    return ("value", []) if items is None else ("named", [key for key, _ in items])


def member(skeleton: Any, key: Any) -> Any:
    """Return the part of a skeleton with the name `key`.

    Raises:
        PlacementError: it has no such part.
    """
    parts = list(items_of(skeleton, by_key=True) or ())
    if isinstance(key, int) and key < 0 and isinstance(skeleton, list | tuple):
        key += len(parts)
    for name, part in parts:
        if name == key:
            return part
    names = [name for name, _ in parts]
    raise PlacementError(f"an output has no part {key!r}; its parts are {names}")


def to_text(skeleton: Any) -> str:
    """Return a skeleton as a text for another rank.

    Raises:
        PlacementError: it contains a value that a text cannot carry.
    """
    return json.dumps(_plain(skeleton))


def from_text(text: str) -> Any:
    """Return the skeleton of a text; named tuples come as tuples, dataclasses as dicts."""
    return _from_plain(json.loads(text))


def signature(skeleton: Any) -> str:
    """Return a text that is equal for equal arguments; other objects appear by their type."""
    return json.dumps(_plain(skeleton, lambda x: {"type": type(x).__name__}))


def _plain(x: Any, other: Callable[[Any], Any] | None = None) -> Any:
    scalar = _scalar if other is None else lambda y: y if isinstance(y, _SCALARS) else other(y)
    if isinstance(x, Hole):
        return {"hole": x.index}
    if isinstance(x, list | tuple):
        kind = "list" if isinstance(x, list) else "tuple"
        return {kind: [_plain(part, other) for part in x]}
    items = items_of(x, by_key=True)
    if items is None:
        return scalar(x)
    return {"dict": [[scalar(key), _plain(part, other)] for key, part in items]}


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

"""Walks through values nested in containers: their leaves, and copies with replaced leaves.

A part of a container has a key: its index in a list or tuple, its key in a mapping, or the name of
a dataclass field or attribute. Callers choose which types count as containers, by these options:

    mapping             type of the mappings to open: dict, or Mapping for all
    dataclasses         open dataclasses
    namespaces          open SimpleNamespace and torch.distributions, whose parts are attributes
    by_key              visit a mapping in the order of its keys, which does not depend on how a
    rank
                        filled it; otherwise in its own order

A container with a replaced leaf becomes a copy of its own class, because the caller may keep the
original; a container without one is returned itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from operator import is_
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.distributions import Distribution

Leaf = Callable[[object], bool]
"""A function that tells whether a value is a leaf; it is called before the value is opened."""


def items_of(
    value: Any,
    *,
    mapping: type = dict,
    dataclasses: bool = True,
    namespaces: bool = False,
    by_key: bool = False,
) -> Iterable[tuple[Any, Any]] | None:
    """Return (key, child) for each child of a container, in order; None for other values."""
    if isinstance(value, tuple | list):
        return enumerate(value)
    if isinstance(value, mapping):
        return _by_key(value) if by_key else value.items()
    if dataclasses and is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in fields(value))
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    if namespaces and isinstance(value, SimpleNamespace | Distribution):
        return vars(value).items()
    return None


def leaves_of(value: Any, is_leaf: Leaf | None = None, **options: Any) -> Iterator[Any]:
    """Yield the leaves in order; without `is_leaf`, all values that are not containers."""
    if is_leaf is not None and is_leaf(value):
        yield value
        return
    parts = items_of(value, **options)
    if parts is not None:
        for _, part in parts:
            yield from leaves_of(part, is_leaf, **options)
    elif is_leaf is None:
        yield value


def map_leaves(
    function: Callable[[Any], Any],
    value: Any,
    is_leaf: Leaf,
    *,
    plain_lists: bool = False,
    **options: Any,
) -> Any:
    """Return `value` with each leaf replaced by `function(leaf)`; everything else is unchanged.

    plain_lists: turn a list with a replaced leaf into a plain list, because its own class may
        refuse other parts, as those of torch.fx do.
    """

    return _mapped(function, value, is_leaf, plain_lists, options)


def _mapped(
    function: Callable[[Any], Any],
    value: Any,
    is_leaf: Leaf,
    plain_lists: bool,
    options: Mapping[str, Any],
) -> Any:
    # Not a nested function, because one that calls itself is a reference cycle, which would keep
    # what `function` refers to, such as gradients, until garbage is collected.
    if is_leaf(value):
        return function(value)
    if isinstance(value, tuple | list):
        parts = [_mapped(function, part, is_leaf, plain_lists, options) for part in value]
        if all(map(is_, parts, value)):
            return value
        is_plain = plain_lists and isinstance(value, list)
        return parts if is_plain else _sequence_like(value, parts)
    changed = {
        key: new
        for key, part in items_of(value, **options) or ()
        if (new := _mapped(function, part, is_leaf, plain_lists, options)) is not part
    }
    return _with_parts(value, changed) if changed else value


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply `function` to every tensor in nested containers; other values are unchanged.

    Containers are tuples, lists, dicts, dataclasses, SimpleNamespace and torch.distributions.
    """
    return map_leaves(function, value, _is_tensor, namespaces=True)


def map_trees(function: Callable[..., object], *trees: Any) -> Any:
    """Apply `function` to corresponding leaves of trees with equal structure; return a plain tree.

    Lists and tuples become tuples, and mappings become dicts; all other values are leaves.
    """
    first = trees[0]
    if isinstance(first, Mapping):
        return {key: map_trees(function, *(tree[key] for tree in trees)) for key in first}
    if isinstance(first, tuple | list):
        return tuple(map_trees(function, *each) for each in zip(*trees, strict=True))
    return function(*trees)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _sequence_like(value: Any, parts: list[Any]) -> Any:
    """Return a tuple or list of the class of `value` with these items."""
    if isinstance(value, list):
        new = copy(value)
        new[:] = parts
        return new
    make = value._make if hasattr(value, "_make") else type(value)
    return make(parts)


def _with_parts(value: Any, changed: Mapping[Any, Any]) -> Any:
    """Return a copy of a mapping or object with changed children, even if it is frozen.

    A read-only mapping, such as MappingProxyType, becomes a dict.
    """
    is_fixed = isinstance(value, Mapping) and not isinstance(value, MutableMapping)
    new = dict(value) if is_fixed else copy(value)
    for key, part in changed.items():
        if isinstance(value, Mapping):
            new[key] = part
        else:
            object.__setattr__(new, key, part)
    return new


def _by_key(value: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the items by ascending key; keys of mixed types are sorted by type and text."""
    try:
        keys = sorted(value)
    except TypeError:
        keys = sorted(value, key=lambda key: (type(key).__name__, repr(key)))
    return [(key, value[key]) for key in keys]

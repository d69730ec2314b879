"""Tensors in nested lists, tuples, mappings and dataclasses: seen in one order, and put back.

The walkers that tensor_parallel had as names of its own; ours is comm/nested.py.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torchdistpackage.parallel.auto.nested import is_namedtuple, rebuilt


def nested_flatten(t: Any) -> Iterator[Any]:
    """Yield the leaves of a nested list, tuple or dict; of a dict by ascending key."""
    if isinstance(t, (list, tuple)):
        for item in t:
            yield from nested_flatten(item)
    elif isinstance(t, Mapping):
        for _, item in sorted(t.items()):
            yield from nested_flatten(item)
    else:
        yield t


def nested_pack(flat: Any, structure: Any) -> Any:
    """Return the leaves `flat` in the nesting of `structure`, whose types it keeps."""
    return _packed(iter(flat), structure)


def _packed(leaves: Iterator[Any], like: Any) -> Any:
    if isinstance(like, (list, tuple)):
        items = [_packed(leaves, item) for item in like]
        return type(like)(*items) if is_namedtuple(like) else type(like)(items)
    if isinstance(like, Mapping):
        values = {key: _packed(leaves, value) for key, value in sorted(like.items())}
        return rebuilt(like, {key: values[key] for key in like})
    return next(leaves)


def nested_map(fn: Callable[..., Any], *t: Any) -> Any:
    """`fn` of the leaves of one or more equally nested structures, in the nesting of the first.

    Raises:
        ValueError: there is none, or they are nested differently.
    """
    if not t:
        raise ValueError("nested_map got a function alone; pass at least one structure")
    for other in t[1:]:
        if not nested_compare(t[0], other):
            raise ValueError(
                f"nested_map needs arguments of one structure, but got {t[0]!r} and {other!r}"
            )
    return nested_pack(map(fn, *map(nested_flatten, t)), t[0])


def nested_compare(t: Any, u: Any) -> bool:
    """Return whether two structures are nested alike."""
    if isinstance(t, (list, tuple)):
        return isinstance(u, type(t)) and len(t) == len(u) and all(map(nested_compare, t, u))
    if isinstance(t, Mapping):
        same_keys = isinstance(u, Mapping) and set(t) == set(u)
        return same_keys and all(nested_compare(t[key], u[key]) for key in t)
    return True


def map_leaves(fn: Callable[..., Any], *values: Any) -> Any:
    """Apply `fn` to the leaves of equally nested lists, tuples, mappings and dataclasses, and nest
    the results in the same way.

    Every container is a new one, of the type of the first.
    """
    first = values[0]
    if isinstance(first, (list, tuple)):
        items = [map_leaves(fn, *column) for column in zip(*values, strict=True)]
        return type(first)(*items) if is_namedtuple(first) else type(first)(items)
    if isinstance(first, Mapping):
        mapped = {key: map_leaves(fn, *(value[key] for value in values)) for key in first}
        return rebuilt(first, mapped)
    if is_dataclass(first) and not isinstance(first, type):
        new = copy(first)
        for name in [field.name for field in fields(first) if hasattr(first, field.name)]:
            mapped = map_leaves(fn, *(getattr(value, name) for value in values))
            object.__setattr__(new, name, mapped)  # also where it is frozen
        return new
    return fn(*values)

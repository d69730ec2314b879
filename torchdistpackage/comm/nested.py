"""Values that nest in containers: their leaves, and copies in which leaves are replaced.

A part of a container has a key: its index in a list or tuple, its key in a mapping, the name of a
field of a dataclass or of an attribute. What counts as a container depends on who asks, so the
functions take it as options:

    mapping             the mappings that are opened: dicts, or all kinds of them
    dataclasses         whether dataclasses are opened
    namespaces          whether SimpleNamespace and torch.distributions are, whose parts are their
                        attributes
    by_key              parts of a mapping in the order of its keys, so that it does not depend on
                        how a rank has filled it; else in its own order

A container in which a leaf is replaced becomes a copy of its own class, since the caller's may be
its cache; one in which none is replaced is returned itself.
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
"""Whether a value is a leaf; it is asked before the value is looked into."""


def items_of(
    value: Any,
    *,
    mapping: type = dict,
    dataclasses: bool = True,
    namespaces: bool = False,
    by_key: bool = False,
) -> Iterable[tuple[Any, Any]] | None:
    """(key, part) of each part of a container, in order; None of what is no container."""
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
    """The leaves in order; without `is_leaf` they are all that is no container."""
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
    """`value` with `function(leaf)` in place of each leaf; all else stays as it is.

    plain_lists: a list in which a leaf is replaced becomes one of no class of its own, which may
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
    # No function inside another one that calls itself: it would be a reference cycle, and keep what
    # `function` holds, such as gradients, until garbage is collected.
    if is_leaf(value):
        return function(value)
    if isinstance(value, tuple | list):
        found = [_mapped(function, part, is_leaf, plain_lists, options) for part in value]
        if all(map(is_, found, value)):
            return value
        is_plain = plain_lists and isinstance(value, list)
        return found if is_plain else _sequence_like(value, found)
    changed = {
        key: new
        for key, part in items_of(value, **options) or ()
        if (new := _mapped(function, part, is_leaf, plain_lists, options)) is not part
    }
    return _with_parts(value, changed) if changed else value


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`function` on every tensor inside tuples, lists, dicts, dataclasses, SimpleNamespace and
    torch.distributions, in any nest; other values as they are."""
    return map_leaves(function, value, _is_tensor, namespaces=True)


def map_trees(function: Callable[..., object], *trees: Any) -> Any:
    """`function` of the leaves at the same place of trees that are alike, in plain containers.

    Lists and tuples become tuples, mappings dicts; a leaf is all else.
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
    """A tuple or list of the class of `value` with these parts."""
    if isinstance(value, list):
        new = copy(value)
        new[:] = parts
        return new
    make = value._make if hasattr(value, "_make") else type(value)
    return make(parts)


def _with_parts(value: Any, changed: Mapping[Any, Any]) -> Any:
    """A copy of a mapping or object with these parts, also where it is frozen; of a mapping that
    takes no items, such as MappingProxyType, a dict."""
    is_fixed = isinstance(value, Mapping) and not isinstance(value, MutableMapping)
    new = dict(value) if is_fixed else copy(value)
    for key, part in changed.items():
        if isinstance(value, Mapping):
            new[key] = part
        else:
            object.__setattr__(new, key, part)
    return new


def _by_key(value: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """The items by ascending key; keys of several kinds by kind and text."""
    try:
        keys = sorted(value)
    except TypeError:
        keys = sorted(value, key=lambda key: (type(key).__name__, repr(key)))
    return [(key, value[key]) for key in keys]

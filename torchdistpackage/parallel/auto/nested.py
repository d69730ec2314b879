"""Rebuild containers as they were, and find tensors under all their names."""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from torch import nn


def is_namedtuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def rebuilt(like: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a mapping of the type of `like`, which may be a model's output, with these values."""
    if type(like) is dict:
        return values
    return type(like)(**values) if all(map(str.isidentifier, values)) else type(like)(values)


def once_each(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` with a cache by the identity of its arguments, so that one object stays one
    object in the results.

    Use it for a single walk through structures, which keep the objects alive.
    """
    results: dict[tuple[int, ...], Any] = {}

    def call(*values: Any) -> Any:
        key = tuple(map(id, values))
        if key not in results:
            results[key] = fn(*values)
        return results[key]

    return call


def find_tied_weight_aliases(
    module: nn.Module,
    destination: dict[int, list[str]] | None = None,
    prefix: str | None = None,
) -> dict[int, list[str]]:
    """Return a map from the id of each parameter and buffer to all its names under `module`, in
    order.
    """
    names_by_id: dict[int, list[str]] = {} if destination is None else destination
    prefix = prefix or ""
    for name, tensor in chain(module._parameters.items(), module._buffers.items()):
        if tensor is not None:
            names_by_id.setdefault(id(tensor), []).append(prefix + name)
    for name, child in module._modules.items():
        if child is not None:
            find_tied_weight_aliases(child, names_by_id, f"{prefix}{name}.")
    return names_by_id

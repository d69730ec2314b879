"""The tensors inside what a module takes or returns: tuples, dicts, dataclasses and `.sample`;
what every tool takes is a module."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor, nn


def as_module(model: object, used_by: str) -> nn.Module:
    """`model`; raises TypeError, which names `used_by`, if it is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{used_by}: the model is a {type(model).__name__}, no module")
    return model


def tensors_in(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of each tensor in `value`, in order; a path is such as `[0].hidden['key']`.

    Looks into lists, tuples, sets, mappings, dataclasses, and objects whose outcome is in
    `.sample`. A container that holds itself is visited once.
    """
    return _walk(value, path, set())


def _walk(value: object, path: str, above: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    if id(value) in above:
        return
    above.add(id(value))
    for key, part in _parts(value):
        yield from _walk(part, path + key, above)
    above.discard(id(value))


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        names = getattr(value, "_fields", None)  # of a named tuple
        for index, part in enumerate(value):
            yield f".{names[index]}" if names else f"[{index}]", part
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{f.name}", getattr(value, f.name, None)) for f in fields(value))
    elif not isinstance(value, type) and "sample" in getattr(value, "__dict__", ()):
        yield ".sample", vars(value)["sample"]

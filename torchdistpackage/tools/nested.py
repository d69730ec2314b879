"""The tensors inside what a module takes or returns: tuples, dicts, dataclasses and `.sample`;
what every tool takes is a module."""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from torchdistpackage.comm.nested import items_of


def as_module(model: object, used_by: str) -> nn.Module:
    """Return `model`; raise TypeError, which names `used_by`, if it is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{used_by}: the model is a {type(model).__name__}; pass a torch.nn.Module")
    return model


def tensors_in(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) for each tensor in `value`, in order; a path is such as
    `[0].hidden['key']`.

    Looks into lists, tuples, sets, mappings, dataclasses, and objects whose outcome is in
    `.sample`. A container that holds itself is visited once.
    """
    return _walk(value, path, set())


def _walk(value: object, path: str, above: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) for each tensor; skip containers that are being visited already."""
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
    """Yield (the path's next part, part) for each part of a container."""
    if isinstance(value, (set, frozenset)):
        value = list(value)
    parts = items_of(value, mapping=Mapping)
    if parts is not None:
        is_tuple, is_indexed = isinstance(value, tuple), isinstance(value, (list, tuple, Mapping))
        names = getattr(value, "_fields", None) if is_tuple else None
        for key, part in parts:
            name = names[key] if names else key
            yield f".{name}" if names or not is_indexed else f"[{key!r}]", part
    elif not isinstance(value, type) and "sample" in getattr(value, "__dict__", ()):
        yield ".sample", vars(value)["sample"]

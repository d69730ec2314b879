"""Restore the written characters of text keys, so that 007 stays 007.

YAML reads a plain 012345, 1e3 or true as a number or bool. For a key that takes only text, such as
an account, a path or a name, the characters in the file count.
"""

from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from torchdistpackage.config.slurm import is_text
from torchdistpackage.config.yaml_loader import Keys

FieldOf = Callable[[Keys], FieldInfo | None]
_SLURM = ("launch", "slurm")


def restore(values: dict[str, Any], texts: Mapping[Keys, str], field_of: FieldOf) -> None:
    """Replace each value by its written text if its key takes only text.

    Args:
        values: the content of the file, which is changed.
        texts: place and characters of each plain scalar that YAML did not read as a text.
        field_of: returns the key of the schema at a place.
    """
    for path, text in texts.items():
        inside: Any = values
        try:
            for key in path[:-1]:
                inside = inside[key]
            value = inside[path[-1]]
        except (KeyError, IndexError, TypeError):  # the key was given twice, which is an error
            continue
        if _wants_text(path, field_of, value):
            inside[path[-1]] = text


def _wants_text(path: Keys, field_of: FieldOf, value: object) -> bool:
    if path[:2] == _SLURM:
        return len(path) > 2 and is_text(str(path[2]), value)
    for end in range(len(path), 0, -1):
        if (field := field_of(path[:end])) is not None:
            return _is_text(field.annotation, path[end:])
    return False


def _is_text(kind: Any, inside: Keys) -> bool:
    """Return whether the key at path `inside` a value of this type can hold only text."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _is_text(args[0], inside)
    if origin in (Union, UnionType):
        return all(_is_text(arg, inside) for arg in args if arg is not NoneType)
    if origin in (tuple, dict) and inside:
        of = args[0] if origin is tuple else args[1]
        return _is_text(of, inside[1:])
    return kind is str and not inside

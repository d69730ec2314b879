"""easy-model-parallel's `BaseConfig`: a dataclass whose fields may be set by the environment."""

import ast
import dataclasses
import os
import types
import typing
from typing import Any

from torchdistpackage.errors import ConfigError

__all__ = ["BaseConfig"]


@dataclasses.dataclass
class BaseConfig:
    """Fields take the values of the variables `envvar_prefix` + their name, in their own types.

    bool, int, float, str, Path and other types of one text; lists, tuples and dicts as Python
    writes them; `None` where the type allows it. A field `local_rank` takes LOCAL_RANK.

    Raises:
        ConfigError: variables with the prefix that are no fields, or have no value of the type;
            names all of them.
    """

    @property
    def envvar_prefix(self) -> str:
        """What the names of the variables begin with."""
        return "MLCONFIG_"

    def __post_init__(self) -> None:
        problems = self._unknown()
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            name = f"{self.envvar_prefix}{field.name}"
            if text := os.environ.get(name):
                try:
                    setattr(self, field.name, _read(text, hints[field.name]))
                except (ValueError, TypeError, SyntaxError) as error:
                    problems.append(f"{name}={text}: no {_shown(hints[field.name])} ({error})")
        if problems:
            raise ConfigError(f"{type(self).__name__}: " + "; ".join(problems))
        local_rank = int(os.environ.get("LOCAL_RANK", "-1"))
        if local_rank >= 0 and any(f.name == "local_rank" for f in dataclasses.fields(self)):
            setattr(self, "local_rank", local_rank)  # noqa: B010
        self.confirm_validity()

    def confirm_validity(self) -> None:
        """For subclasses: raise if the values do not go together."""

    def _unknown(self) -> list[str]:
        known = {field.name.lower(): field.name for field in dataclasses.fields(self)}
        prefix = self.envvar_prefix
        return [
            f"Unknown environment variable {name}={value}; there are "
            f"{', '.join(prefix + field for field in known.values()) or 'none'}"
            for name, value in os.environ.items()
            if name.startswith(prefix) and name.removeprefix(prefix).lower() not in known
        ]


def _shown(wanted: Any) -> str:
    return getattr(wanted, "__name__", None) if isinstance(wanted, type) else str(wanted)  # type: ignore[return-value]


def _read(text: str, wanted: Any) -> Any:
    """A value of the type `wanted`; of several types the first that takes it."""
    origin = typing.get_origin(wanted)
    if origin in (types.UnionType, typing.Union):
        of = typing.get_args(wanted)
        if type(None) in of and text == "None":
            return None
        for one in of:
            if one is not type(None):
                try:
                    return _read(text, one)
                except (ValueError, TypeError, SyntaxError):
                    continue
        raise ValueError("none of its types takes it")
    if origin is typing.Literal:
        for one in typing.get_args(wanted):
            if text == str(one):
                return one
        raise ValueError(f"one of {typing.get_args(wanted)} is needed")
    kind = origin or wanted
    if kind is bool:
        if text not in ("True", "False"):
            raise ValueError("True or False is needed")
        return text == "True"
    if kind in (list, tuple, dict, set):
        value = ast.literal_eval(text)
        if not isinstance(value, kind):
            raise ValueError(f"it is a {type(value).__name__}")
        return value
    return kind(text)

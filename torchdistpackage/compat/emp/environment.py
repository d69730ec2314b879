"""easy-model-parallel's use of the environment: `BaseConfig`, and the logs of `setup_logging`.

Environment variables can set the fields of a `BaseConfig`, a dataclass. EMP_LOG_LEVEL is the level
of the console; each rank writes its log files to `logs` in the folder EMP_DATA_DIR.
"""

import ast
import dataclasses
import logging
import os
import sys
import types
import typing
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchdistpackage.compat.placed.launcher import RankLog
from torchdistpackage.errors import ConfigError

__all__ = ["BaseConfig", "setup_logging"]


@dataclasses.dataclass
class BaseConfig:
    """A dataclass whose fields take the values of environment variables `envvar_prefix` + name.

    Values have the field's type: bool, int, float, str, Path and other types made of one text;
    lists, tuples and dicts in Python's syntax; `None` if the type allows it. A field `local_rank`
    takes LOCAL_RANK.

    Raises:
        ConfigError: variables with the prefix name no field, or their value has another type; it
            names all of them.
    """

    @property
    def envvar_prefix(self) -> str:
        """The prefix of the variables' names."""
        return "MLCONFIG_"

    def __post_init__(self) -> None:
        problems: list[str] = []
        for step in (self.verify_unknown_env_vars, self.update_based_on_env_vars):
            try:
                step()
            except ConfigError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError(f"{type(self).__name__}: " + "; ".join(problems))
        self.confirm_validity()

    def verify_unknown_env_vars(self) -> None:
        """Check that every variable with the prefix names a field.

        Raises:
            ConfigError: some do not; it names all of them.
        """
        if unknown := self._unknown():
            raise ConfigError("; ".join(unknown))

    def update_based_on_env_vars(self) -> None:
        """Set the fields whose variables are set.

        Raises:
            ConfigError: values do not have their field's type; it names all of them.
        """
        problems: list[str] = []
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            name = f"{self.envvar_prefix}{field.name}"
            if text := os.environ.get(name):
                try:
                    setattr(self, field.name, _parsed(text, hints[field.name]))
                except (ValueError, TypeError, SyntaxError) as error:
                    problems.append(f"{name}={text}: no {_shown(hints[field.name])} ({error})")
        local_rank = int(os.environ.get("LOCAL_RANK", "-1"))
        if local_rank >= 0 and any(f.name == "local_rank" for f in dataclasses.fields(self)):
            setattr(self, "local_rank", local_rank)  # noqa: B010
        if problems:
            raise ConfigError("; ".join(problems))

    def print_fields(self) -> None:
        """Print name, type and default of each field, a line each."""
        lines = [f"{type(self).__name__}: Fields:"]
        for field in dataclasses.fields(self):
            default = None if field.default is dataclasses.MISSING else field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            lines.append(f"{field.name}: {_shown(field.type)} = {default!r}")
        sys.stdout.write("\n".join(lines) + "\n")

    def confirm_validity(self) -> None:
        """Raise if the values do not fit together; subclasses override it."""

    def _unknown(self) -> list[str]:
        fields = {field.name.lower(): field.name for field in dataclasses.fields(self)}
        prefix = self.envvar_prefix
        return [
            f"Unknown environment variable {name}={value}; there are "
            f"{', '.join(prefix + field for field in fields.values()) or 'none'}"
            for name, value in os.environ.items()
            if name.startswith(prefix) and name.removeprefix(prefix).lower() not in fields
        ]


def _shown(expected_type: Any) -> str:
    return expected_type.__name__ if isinstance(expected_type, type) else str(expected_type)


def _parsed(text: str, expected_type: Any) -> Any:
    """Return `text` as a value of `expected_type`; of a union, the first type that takes it."""
    origin = typing.get_origin(expected_type)
    if origin in (types.UnionType, typing.Union):
        members = typing.get_args(expected_type)
        if type(None) in members and text == "None":
            return None
        for member in members:
            if member is not type(None):
                try:
                    return _parsed(text, member)
                except (ValueError, TypeError, SyntaxError):
                    continue
        raise ValueError("it fits none of its types")
    if origin is typing.Literal:
        for member in typing.get_args(expected_type):
            if text == str(member):
                return member
        raise ValueError(f"it must be one of {typing.get_args(expected_type)}")
    kind = origin or expected_type
    if kind is bool:
        if text not in ("True", "False"):
            raise ValueError("it must be True or False")
        return text == "True"
    if kind in (list, tuple, dict, set):
        value = ast.literal_eval(text)
        if not isinstance(value, kind):
            raise ValueError(f"it is a {type(value).__name__}")
        return value
    return kind(text)


def default_level() -> str | int:
    """Return the level of EMP_LOG_LEVEL, or INFO.

    Raises:
        ConfigError: it is not a level.
    """
    level = os.environ.get("EMP_LOG_LEVEL") or "INFO"
    if level.isdecimal():
        return int(level)
    if level.upper() not in logging.getLevelNamesMapping():
        raise ConfigError(
            f"EMP_LOG_LEVEL is {level!r}; set it to {', '.join(logging.getLevelNamesMapping())}, "
            "or a number"
        )
    return level.upper()


def log_folder() -> Path:
    """Return the folder of log files."""
    return Path(os.environ.get("EMP_DATA_DIR") or "data") / "logs"


def __getattr__(name: str) -> object:
    """Return DATA_DIR, LOG_DIR or default_log_level as the environment is now."""
    if name == "DATA_DIR":
        return log_folder().parent
    if name == "LOG_DIR":
        return log_folder()
    if name == "default_log_level":
        return default_level()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def setup_logging(
    console_level: int | str | None = None,
    output_files: Sequence[str] | None = None,
    file_levels: Sequence[int] | None = None,
    show_locals: bool = False,
) -> list[Path]:
    """Log to the console and to files; returns the files.

    console_level: default EMP_LOG_LEVEL. output_files: names below the folder of logs, which may
    contain `{date}`, `{name}`, `{levelname}` and `{rank}`; each rank writes its own files, so a
    name without `{rank}` gets it at its end. file_levels: one for each file. show_locals: ignored.

    Raises:
        ConfigError: a level for each file is missing, or EMP_LOG_LEVEL is not a level.
    """
    names = ["{date:%Y%m%d-%H%M%S}-{name}-{levelname}-rank{rank}.log"]
    names = names if output_files is None else list(output_files)
    levels = [logging.INFO] * len(names) if file_levels is None else list(file_levels)
    if len(names) != len(levels):
        raise ConfigError(
            f"{len(names)} output_files but {len(levels)} file_levels; give one level for each file"
        )
    rank = int(os.environ.get("RANK", "0"))
    console = logging.StreamHandler()
    console.setLevel(default_level() if console_level is None else console_level)
    console.setFormatter(logging.Formatter("%(levelname)s %(name)s - %(message)s"))
    root = logging.getLogger()
    root.addHandler(console)
    root.setLevel(console.level)
    paths = []
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    for name, level in zip(names, levels, strict=True):
        if "{rank" not in name:
            path = Path(name)
            name = str(path.with_name(f"{path.stem}-rank{{rank}}{path.suffix}"))
        file = name.format(
            date=datetime.now(UTC),
            name=Path(main).stem if main else "unknown",
            levelname=logging.getLevelName(level),
            rank=rank,
        )
        paths.append(RankLog(log_folder() / file, rank, level).path)
    return paths

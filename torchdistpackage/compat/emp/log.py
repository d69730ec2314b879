"""easy-model-parallel's `setup_logging`: the console, and a file for each rank.

EMP_LOG_LEVEL is the level of the console, EMP_DATA_DIR the folder in whose `logs` the files are.
"""

import logging
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from torchdistpackage.errors import ConfigError
from torchdistpackage.parallel.placed.launcher import RankLog

__all__ = ["setup_logging"]


def default_level() -> str | int:
    """That of EMP_LOG_LEVEL, else INFO.

    Raises:
        ConfigError: it is no level.
    """
    said = os.environ.get("EMP_LOG_LEVEL") or "INFO"
    if said.isdecimal():
        return int(said)
    if said.upper() not in logging.getLevelNamesMapping():
        raise ConfigError(
            f"EMP_LOG_LEVEL is {said!r}; levels are "
            f"{', '.join(logging.getLevelNamesMapping())}, or a number"
        )
    return said.upper()


def log_folder() -> Path:
    """Where the files go."""
    return Path(os.environ.get("EMP_DATA_DIR") or "data") / "logs"


def setup_logging(
    console_level: int | str | None = None,
    output_files: Sequence[str] | None = None,
    file_levels: Sequence[int] | None = None,
    show_locals: bool = False,
) -> list[Path]:
    """Log to the console and to files; returns the files.

    console_level: default that of EMP_LOG_LEVEL. output_files: names below the folder of logs, in
    which `{date}`, `{name}`, `{levelname}` and `{rank}` stand; each rank has its own, so a name
    without `{rank}` gets it at its end. file_levels: one for each. show_locals: not used.

    Raises:
        ConfigError: a level for each file is missing, or EMP_LOG_LEVEL is no level.
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
    made = []
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
        made.append(RankLog(log_folder() / file, rank, level).path)
    return made

"""A log file for each rank."""

import logging
from pathlib import Path

FORMAT = "%(asctime)s rank{rank} %(levelname)s %(name)s:%(lineno)d %(message)s"


class RankLog:
    """The log file of this rank; `remove()` ends it. path: of the file."""

    def __init__(self, path: Path, rank: int, level: int | str):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = logging.FileHandler(path, encoding="utf-8")
        self._handler.setLevel(level)
        self._handler.setFormatter(logging.Formatter(FORMAT.format(rank=rank)))
        root = logging.getLogger()
        self._level = root.level
        root.addHandler(self._handler)
        root.setLevel(min(root.level, self._handler.level))

    def remove(self) -> None:
        """Close the file, and let the root logger be as it was."""
        root = logging.getLogger()
        root.removeHandler(self._handler)
        root.setLevel(self._level)
        self._handler.close()


def log_to_file(folder: Path, rank: int, level: int | str = logging.INFO) -> RankLog:
    """Write what is logged on this rank, from `level` on, to `rank<r>.log` in `folder`."""
    return RankLog(folder / f"rank{rank}.log", rank, level)

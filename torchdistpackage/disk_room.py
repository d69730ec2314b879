"""The room that a file system and the user's quota leave in a folder. No torch.

Numbers are those that the system tells, so they explain an error and never replace a write: a full
stripe, a quota of a project or a cache that is told of late have others.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torchdistpackage.text import size_text

QUOTA_S = 5.0
"""Timeout in seconds of `quota`, which asks the servers of network file systems."""
_KIB = 1024
_COLUMNS = 9
"""Columns of `quota -w -p`: the file system, and blocks and files with their limits and grace."""


class DiskRoom(NamedTuple):
    """The room left in a folder. source: who limits it. num_files: None if unlimited or unknown."""

    source: str
    num_bytes: int | None
    num_files: int | None

    def __str__(self) -> str:
        parts = [] if self.num_bytes is None else [size_text(self.num_bytes)]
        parts += [] if self.num_files is None else [f"{self.num_files:,} files"]
        return f"{self.source} leaves {' and '.join(parts) or 'any number'}"

    def lacks(self, num_bytes: int, num_files: int) -> bool:
        """Return whether so many bytes in so many files do not fit."""
        too_many = self.num_files is not None and self.num_files < num_files
        return too_many or (self.num_bytes is not None and self.num_bytes < num_bytes)


def rooms_of(folder: Path) -> list[DiskRoom]:
    """Return what the file system of `folder`, which need not exist yet, and the quota leave."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        stats = os.statvfs(folder)
    except OSError:
        return []
    num_files = stats.f_favail if stats.f_files else None  # some file systems make inodes as needed
    file_system = DiskRoom(
        f"the file system of {folder}", stats.f_bavail * stats.f_frsize, num_files
    )
    return [file_system, *_quotas(folder)]


def shortage(folder: Path, num_bytes: int, num_files: int) -> str:
    """Return what leaves too little room in `folder` for so much, with numbers; "" if all fits."""
    short = [str(room) for room in rooms_of(folder) if room.lacks(num_bytes, num_files)]
    if not short:
        return ""
    return f"{'; '.join(short)}, and it takes {size_text(num_bytes)} in {num_files:,} files"


def mount_of(path: Path) -> tuple[str, str, str, str]:
    """Return device, mount point, kind and options of the file system of a path that exists."""
    lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    mounts = [tuple(line.split()[:4]) for line in lines]
    device, point, kind, options = max(
        (x for x in mounts if path.is_relative_to(x[1])), key=lambda x: len(x[1])
    )
    return device, point, kind, options


def _quotas(folder: Path) -> Iterator[DiskRoom]:
    """Yield the user's quotas on the file system of `folder`, where `quota` answers."""
    try:
        device, point, _, _ = mount_of(folder.resolve())
        # -w: a long name does not break its line. -p: grace times are numbers, and so never absent
        shown = subprocess.run(
            ["quota", "-w", "-p"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=QUOTA_S,
            check=False,  # 1 where a limit is exceeded, beside all numbers
        ).stdout
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return
    for line in shown.splitlines():
        columns = line.split()
        if len(columns) != _COLUMNS or columns[0] not in (device, point):
            continue
        blocks, _, most_blocks, _, files, _, most_files, _ = (
            int(text.rstrip("*")) for text in columns[1:]
        )
        yield DiskRoom(
            f"your quota on {columns[0]}",
            max(most_blocks - blocks, 0) * _KIB if most_blocks else None,
            max(most_files - files, 0) if most_files else None,
        )

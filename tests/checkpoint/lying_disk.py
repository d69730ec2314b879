"""A file system that lies, as a library that programs load before the C library (lying_disk.c)."""

import os
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path

TABLE_BYTES = 1 << 18
"""Bytes of the table that all programs on the file system share: 4096 rows of 32 bytes."""


@dataclass(frozen=True)
class LyingDisk:
    """Everything below `folder`, for programs with the environment of `env`."""

    folder: Path
    library: Path
    table: Path

    @classmethod
    def build(cls, folder: Path, workshop: Path) -> "LyingDisk":
        """Compile the library into `workshop`, which lies outside of `folder`."""
        disk = cls(folder, workshop / "lying_disk.so", workshop / "table")
        source = Path(__file__).with_suffix(".c")
        words = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", disk.library]
        subprocess.run([*words, source, "-ldl"], check=True, timeout=60)
        disk.table.write_bytes(bytes(TABLE_BYTES))
        return disk

    def env(
        self, kind: str, node: str = "n0", *, match: str = "", seed: int = 0, for_s: float = 0
    ) -> dict[str, str]:
        """Return the variables of a program on `node`; they are explained in lying_disk.c."""
        boot = Path(f"{self.table}.{node}")
        boot.write_text(f"{uuid.uuid5(uuid.NAMESPACE_DNS, node)}\n")
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "LD_PRELOAD": str(self.library),
            "LYING_UNDER": str(self.folder),
            "LYING_TABLE": str(self.table),
            "LYING_KIND": kind,
            "LYING_NODE": node,
            "LYING_MATCH": match,
            "LYING_SEED": str(seed),
            "LYING_S": str(for_s),
        }

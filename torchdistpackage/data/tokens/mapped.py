"""A check that a mapped file still has the bytes that are read through the map. No torch.

Reading beyond the end of a file that became shorter kills the process with SIGBUS, silently.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torchdistpackage.errors import DataError


@dataclass(frozen=True, slots=True)
class MappedTensors:
    """The identity and size of a file when it was mapped.

    The map keeps the old file where another one was moved to its name, so that is not an error.
    """

    path: Path
    device_inode: tuple[int, int]
    num_bytes: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """Describe the file at `path`; raises OSError if there is none."""
        path = path.absolute()
        facts = path.stat()
        return cls(path, (facts.st_dev, facts.st_ino), facts.st_size)

    def check(self) -> None:
        """Check the file before a read; takes microseconds.

        Raises:
            DataError: the file has become shorter.
        """
        try:
            now = self.path.stat()
        except OSError:
            return  # the name is gone, but the map keeps the file
        if now.st_size < self.num_bytes and (now.st_dev, now.st_ino) == self.device_inode:
            raise DataError(
                f"{self.path} had {self.num_bytes:,} bytes when this run began to read it, and has "
                f"{now.st_size:,} now; do not change data while a run trains: bring the file back "
                f"and start again"
            )

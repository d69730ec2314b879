"""Whether a file that is mapped still has the bytes that are read through the map. No torch.

A read beyond the end of a file that became shorter kills the process by SIGBUS, without a word.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torchdistpackage.errors import DataError


@dataclass(frozen=True, slots=True)
class MappedTensors:
    """A file as it was when it was mapped. Another one of the same name, moved there, is none of
    the map's business.
    """

    path: Path
    place: tuple[int, int]
    num_bytes: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """Raises OSError if it is not there."""
        path = path.absolute()
        found = path.stat()
        return cls(path, (found.st_dev, found.st_ino), found.st_size)

    def check(self) -> None:
        """Before a read: microseconds.

        Raises:
            DataError: it has become shorter.
        """
        try:
            now = self.path.stat()
        except OSError:
            return  # its name is gone, and the map has it still
        if now.st_size < self.num_bytes and (now.st_dev, now.st_ino) == self.place:
            raise DataError(
                f"{self.path} had {self.num_bytes:,} bytes when this run began to read it, and has "
                f"{now.st_size:,} now; do not change data while a run trains: bring the file back "
                f"and start again"
            )

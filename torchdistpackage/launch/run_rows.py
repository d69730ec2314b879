"""Read the rows that a run writes, one JSON object per line.

Reading works at any moment and on any machine that shares the folder: torn or invalid lines are
counted and skipped, and a missing file has no rows.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torchdistpackage.bounded import check_regular, parse_json
from torchdistpackage.errors import DataError

_TAIL_BYTES = 1 << 16

Row = dict[str, Any]


def parse_row(line: str) -> Row | None:
    """Return the row of a line, or None if it has no `step`."""
    try:
        row: Any = parse_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    step = cast(Row, row).get("step")
    return cast(Row, row) if type(step) is int and 0 <= step < 1 << 63 else None


def number(value: Any) -> float | None:
    """Return a finite number (not a bool) as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def numbers(value: Any) -> list[float]:
    """Return the finite numbers of a list; [] for anything else."""
    items = cast(list[Any], value) if isinstance(value, list) else []
    return [x for x in map(number, items) if x is not None]


def mapping(row: Row, key: str) -> Mapping[str, Any]:
    """Return the mapping that a row has under `key`, else an empty one."""
    value = row.get(key)
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


@dataclass(slots=True)
class RowReader:
    """The rows of one growing file; `read_new` reads what was added since its last call.

    rows: by step; the last row of a step counts. num_torn: complete lines that are not rows.
    """

    path: Path
    rows: dict[int, Row] = field(default_factory=dict[int, Row])
    num_torn: int = 0
    _place: tuple[int, int] = (0, 0)  # inode, bytes read
    _cut: bytes = b""

    def read_new(self) -> bool:
        """Return whether rows were added, or the file was replaced as a resume does.

        Raises:
            DataError: the name is that of a device, a pipe or the like, which is not opened.
        """
        try:
            check_regular(self.path, follow=True)
            with self.path.open("rb") as file:
                inode, at = self._place
                size = file.seek(0, 2)
                now = self.path.stat().st_ino
                if now != inode or size < at:
                    self.rows, self.num_torn, self._cut, at = {}, 0, b"", 0
                file.seek(at)
                data = file.read(size - at)
        except FileNotFoundError:
            return False
        except OSError as error:
            hint = "ask its owner" if isinstance(error, PermissionError) else "move it away"
            raise DataError(f"{self.path} {error.strerror}; {hint}") from error
        self._place = now, at + len(data)
        *lines, self._cut = (self._cut + data).split(b"\n")
        for line in lines:
            self._take(line)
        return bool(data)

    @property
    def is_cut(self) -> bool:
        """Return whether the last line is incomplete: still being written, or torn."""
        return bool(self._cut.strip())

    def finish(self) -> None:
        """Process the last line although it has no end; it is a row or torn."""
        if self._cut:
            self._take(self._cut)
            self._cut = b""

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        row = parse_row(line.decode(errors="replace"))
        if row is None:
            self.num_torn += 1
        else:
            self.rows[row["step"]] = row

    def sorted(self) -> list[Row]:
        """Return all rows by ascending step."""
        return [self.rows[step] for step in sorted(self.rows)]


def read_rows(path: Path) -> tuple[list[Row], int]:
    """Return rows by ascending step, the last one written for each step, and the number of invalid
    lines.

    Raises:
        DataError: as `RowReader.read_new`.
    """
    reader = RowReader(path)
    reader.read_new()
    reader.finish()
    return reader.sorted(), reader.num_torn


def last_rows(path: Path) -> Iterator[Row]:
    """Yield rows from the end of a file backwards, without reading the rest."""
    try:
        check_regular(path, follow=True)
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - _TAIL_BYTES, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return
    rows = map(parse_row, reversed(lines))
    yield from (row for row in rows if row is not None)

"""Which keys a query sees, and of two parts of a sequence the rectangles of scores that are left.

What nobody sees is neither computed nor sent: all ranks derive the same tasks from the same
numbers, so that a receiver knows what its peer leaves out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.context.order import Ranges

TILE = 2048
"""Positions along each side of a rectangle that needs a mask: a mask has at most TILE^2 numbers
for each sample."""


class Seen(Enum):
    """How much of a rectangle of scores is visible; CAUSAL: the lower triangle of a square."""

    NOTHING = "nothing"
    ALL = "all"
    CAUSAL = "causal"
    SOME = "some"


@dataclass(frozen=True)
class Task:
    """Scores of the queries `rows` and the keys `columns`, places in two parts, for one kernel.

    positions: of both in the sequence, where SOME is seen.
    """

    rows: slice
    columns: slice
    seen: Seen
    positions: tuple[range, range] | None = None


class Documents:
    """Which document each position of a sequence belongs to.

    ids: (B, S) integers of the whole sequence, equal on all ranks.
    """

    def __init__(self, ids: Tensor):
        self.ids = ids
        # read by the host once a forward: what is empty decides what is sent
        self._host = ids.cpu()
        self._bounds: dict[range, tuple[Tensor, Tensor]] = {}
        self.plans: dict[object, object] = {}
        """What the layers of one forward have made for these documents."""

    def seen(self, rows: range, columns: range) -> Seen:
        """By the lowest and the highest document of each: of ids in disorder SOME, if in doubt."""
        (low, high), (first, last) = self._bounds_of(rows), self._bounds_of(columns)
        if bool(((last < low) | (first > high)).all()):
            return Seen.NOTHING
        is_one = (low == high) & (first == last) & (low == first)
        return Seen.ALL if bool(is_one.all()) else Seen.SOME

    def _bounds_of(self, positions: range) -> tuple[Tensor, Tensor]:
        if positions not in self._bounds:
            held = self._host[:, positions.start : positions.stop]
            self._bounds[positions] = held.amin(1), held.amax(1)
        return self._bounds[positions]


@dataclass(frozen=True)
class Visibility:
    """A query sees all keys but those that one of these hides.

    is_causal: later ones. window: those `window` positions away or more, on both sides.
    documents: those of another document.

    Raises:
        LayoutError: a window in which a query would not see itself.
    """

    is_causal: bool = False
    window: int | None = None
    documents: Documents | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.window is not None and (isinstance(self.window, bool) or self.window < 1):
            raise LayoutError(
                f"window={self.window}: a query sees itself at least; use 1 or more, or None"
            )

    @property
    def has_masks(self) -> bool:
        """Whether SOME may be seen of a rectangle, so that a kernel needs a mask."""
        return self.window is not None or self.documents is not None

    def seen(self, rows: range, columns: range) -> Seen:
        """How much of the scores of these queries and keys is visible."""
        nearest, farthest = rows.start - columns.stop + 1, rows.stop - 1 - columns.start
        found: set[Seen] = set()
        if self.is_causal:
            part = _seen(nothing=farthest < 0, everything=nearest >= 0)
            found.add(Seen.CAUSAL if part is Seen.SOME and rows == columns else part)
        if (window := self.window) is not None:
            found.add(
                _seen(
                    nothing=nearest >= window or farthest <= -window,
                    everything=farthest < window and (self.is_causal or nearest > -window),
                )
            )
        if self.documents is not None:
            found.add(self.documents.seen(rows, columns))
        if Seen.NOTHING in found:
            return Seen.NOTHING
        found.discard(Seen.ALL)
        return Seen.SOME if len(found) > 1 else found.pop() if found else Seen.ALL

    def mask(self, task: Task, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(1 or B, 1, rows, columns) to add to scores: 0 where they are seen, else very low.

        That is finite: a row that sees nothing here has a log-sum-exp, by which it weighs nothing.
        """
        assert task.positions is not None
        rows, columns = task.positions
        distance = torch.arange(rows.start, rows.stop, device=device)[:, None]
        distance = distance - torch.arange(columns.start, columns.stop, device=device)
        seen = distance >= 0 if self.is_causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            seen &= distance.abs() < self.window
        seen = seen[None, None]
        if self.documents is not None:
            ids = self.documents.ids.to(device)
            mine, theirs = (ids[:, each.start : each.stop] for each in (rows, columns))
            seen = seen & (mine[:, None, :, None] == theirs[:, None, None, :])
        # CUDA's kernels read a row of a bias from a multiple of 16 bytes on
        width = -(-len(columns) // 8) * 8
        bias = torch.zeros((*seen.shape[:-1], width), dtype=dtype, device=device)
        return bias[..., : len(columns)].masked_fill_(~seen, torch.finfo(dtype).min / 2)


def _seen(*, nothing: bool, everything: bool) -> Seen:
    return Seen.NOTHING if nothing else Seen.ALL if everything else Seen.SOME


def tiled(ranges: Ranges, visibility: Visibility, tile: int | None = None) -> Ranges:
    """The same positions, in ranges of at most `tile` (default TILE) where there may be masks."""
    if not visibility.has_masks:
        return ranges
    step = tile or TILE
    return tuple(
        range(start, min(start + step, each.stop))
        for each in ranges
        for start in range(each.start, each.stop, step)
    )


def tasks_of(rows: Ranges, columns: Ranges, visibility: Visibility) -> tuple[Task, ...]:
    """What is to be computed of the queries `rows` and the keys `columns`.

    A call of a kernel costs time, so neighbours that are seen whole are one task, and the triangle
    of a part with itself is one.
    """
    grid = [[visibility.seen(row, column) for column in columns] for row in rows]
    if rows == columns and _is_triangle(grid):
        whole = slice(0, sum(map(len, rows)))
        return (Task(whole, whole, Seen.CAUSAL),)
    down, across = places(rows), places(columns)
    found: list[Task] = []

    def seen_whole(i: int) -> tuple[int, ...]:
        return tuple(j for j, seen in enumerate(grid[i]) if seen is Seen.ALL)

    for numbers, same in groupby(range(len(rows)), seen_whole):
        lines = list(same)
        span = slice(down[lines[0]].start, down[lines[-1]].stop)
        for run in _runs(numbers):
            found.append(Task(span, slice(across[run[0]].start, across[run[-1]].stop), Seen.ALL))
    for i, line in enumerate(grid):
        for j, seen in enumerate(line):
            if seen is Seen.CAUSAL:
                found.append(Task(down[i], across[j], seen))
            elif seen is Seen.SOME:
                found.append(Task(down[i], across[j], seen, (rows[i], columns[j])))
    return tuple(found)


def needed(rows: Ranges, columns: Ranges, visibility: Visibility) -> Ranges:
    """Of the keys `columns` those that one of the queries `rows` sees."""
    return tuple(
        column
        for column in columns
        if any(visibility.seen(row, column) is not Seen.NOTHING for row in rows)
    )


def places(ranges: Ranges) -> list[slice]:
    """Where each range lies in the part that holds all of them."""
    return [slice(*ends) for ends in pairwise(accumulate(map(len, ranges), initial=0))]


def _is_triangle(grid: Sequence[Sequence[Seen]]) -> bool:
    """Whether what is seen is what a causal kernel computes of the part as a whole."""
    return any(Seen.CAUSAL in line for line in grid) and all(
        seen is (Seen.NOTHING if j > i else Seen.ALL if j < i else grid[i][i])
        and (j != i or seen in (Seen.CAUSAL, Seen.ALL))
        for i, line in enumerate(grid)
        for j, seen in enumerate(line)
    )


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Numbers that follow each other, together."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs

"""Visibility of keys to queries, and the rectangles of scores that remain between two parts.

Ranks neither compute nor send what no query sees. All ranks derive the same tasks from the same
numbers, so a receiver knows what its peer leaves out.
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
"""Longest side of a rectangle that needs a mask, so a mask has at most TILE^2 elements a sample."""


class Seen(Enum):
    """The visible part of a rectangle of scores; CAUSAL: the lower triangle of a square."""

    NOTHING = "nothing"
    ALL = "all"
    CAUSAL = "causal"
    SOME = "some"


@dataclass(frozen=True)
class Task:
    """One kernel call: scores of the queries `rows` and the keys `columns` of two parts.

    positions: positions of both in the sequence, if `seen` is SOME and needs a mask.
    """

    rows: slice
    columns: slice
    seen: Seen
    positions: tuple[range, range] | None = None


class Documents:
    """The document that each position of a sequence belongs to.

    ids: (B, S) integers for the full sequence, equal on all ranks.
    """

    def __init__(self, ids: Tensor):
        self.ids = ids
        # One copy to the host for each forward, which waits for the device: the host must know
        # which rectangles are empty before it can post messages.
        self._host = ids.cpu()
        self._bounds: dict[range, tuple[Tensor, Tensor]] = {}
        self.plans: dict[object, object] = {}
        """Plans that the layers of one forward made for these documents."""

    def seen(self, rows: range, columns: range) -> Seen:
        """Return how much is visible, from the lowest and highest ids; SOME if ids are unsorted."""
        (low, high), (first, last) = self._bounds_of(rows), self._bounds_of(columns)
        if bool(((last < low) | (first > high)).all()):
            return Seen.NOTHING
        is_one = (low == high) & (first == last) & (low == first)
        return Seen.ALL if bool(is_one.all()) else Seen.SOME

    def _bounds_of(self, positions: range) -> tuple[Tensor, Tensor]:
        """Return the lowest and highest id of each sample within `positions`."""
        if positions not in self._bounds:
            ids = self._host[:, positions.start : positions.stop]
            self._bounds[positions] = ids.amin(1), ids.amax(1)
        return self._bounds[positions]


@dataclass(frozen=True)
class Visibility:
    """The rules that hide keys from queries.

    is_causal: hide later keys. window: hide keys `window` positions away or more, on both sides.
    documents: hide keys of another document.

    Raises:
        LayoutError: `window` is below 1, so that a query would not see itself.
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
        """True if a rectangle may be partly visible, so that a kernel needs a mask."""
        return self.window is not None or self.documents is not None

    @property
    def shows_all(self) -> bool:
        """True if every query sees every key."""
        return not (self.is_causal or self.has_masks)

    def seen(self, rows: range, columns: range) -> Seen:
        """Return how much of the scores of these queries and keys is visible."""
        nearest, farthest = rows.start - columns.stop + 1, rows.stop - 1 - columns.start
        answers: set[Seen] = set()
        if self.is_causal:
            part = _seen(nothing=farthest < 0, everything=nearest >= 0)
            answers.add(Seen.CAUSAL if part is Seen.SOME and rows == columns else part)
        if (window := self.window) is not None:
            answers.add(
                _seen(
                    nothing=nearest >= window or farthest <= -window,
                    everything=farthest < window and (self.is_causal or nearest > -window),
                )
            )
        if self.documents is not None:
            answers.add(self.documents.seen(rows, columns))
        if Seen.NOTHING in answers:
            return Seen.NOTHING
        answers.discard(Seen.ALL)
        return Seen.SOME if len(answers) > 1 else answers.pop() if answers else Seen.ALL

    def mask(self, task: Task, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a bias (1 or B, 1, rows, columns) for the scores: 0 if visible, else very low.

        It is finite, not -inf: a row that sees nothing then has a very low log-sum-exp, by which
        the merge gives it no weight, instead of NaN.
        """
        assert task.positions is not None
        rows, columns = task.positions
        distance = torch.arange(rows.start, rows.stop, device=device)[:, None]
        distance = distance - torch.arange(columns.start, columns.stop, device=device)
        visible = distance >= 0 if self.is_causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            visible &= distance.abs() < self.window
        visible = visible[None, None]
        if self.documents is not None:
            ids = self.documents.ids.to(device)
            row_ids, column_ids = (ids[:, each.start : each.stop] for each in (rows, columns))
            visible = visible & (row_ids[:, None, :, None] == column_ids[:, None, None, :])
        # CUDA kernels require that each row of a bias starts at a multiple of 16 bytes
        width = -(-len(columns) // 8) * 8
        bias = torch.zeros((*visible.shape[:-1], width), dtype=dtype, device=device)
        return bias[..., : len(columns)].masked_fill_(~visible, torch.finfo(dtype).min / 2)


def _seen(*, nothing: bool, everything: bool) -> Seen:
    """Return NOTHING, ALL or SOME for one rule."""
    return Seen.NOTHING if nothing else Seen.ALL if everything else Seen.SOME


def tiled(ranges: Ranges, visibility: Visibility, tile: int | None = None) -> Ranges:
    """Return the same positions, in ranges of at most `tile` (default TILE) if masks may be
    needed.
    """
    if not visibility.has_masks:
        return ranges
    step = tile or TILE
    return tuple(
        range(start, min(start + step, each.stop))
        for each in ranges
        for start in range(each.start, each.stop, step)
    )


def tasks_of(rows: Ranges, columns: Ranges, visibility: Visibility) -> tuple[Task, ...]:
    """Return the kernel calls for the queries `rows` and the keys `columns`.

    A kernel call costs time, so adjacent rectangles that are fully visible become one task, and so
    does the triangle of a part with itself.
    """
    grid = [[visibility.seen(row, column) for column in columns] for row in rows]
    if rows == columns and _is_triangle(grid):
        all_rows = slice(0, sum(map(len, rows)))
        return (Task(all_rows, all_rows, Seen.CAUSAL),)
    down, across = places(rows), places(columns)
    tasks: list[Task] = []

    def fully_seen(i: int) -> tuple[int, ...]:
        return tuple(j for j, seen in enumerate(grid[i]) if seen is Seen.ALL)

    for numbers, same in groupby(range(len(rows)), fully_seen):
        row_indices = list(same)
        span = slice(down[row_indices[0]].start, down[row_indices[-1]].stop)
        for run in _runs(numbers):
            tasks.append(Task(span, slice(across[run[0]].start, across[run[-1]].stop), Seen.ALL))
    for i, row_of_grid in enumerate(grid):
        for j, seen in enumerate(row_of_grid):
            if seen is Seen.CAUSAL:
                tasks.append(Task(down[i], across[j], seen))
            elif seen is Seen.SOME:
                tasks.append(Task(down[i], across[j], seen, (rows[i], columns[j])))
    return tuple(tasks)


def needed(rows: Ranges, columns: Ranges, visibility: Visibility) -> Ranges:
    """Return the keys of `columns` that some query of `rows` sees."""
    return tuple(
        column
        for column in columns
        if any(visibility.seen(row, column) is not Seen.NOTHING for row in rows)
    )


def places(ranges: Ranges) -> list[slice]:
    """Return the slice of each range within their concatenation."""
    return [slice(*ends) for ends in pairwise(accumulate(map(len, ranges), initial=0))]


def _is_triangle(grid: Sequence[Sequence[Seen]]) -> bool:
    """Return whether the visible scores are those of one causal kernel call over the part."""
    return any(Seen.CAUSAL in row for row in grid) and all(
        seen is (Seen.NOTHING if j > i else Seen.ALL if j < i else grid[i][i])
        and (j != i or seen in (Seen.CAUSAL, Seen.ALL))
        for i, row in enumerate(grid)
        for j, seen in enumerate(row)
    )


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Group numbers that follow each other."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs

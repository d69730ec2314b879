"""Arrays that lie one after another, as one array that is never made.

One rule: only the slice that is asked for is copied, and only where it lies in several of them.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt


class ConcatView:
    """`parts`, 1-D arrays of one dtype: read by position and by slices of step 1."""

    def __init__(self, parts: Sequence[npt.NDArray], dtype: npt.DTypeLike):
        self.dtype = np.dtype(dtype)
        self._parts = [part for part in parts if len(part)]
        self._ends = list(accumulate(map(len, self._parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, where: int | slice):
        if not isinstance(where, slice):
            index = range(len(self))[where]
            return self[index : index + 1][0]
        start, stop, step = where.indices(len(self))
        assert step == 1
        pieces = []
        i = bisect_right(self._ends, start)
        while start < stop:
            part, end = self._parts[i], self._ends[i]
            pieces.append(part[start - end + len(part) : stop - end + len(part)])
            start, i = end, i + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, self.dtype), *pieces])

    def __array__(self, dtype: npt.DTypeLike = None, copy: bool | None = None) -> npt.NDArray:
        """All of it, for a look at a small one."""
        return np.asarray(self[:], dtype)

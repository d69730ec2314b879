"""Documents of packed samples, each in a row of its own.

A causal model sees nothing of what stands behind a token, so padding behind a document changes
nothing of it, and what a row begins with, as positions, states of recurrences and convolutions,
begins anew with each document. Rows are as many as documents and as long as the longest.
"""

from typing import Any

import torch
from torch import Tensor

from torchdistpackage.comm.nested import map_leaves


class DocumentRows:
    """The rows of a batch. position_ids (B, S) int64: from 0 in each document."""

    def __init__(self, position_ids: Tensor):
        self._samples = position_ids.shape
        self._columns = position_ids.flatten()
        self._rows = (self._columns == 0).cumsum(0) - 1
        # one copy to the host for each forward: the rows' shape has to be known there
        numbers = torch.stack((self._rows[-1], self._columns.max())).tolist()
        self._shape = numbers[0] + 1, numbers[1] + 1

    def apart(self, x: Tensor) -> Tensor:
        """Return packed samples (B, S, ...) as rows (documents, longest, ...), with zeros behind
        each document.
        """
        rows = x.new_zeros(*self._shape, *x.shape[2:])
        return rows.index_put((self._rows, self._columns), x.flatten(0, 1))

    def joined(self, outputs: Any) -> Any:
        """Return what rows became, (documents, longest, ...), as packed samples (B, S, ...)."""
        return map_leaves(self._packed, outputs, lambda x: isinstance(x, Tensor))

    def _packed(self, rows: Tensor) -> Tensor:
        return rows[self._rows, self._columns].unflatten(0, self._samples)

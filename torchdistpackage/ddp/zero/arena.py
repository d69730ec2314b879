"""Many tensors in a few large pieces of memory.

One rule: pieces are powers of two, to which torch rounds each tensor of pinned memory up, by a
third in the mean. Here the rest of a piece is for the tensors that follow.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from torchdistpackage.ddp.zero.shard_bounds import SLICE_BYTES

PIECE_BYTES = 64 * 2**20
"""The next piece is about as large as all before it, at most this unless one tensor needs more."""


class Arena:
    """Tensors in pieces of `memory`, which are given back all together.

    num_bytes: of the pieces.
    """

    def __init__(self, memory: Callable[[int], Tensor]):
        self._memory = memory
        self._rests: list[Tensor] = []
        self.num_bytes = 0

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """An empty one (num_elements,)."""
        needed = num_elements * dtype.itemsize
        room = -(-needed // SLICE_BYTES) * SLICE_BYTES
        rest = next((i for i, rest in enumerate(self._rests) if len(rest) >= room), None)
        if rest is None:
            as_before = 1 << max(0, min(self.num_bytes, PIECE_BYTES).bit_length() - 1)
            size = max(1 << max(0, room - 1).bit_length(), as_before)
            rest = len(self._rests)
            self._rests.append(self._memory(size))
            self.num_bytes += size
        piece = self._rests[rest]
        self._rests[rest] = piece[room:]
        return piece[:needed].view(dtype)

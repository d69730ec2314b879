"""The base of torchshard's layers: parameters that know how they are split.

A layer starts with the values that torch's own layer draws from the same seed: every rank draws the
full matrix, some rows at a time, and keeps its slice. Parameters that are not split start with the
values of the group's first rank. `shard_init_helper_` (torchshard.nn.init) does the same with an
init method of the user's.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.compat.torchshard.chunks import chunk, chunks
from torchdistpackage.compat.torchshard.cuts import check_tensors
from torchdistpackage.compat.torchshard.functional import ParallelDim
from torchdistpackage.compat.torchshard.marks import MARK, marked_parameters, note, weight_dim
from torchdistpackage.compat.torchshard.model_groups import get_group, is_initialized
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import layout_of
from torchdistpackage.parallel.tensor.layouts import Layouts
from torchdistpackage.parallel.tensor.marked import Marked

AXIS = "tensor"
NUMBERS_AT_ONCE = 1 << 20
"""Approximate number of elements of a split matrix that are in memory at a time while it is drawn.
"""


class ParallelLayer(Marked):
    """A layer whose parameters know how they are split over this rank's group."""

    dim: ParallelDim
    order_type = 0
    """1 if the weight is (in, out), else 0."""

    def split_over(self) -> dict[str, int]:
        """Return the split dim of each split parameter, by name."""
        raise NotImplementedError

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        raise NotImplementedError

    def layouts(self) -> Layouts:
        over = self.split_over()

        def layout(name: str, shape: tuple[int, ...]) -> Layout:
            split = tuple((AXIS,) if over.get(name) == d else () for d in range(len(shape)))
            if name not in over or self.group is None:
                return Layout(name, shape, split, uneven=True)
            size = self.group.size()
            return Layout(name, shape, split, ranges=chunks(shape[over[name]], size))

        return {name: layout(name, shape) for name, shape in self.whole_shapes().items()}

    def mark(self) -> None:
        super().mark()
        over = self.split_over()
        for name, parameter in self._parameters.items():
            if parameter is not None:
                note(parameter, self.dim if name in over else None, self.order_type)

    def join(self) -> None:
        """Take this rank's group; only a split layer needs one."""
        self.group = get_group() if self.dim is not None or is_initialized() else None

    def part(self, full: Tensor, name: str) -> Tensor:
        """Return this rank's slice of the full parameter `name`."""
        if (over := self.split_over().get(name)) is None:
            return full
        assert self.group is not None
        start, length = chunk(full.shape[over], self.group.size(), self.group.rank())
        return full.narrow(over, start, length).clone()

    def drawn(self, name: str, draw: Callable[[Tensor], object]) -> Tensor:
        """Return this rank's slice of parameter `name`; `draw` fills some of its rows at a time."""
        shape = self.whole_shapes()[name]
        over = self.split_over().get(name)
        if over is None:
            full = torch.empty(shape)
            draw(full)
            return full
        assert self.group is not None
        start, length = chunk(shape[over], self.group.size(), self.group.rank())
        local = torch.empty([length if d == over else n for d, n in enumerate(shape)])
        for first, rows in _blocks(shape):
            draw(block := torch.empty(rows, *shape[1:]))
            if over == 0:
                low, high = max(first, start), min(first + rows, start + length)
                if low < high:
                    local[low - start : high - start] = block[low - first : high - first]
            else:
                local[first : first + rows] = block[:, start : start + length]
        return local

    def equalise(self) -> None:
        """Give parameters that are not split the values of the group's first rank."""
        if self.group is None or self.group.size() == 1 or not self.split_over():
            return
        for name, parameter in self._parameters.items():
            if parameter is not None and name not in self.split_over():
                primitives.broadcast(parameter.data, self.group)


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows) of blocks.

    They are multiples of 16 rows: then torch draws the same values as in one call.
    """
    width = math.prod(shape[1:])
    rows = max(NUMBERS_AT_ONCE // max(width, 1) // 16 * 16, 16)
    first = 0
    while first < shape[0]:
        remainder = shape[0] - first
        # draw a short tail together with the block before it
        rows = remainder if remainder < rows + 16 else rows
        yield first, rows
        first += rows


@torch.no_grad()
def shard_init_helper_(init_method: Callable[..., object], tensor: Tensor, **kwargs: Any) -> None:
    """Fill `tensor` with its slice of what `init_method` draws on the group's first rank.

    A marked parameter, or its `.data`, counts as split and gets its slice; one whose mark is None
    gets the same values on all ranks of the group. Without a mark `init_method` fills it alone.

    Raises:
        ValueError: `tensor` is not a tensor, or `init_method` cannot be called.
    """
    check_tensors("shard_init_helper_", tensor=tensor)
    if not callable(init_method):
        raise ValueError(
            f"init_method is {init_method!r}; pass a function that fills a tensor, such as "
            f"torch.nn.init.xavier_uniform_"
        )
    parameter = _parameter_of(tensor)
    if parameter is None:
        init_method(tensor, **kwargs)
        return
    group = get_group()
    dim = weight_dim(parameter)
    shape = list(tensor.shape)
    if dim is not None:
        layout = layout_of(parameter)
        shape[dim] = shape[dim] * group.size() if layout is None else layout.shape[dim]
    full = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    init_method(full, **kwargs)
    if group.size() > 1:
        primitives.broadcast(full, group)
    if dim is not None:
        full = full.narrow(dim, *chunk(shape[dim], group.size(), group.rank()))
    tensor.data.copy_(full)


def _parameter_of(tensor: Tensor) -> Tensor | None:
    if hasattr(tensor, MARK):
        return tensor
    for parameter in marked_parameters.values():
        same = parameter.data_ptr() == tensor.data_ptr() and parameter.shape == tensor.shape
        if same and tensor.numel():
            return parameter
    return None

"""Every collective as its tests see it: what each rank gives and what it must get."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm import collectives
from torchdistpackage.comm.groups import Groups

LAYOUTS = {
    "alone": [[0]],
    "pairs": [[0, 2], [1, 3]],
    "three": [[0], [1, 2, 3]],
}
"""Groups of a world: strided ones, and one that begins after rank 0 beside a group of one."""

OPERATIONS = (
    *("copy", "reduce", "scatter", "gather"),
    *("all_gather", "reduce_scatter", "all_to_all", "broadcast"),
)
REPLICATED_INPUT = ("copy", "scatter")
REPLICATED_OUTPUT = ("reduce", "gather")
SIZES = {1: (3,), 2: (3, 1), 3: (2, 0, 3)}
"""Uneven lengths for groups of one, two and three ranks."""
OTHER = 2
"""Length of a dim that is neither cut nor joined."""


def world_of(layout: str) -> int:
    return max(rank for ranks in LAYOUTS[layout] for rank in ranks) + 1


def my_group(layout: str) -> dist.ProcessGroup:
    rank = dist.get_rank()
    return Groups(rank).of(next(ranks for ranks in LAYOUTS[layout] if rank in ranks))


@dataclass(frozen=True)
class Case:
    """One way to call an operation in a group of `n` ranks."""

    name: str
    n: int
    dims: tuple[int, ...] = ()
    uneven: bool = False

    def sent(self, index: int) -> tuple[int, ...]:
        """Lengths that rank `index` cuts the first of its dims into."""
        if not self.uneven:
            return (2,) * self.n
        if self.in_one_dim:
            return tuple((1 + index + 2 * to) % 3 for to in range(self.n))
        return SIZES[self.n]

    def held(self, index: int) -> tuple[int, ...]:
        """Lengths that it joins along the last of its dims, from each rank."""
        if self.in_one_dim:
            return tuple(self.sent(k)[index] for k in range(self.n))
        return tuple(reversed(SIZES[self.n])) if self.uneven else (2,) * self.n

    @property
    def in_one_dim(self) -> bool:
        return len(self.dims) == 2 and self.dims[0] % 3 == self.dims[1] % 3

    @property
    def cuts(self) -> bool:
        return self.name in ("scatter", "reduce_scatter", "all_to_all")

    def shape(self, index: int) -> tuple[int, ...]:
        shape = [OTHER] * 3
        if self.name in ("gather", "all_gather", "all_to_all") and not self.in_one_dim:
            shape[self.dims[-1]] = self.held(index)[index]
        if self.cuts:
            shape[self.dims[0]] = sum(self.sent(index))
        return tuple(shape)

    def draw(self, index: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
        """Random numbers for rank `index`, the same on all where the input is replicated."""
        alike = self.name in REPLICATED_INPUT
        return draw(self.shape(index), seed if alike else seed + 1 + index, dtype)

    def draw_for(self, out: Tensor, index: int, seed: int = 100) -> Tensor:
        """Random numbers as the gradient of an output, the same on all where it is replicated."""
        alike = self.name in REPLICATED_OUTPUT
        return draw(out.shape, seed if alike else seed + 1 + index, out.dtype)

    def call(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        sizes = {}
        if self.uneven and self.name == "all_to_all":
            index = group.rank()
            sizes = {"split_sizes": self.sent(index), "join_sizes": self.held(index)}
        elif self.uneven:
            sizes = {"sizes": self.sent(0) if self.cuts else self.held(0)}
        elif self.name == "broadcast":
            sizes = {"source": dist.get_global_rank(group, self.n - 1)}
        return getattr(collectives, self.name)(x, *self.dims, group=group, **sizes)

    def plain(self, xs: Sequence[Tensor], index: int) -> Tensor:
        """The right answer on rank `index`, with all ranks' inputs at hand."""
        if self.name == "copy":
            return xs[index]
        if self.name == "broadcast":
            return xs[-1]
        if self.name == "reduce":
            return sum(xs[1:], xs[0])
        if self.name in ("gather", "all_gather"):
            return torch.cat(list(xs), self.dims[0])
        if self.name == "scatter":
            return xs[index].split(self.sent(index), self.dims[0])[index]
        if self.name == "reduce_scatter":
            return sum(xs[1:], xs[0]).split(self.sent(index), self.dims[0])[index]
        cut, join = self.dims
        return torch.cat([x.split(self.sent(k), cut)[index] for k, x in enumerate(xs)], join)


def cases(name: str, n: int) -> list[Case]:
    """An operation over first, middle and last dim, even and uneven."""
    if name in ("copy", "reduce", "broadcast"):
        return [Case(name, n)]
    if name == "all_to_all":
        over = [(0, 1), (1, 0), (-1, 1), (0, 0), (-2, 1)]
    else:
        over = [(0,), (1,), (-1,)]
    return [Case(name, n, dims, uneven) for dims in over for uneven in (False, True)]


def draw(
    shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> Tensor:
    return scale * torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))

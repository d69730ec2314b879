"""Every collective as its tests see it: what each rank gives and what it must get."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage import comm
from torchdistpackage.comm import collective_table
from torchdistpackage.comm.groups import Groups

LAYOUTS = {
    "alone": [[0]],
    "pairs": [[0, 2], [1, 3]],
    "three": [[0], [1, 2, 3]],
}
"""Groups of a world: strided ones, and one that begins after rank 0 beside a group of one."""

OPERATIONS = {name: spec for name, spec in collective_table.OPERATIONS.items() if spec.signature}
"""Those that autograd goes through: a new one is here by its row alone."""
REPLICATED_INPUT = tuple(name for name, spec in OPERATIONS.items() if spec.takes == "I")
REPLICATED_OUTPUT = tuple(name for name, spec in OPERATIONS.items() if spec.gives == "I")
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
        return OPERATIONS[self.name].cuts

    def shape(self, index: int) -> tuple[int, ...]:
        shape = [OTHER] * 3
        if OPERATIONS[self.name].joins and not self.in_one_dim:
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
        if self.uneven and self.cuts and OPERATIONS[self.name].joins:
            index = group.rank()
            sizes = {"split_sizes": self.sent(index), "join_sizes": self.held(index)}
        elif self.uneven:
            sizes = {"sizes": self.sent(0) if self.cuts else self.held(0)}
        elif takes_source(self.name):
            sizes = {"source": dist.get_global_rank(group, self.n - 1)}
        return getattr(comm, self.name)(x, *self.dims, group=group, **sizes)

    def plain(self, xs: Sequence[Tensor], index: int) -> Tensor:
        """The right answer on rank `index`, with all ranks' inputs at hand."""
        spec = OPERATIONS[self.name]
        cuts = [self.sent(k) for k in range(self.n)]
        numbers = (self.n - 1,) if takes_source(self.name) else self.dims
        return spec.load(spec.map).answer(xs, index, cuts, *numbers)


def parameters_of(name: str) -> list[str]:
    return list(inspect.signature(getattr(comm, name)).parameters)


def takes_source(name: str) -> bool:
    return "source" in parameters_of(name)


def cases(name: str, n: int) -> list[Case]:
    """An operation over first, middle and last dim, even and uneven."""
    takes = parameters_of(name)
    num_dims = sum(x.endswith("dim") for x in takes)
    if num_dims == 0:
        return [Case(name, n)]
    over = [(0, 1), (1, 0), (-1, 1), (0, 0), (-2, 1)] if num_dims == 2 else [(0,), (1,), (-1,)]
    lengths = (False, True) if any(x.endswith("sizes") for x in takes) else (False,)
    return [Case(name, n, dims, uneven) for dims in over for uneven in lengths]


def draw(
    shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> Tensor:
    return scale * torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))

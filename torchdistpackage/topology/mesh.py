"""Named grid of ranks: arithmetic only, no processes.

A mesh lists its axes from slowest to fastest varying, and rank r sits where the
mixed-radix digits of r say. Who talks to whom follows from that one rule, so a mesh
of a million ranks answers for any rank without ever listing the others.

Ranks fill nodes in order, so whether a group crosses a node follows from its first and last rank.
Tensor, context and expert groups exchange activations in every layer: a warning says so of those.

Words: an *axis* belongs to the mesh, a *dim* to a tensor; *rank* is global, *index*
is the position along an axis.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torchdistpackage.errors import TopologyError

Ranks = Sequence[int]
"""Ascending ranks: a `range` where they form a progression, else a tuple."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axis names and sizes, slowest first, e.g. `Mesh((("data", 2), ("tensor", 4)))`.

    Raises:
        TopologyError: an axis is named twice, or a size is not a positive integer.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise TopologyError(f"axis {', '.join(twice)} is listed twice in {names}; name it once")
        object.__setattr__(
            self, "axes", tuple((name, whole_size(name, size)) for name, size in self.axes)
        )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    def axis_size(self, *axes: str) -> int:
        """Number of ranks along `axes` together; an axis the mesh does not have counts 1."""
        sizes = dict(self.axes)
        return math.prod(sizes.get(axis, 1) for axis in axes)

    def coord(self, rank: int) -> dict[str, int]:
        """Index of `rank` along each axis: rank 6 of data=2, tensor=4 is data 1, tensor 2."""
        self._check(rank)
        index: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, index[name] = divmod(rank, size)
        return {name: index[name] for name in self.names}

    def rank(self, coord: dict[str, int]) -> int:
        """The rank at `coord`; axes left out are at index 0. Inverse of `coord`."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coord.get(name, 0) % size
        return rank

    def index(self, rank: int, *axes: str) -> int:
        """Position of `rank` along `axes` taken together, the first named varying slowest."""
        coord, position = self.coord(rank), 0
        for axis in axes:
            position = position * self.axis_size(axis) + coord.get(axis, 0)
        return position

    def group(self, rank: int, axes: Iterable[str]) -> Ranks:
        """Ranks that differ from `rank` only along `axes`, `rank` included, ascending."""
        self._check(rank)
        dims = self._dims(set(axes))
        first = rank - sum((rank // stride % size) * stride for size, stride in dims)
        return _spread(first, dims)

    def groups(self, axes: Iterable[str]) -> Iterator[Ranks]:
        """Every group along `axes`, ordered by its first rank."""
        inside = set(axes)
        dims = self._dims(inside)
        for first in _spread(0, self._dims(set(self.names) - inside)):
            yield _spread(first, dims)

    def neighbour(self, rank: int, axis: str, step: int = 1) -> int:
        """The rank `step` places further along `axis`, wrapping round."""
        coord = self.coord(rank)
        return self.rank(coord | {axis: (coord.get(axis, 0) + step) % self.axis_size(axis)})

    def _dims(self, axes: set[str]) -> list[tuple[int, int]]:
        """(size, stride) of the listed axes, slowest first, neighbours merged into one."""
        dims: list[tuple[int, int]] = []
        stride = 1
        for name, size in reversed(self.axes):
            if name in axes and size > 1:
                if dims and stride == dims[-1][0] * dims[-1][1]:
                    dims[-1] = (size * dims[-1][0], dims[-1][1])
                else:
                    dims.append((size, stride))
            stride *= size
        return dims[::-1]

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise TopologyError(
                f"rank {rank} is outside this mesh of {self.size} ranks ({describe(self.axes)}); "
                f"use 0 to {self.size - 1}"
            )


def describe(axes: Iterable[tuple[str, object]]) -> str:
    """`data=2 x tensor=4`, for messages."""
    return " x ".join(f"{name}={size}" for name, size in axes) or "no axes"


def whole_size(name: str, size: object) -> int:
    """`size` as a positive int: 4 and 4.0 pass, 3.5, 0 and text do not.

    Raises:
        TopologyError: names the axis and the value.
    """
    # a bool is an int to Python, but no one means it as a size
    if isinstance(size, bool) or not isinstance(size, int | float) or size < 1 or size % 1 != 0:
        raise TopologyError(
            f"axis {name} has size {size!r}; a size is a whole number of ranks, 1 or more"
        )
    return int(size)


def _spread(first: int, dims: list[tuple[int, int]]) -> Ranks:
    """All of first + sum(i * stride), i < size: in order, as a range where that is one."""
    if not dims:
        return range(first, first + 1)
    (size, stride), *rest = dims
    if not rest:
        return range(first, first + size * stride, stride)
    return tuple(r for i in range(size) for r in _spread(first + i * stride, rest))


BUSY = ("tensor", "context")
"""Axes that talk inside every layer, most talkative first."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """How many of the groups along `axis` have members on more than one node."""

    axis: str
    num_groups: int
    num_crossing: int


def crossings(mesh: Mesh, ranks_per_node: int) -> tuple[Crossing, ...]:
    """One `Crossing` for each axis longer than 1, in mesh order."""
    result: list[Crossing] = []
    for name, size in mesh.axes:
        if size > 1:
            spans = [
                {ranks[0] // ranks_per_node, ranks[-1] // ranks_per_node}
                for ranks in mesh.groups((name,))
            ]
            result.append(Crossing(name, len(spans), sum(len(span) > 1 for span in spans)))
    return tuple(result)


def advice(mesh: Mesh, ranks_per_node: int) -> tuple[str, ...]:
    """Warnings about busy groups that cross nodes, each with what to change."""
    warnings: list[str] = []
    for crossing in crossings(mesh, ranks_per_node):
        if crossing.axis not in BUSY or not crossing.num_crossing:
            continue
        size = mesh.axis_size(crossing.axis)
        text = (
            f"{crossing.num_crossing} of {crossing.num_groups} {crossing.axis} groups of {size} "
            f"ranks cross a node of {ranks_per_node} ranks"
        )
        if size > ranks_per_node:
            fix = f"use {crossing.axis} {_largest_divisor(ranks_per_node, size)} or less"
        else:
            fix = f"put it last: parallel.order {list(best_order(mesh.names))}"
        warnings.append(f"{text}; {fix}")
    return tuple(warnings)


def best_order(names: Sequence[str]) -> tuple[str, ...]:
    """The same axes with the talkative ones innermost."""
    rank = {axis: -i for i, axis in enumerate(BUSY)}
    quiet = [name for name in names if name not in rank]
    return (*quiet, *sorted((n for n in names if n in rank), key=lambda n: rank[n]))


def _largest_divisor(limit: int, of: int) -> int:
    return max(n for n in range(1, limit + 1) if of % n == 0)

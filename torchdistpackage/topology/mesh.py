"""A named grid of ranks, and two views of one world. Pure arithmetic; starts no process.

A mesh lists its axes from slowest to fastest varying; rank r sits at the mixed-radix digits of r.
All groups follow from that one rule, so a mesh of a million ranks answers for any rank without
listing the others.

Ranks fill nodes in order, so whether a group crosses a node follows from its first and last rank.
Tensor and context groups exchange activations in every layer, so `advice` warns when they cross
nodes.

A `Topology` has two views of the same ranks. The dense mesh has the axes data, pipe, context and
tensor. The expert view cuts its data axis in two, with `expert_data` outside `expert`. Every group
is a set of axes in one of the two views; this file alone defines the names that users say (`model`,
`moe_ep`, ...).

Words: an *axis* belongs to the mesh, a *dim* to a tensor; *rank* is global, *index* is the position
along an axis.
"""

import difflib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal

from torchdistpackage.errors import TopologyError

Ranks = Sequence[int]
"""Ascending ranks: a `range` if they form a progression, else a tuple."""


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
        """Axis names, slowest first."""
        return tuple(name for name, _ in self.axes)

    def axis_size(self, *axes: str) -> int:
        """Return the number of ranks along `axes` together; an axis that is not in the mesh counts
        1.
        """
        sizes = dict(self.axes)
        return math.prod(sizes.get(axis, 1) for axis in axes)

    def coord(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` along each axis: rank 6 of data=2, tensor=4 is data 1, tensor
        2.
        """
        self._check(rank)
        index: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, index[name] = divmod(rank, size)
        return {name: index[name] for name in self.names}

    def rank(self, coord: dict[str, int]) -> int:
        """Return the rank at `coord`; axes left out are at index 0. Inverse of `coord`."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coord.get(name, 0) % size
        return rank

    def index(self, rank: int, *axes: str) -> int:
        """Return the position of `rank` along `axes` combined, the first named varying slowest."""
        coord, position = self.coord(rank), 0
        for axis in axes:
            position = position * self.axis_size(axis) + coord.get(axis, 0)
        return position

    def group(self, rank: int, axes: Iterable[str]) -> Ranks:
        """Return the ranks that differ from `rank` only along `axes`, `rank` included,
        ascending.
        """
        self._check(rank)
        dims = self._dims(set(axes))
        first = rank - sum((rank // stride % size) * stride for size, stride in dims)
        return _spread(first, tuple(dims))

    def groups(self, axes: Iterable[str]) -> Iterator[Ranks]:
        """Yield every group along `axes`, ordered by its first rank."""
        inside = set(axes)
        dims = tuple(self._dims(inside))
        for first in _spread(0, tuple(self._dims(set(self.names) - inside))):
            yield _spread(first, dims)

    def neighbour(self, rank: int, axis: str, step: int = 1) -> int:
        """Return the rank `step` places further along `axis`, wrapping round."""
        coord = self.coord(rank)
        return self.rank(coord | {axis: (coord.get(axis, 0) + step) % self.axis_size(axis)})

    def _dims(self, axes: set[str]) -> list[tuple[int, int]]:
        """Return (size, stride) of the listed axes, slowest first, with adjacent axes merged into
        one.
        """
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
    """Return the axes as text for messages, such as `data=2 x tensor=4`."""
    return " x ".join(f"{name}={size}" for name, size in axes) or "no axes"


def whole_size(name: str, size: object) -> int:
    """Return `size` as a positive int: 4 and 4.0 pass, 3.5, 0 and text do not.

    Raises:
        TopologyError: names the axis and the value.
    """
    # a bool is an int to Python, but no one means it as a size
    if isinstance(size, bool) or not isinstance(size, int | float) or size < 1 or size % 1 != 0:
        raise TopologyError(
            f"axis {name} has size {size!r}; use a whole number of ranks, 1 or more"
        )
    return int(size)


@lru_cache(maxsize=256)
def _spread(first: int, dims: tuple[tuple[int, int], ...]) -> Ranks:
    """Return all values first + sum(i * stride) with i < size, ascending, as a range if they form
    one.

    The result is cached, because every parameter of a plan asks for one of the same few groups."""
    return _expand(first, dims)


def _expand(first: int, dims: tuple[tuple[int, int], ...]) -> Ranks:
    if not dims:
        return range(first, first + 1)
    (size, stride), other_dims = dims[0], dims[1:]
    if not other_dims:
        return range(first, first + size * stride, stride)
    return tuple(r for i in range(size) for r in _expand(first + i * stride, other_dims))


BUSY = ("tensor", "context")
"""Axes whose ranks communicate inside every layer, busiest first."""


def adjacent_on_a_host(hosts: Sequence[str]) -> int:
    """Return the largest number of adjacent ranks, aligned to it, that share a host.

    hosts: the host of each rank.
    """
    return math.gcd(*(len(list(same)) for _, same in groupby(hosts)))


@dataclass(frozen=True, slots=True)
class Crossing:
    """Number of groups along `axis`, and the number that spans several nodes."""

    axis: str
    num_groups: int
    num_crossing: int


def crossings(mesh: Mesh, ranks_per_node: int) -> tuple[Crossing, ...]:
    """Return one `Crossing` for each axis longer than 1, in mesh order."""
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
    """Return warnings about busy groups that cross nodes, each with what to change."""
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
    """Return the same axes with the busiest ones innermost."""
    rank = {axis: -i for i, axis in enumerate(BUSY)}
    quiet = [name for name in names if name not in rank]
    return (*quiet, *sorted((n for n in names if n in rank), key=lambda n: rank[n]))


def _largest_divisor(limit: int, number: int) -> int:
    """Return the largest divisor of `number` that is at most `limit`."""
    return max(n for n in range(1, limit + 1) if number % n == 0)


DEFAULT_ORDER = ("data", "pipe", "context", "tensor")
"""Outermost first: tensor ranks are neighbours, because they communicate most."""

View = Literal["dense", "expert"]
Size = float | str | None
"""A size in a declarative config; None, -1 or "auto" stands for "the remaining ranks"."""

Axes = Sequence[tuple[str, Size]] | Mapping[str, Size]
"""`[(axis, size), ...]`, outermost first, or a mapping in that order."""

SHOWN_GROUPS = 8


@dataclass(frozen=True, slots=True)
class Topology:
    """Both views of one world. Build it with `topology(...)`."""

    dense: Mesh
    expert: Mesh

    @property
    def world_size(self) -> int:
        return self.dense.size

    def place(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` along each axis that has more than one rank, `expert`
        included.
        """
        indices = {
            axis: i for axis, i in self.dense.coord(rank).items() if self.dense.axis_size(axis) > 1
        }
        if self.expert.axis_size("expert") > 1:
            indices["expert"] = self.expert.coord(rank)["expert"]
        return indices

    def view(self, name: View) -> Mesh:
        """Return the dense mesh or the expert view, by name."""
        return self.dense if name == "dense" else self.expert

    def named(self, mode: str) -> tuple[Mesh, tuple[str, ...]]:
        """Return the mesh and axes behind a group name such as `data`, `model` or `moe_ep`.

        Raises:
            TopologyError: no group has that name; the message lists the names that exist.
        """
        if mode in self.dense.names:
            return self.dense, (mode,)
        if mode in ALIASES:
            view, axes = ALIASES[mode]
            return self.view(view), axes
        if mode == "global":
            return self.dense, self.dense.names
        if mode == "model":
            return self.dense, self.model_axes
        names = [*self.dense.names, "model", "global", *ALIASES]
        raise TopologyError(
            f"there is no group {mode!r} in {describe(self.dense.axes)}; use one of "
            f"{', '.join(names)}"
        )

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Axes whose ranks work on the same batch: all but data."""
        return tuple(name for name in self.dense.names if name != "data")

    def group(self, rank: int, mode: str) -> Ranks:
        """Return the ranks of the group called `mode` that `rank` is in, ascending."""
        mesh, axes = self.named(mode)
        return mesh.group(rank, axes)

    def describe(self, modes: Iterable[str]) -> str:
        """Return a line `group pipe, ranks: [0, 8]` for each group of `modes`, at most 8 for each
        mode.
        """
        return "\n".join(line for mode in modes for line in self._groups_of(mode))

    def _groups_of(self, mode: str) -> Iterator[str]:
        mesh, axes = self.named(mode)
        for ranks in itertools.islice(mesh.groups(axes), SHOWN_GROUPS):
            yield f"group {mode}, ranks: {list(ranks)}"
        number = mesh.size // mesh.axis_size(*axes)
        if number > SHOWN_GROUPS:
            yield f"group {mode}: {number - SHOWN_GROUPS} more"

    def with_expert(self, expert: int) -> "Topology":
        """Return the same world with the data axis cut into expert_data x expert.

        Raises:
            TopologyError: `expert` does not divide the data axis.
        """
        return Topology(self.dense, _expert_view(self.dense, expert))


ALIASES: dict[str, tuple[View, tuple[str, ...]]] = {
    "expert": ("expert", ("expert",)),
    "expert_data": ("expert", ("expert_data",)),
    "moe_ep": ("expert", ("expert",)),
    "moe_dp": ("expert", ("expert_data",)),
}


def _pairs(sizes: Axes) -> list[tuple[str, Size]]:
    """Return the axes as a list of pairs; refuse ("data", 2), an easy slip for [("data", 2)]."""
    pairs: list[Any] = list(sizes.items() if isinstance(sizes, Mapping) else sizes)
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[0], str):  # pyright: ignore[reportUnknownArgumentType]
            raise TopologyError(
                f"the axes are {sizes!r}; give a list of pairs such as [('data', 2), ('pipe', 4)]"
            )
    return [(name, size) for name, size in pairs]


def topology(sizes: Axes, world_size: int, *, expert: int = 1) -> Topology:
    """Build both views from `[(axis, size), ...]` or `{axis: size, ...}`, outermost first.

    Axes may come in any order and be incomplete; one size may be None, -1 or "auto" and is then
    inferred. Sizes may be integral floats (4.0), as arithmetic on world sizes gives them.

    Raises:
        TopologyError: a size is not an integer, two are left open, the product is not
            `world_size`, `expert` does not divide the data axis, or an axis has the name of a
            group that follows from the others.
    """
    axes = _pairs(sizes)
    if reserved := [name for name, _ in axes if name in ("model", "global", *ALIASES)]:
        raise TopologyError(
            f"{reserved[0]!r} is not an axis: that group follows from the axes; leave it out"
            + ", and give expert= for the ranks that share the experts" * (reserved[0] in ALIASES)
        )
    left_open = [name for name, size in axes if size in (None, -1, "auto")]
    if len(left_open) > 1:
        raise TopologyError(
            f"the sizes of {' and '.join(left_open)} are both left open; "
            f"at most one can be inferred"
        )
    sized_axes = [(name, whole_size(name, size)) for name, size in axes if name not in left_open]
    product = Mesh(tuple(sized_axes)).size
    if left_open:
        if world_size % product:
            raise TopologyError(
                f"{describe(sized_axes)} takes {product} ranks for each {left_open[0]} index, "
                f"which "
                f"does not divide the {world_size} ranks of the world; use a multiple of {product}"
            )
        inferred = dict(sized_axes) | {left_open[0]: world_size // product}
        sized_axes = [(name, inferred[name]) for name, _ in axes]
    elif product != world_size:
        raise TopologyError(
            f"{describe(sized_axes)} is {product} ranks, but the world has {world_size}; "
            f"change a size so that the product is {world_size}, or start {product} ranks"
        )
    dense = Mesh(tuple(sized_axes))
    return Topology(dense, _expert_view(dense, expert))


def unknown_axes(names: Iterable[str]) -> str:
    """Return a warning about axes that nothing in this package uses, or ""."""
    unknown: list[str] = []
    for name in names:
        if name not in DEFAULT_ORDER:
            close = difflib.get_close_matches(name.lower(), DEFAULT_ORDER, n=1)
            unknown.append(f"{name!r} (did you mean {close[0]!r}?)" if close else repr(name))
    if not unknown:
        return ""
    return (
        f"not among the known axes {', '.join(DEFAULT_ORDER)}: {', '.join(unknown)}; such axes get "
        f"groups, but nothing in this package uses them by name"
    )


def _expert_view(dense: Mesh, expert: int) -> Mesh:
    """Return the mesh with the data axis cut into expert_data x expert."""
    data = dense.axis_size("data")
    if expert < 1 or data % expert:
        raise TopologyError(
            f"expert={expert} must divide the data axis, which has {data} ranks; "
            f"valid sizes: {', '.join(str(n) for n in range(1, data + 1) if data % n == 0)}"
        )
    axes: list[tuple[str, int]] = []
    for name, size in dense.axes:
        axes += (
            [("expert_data", size // expert), ("expert", expert)]
            if name == "data"
            else [(name, size)]
        )
    return Mesh(tuple(axes))

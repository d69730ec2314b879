"""One world seen two ways: dense (data pipe context tensor) and expert.

The expert view is the dense mesh with the data axis cut in two, `expert_data` outside
`expert`, so both views number the same ranks alike. Every group that anybody asks for is
a set of axes in one of the two; the names users say (`model`, `moe_ep`, ...) are
spelled out here once.
"""

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchdistpackage.errors import TopologyError
from torchdistpackage.topology.mesh import Mesh, Ranks, describe, whole_size

DEFAULT_ORDER = ("data", "pipe", "context", "tensor")
"""Outermost first: tensor ranks are neighbours, because they talk most."""

View = Literal["dense", "expert"]
Size = float | str | None
"""A size in a declarative config; None, -1 or "auto" stands for "whatever is left"."""

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

    def view(self, name: View) -> Mesh:
        return self.dense if name == "dense" else self.expert

    def named(self, mode: str) -> tuple[Mesh, tuple[str, ...]]:
        """The mesh and axes behind a group name such as `data`, `model` or `moe_ep`.

        Raises:
            TopologyError: no one by that name; lists the names there are.
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
        known = [*self.dense.names, "model", "global", *ALIASES]
        raise TopologyError(
            f"there is no group {mode!r} in {describe(self.dense.axes)}; "
            f"the names are {', '.join(known)}"
        )

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Axes of ranks that work on one and the same batch: everything but data."""
        return tuple(name for name in self.dense.names if name != "data")

    def group(self, rank: int, mode: str) -> Ranks:
        """Ranks of the group called `mode` that `rank` is in, ascending."""
        mesh, axes = self.named(mode)
        return mesh.group(rank, axes)

    def describe(self, modes: Iterable[str]) -> str:
        """A line `group pipe, ranks: [0, 8]` for each group of these modes; many are cut."""
        return "\n".join(line for mode in modes for line in self._groups_of(mode))

    def _groups_of(self, mode: str) -> Iterator[str]:
        mesh, axes = self.named(mode)
        for ranks in itertools.islice(mesh.groups(axes), SHOWN_GROUPS):
            yield f"group {mode}, ranks: {list(ranks)}"
        number = mesh.size // mesh.axis_size(*axes)
        if number > SHOWN_GROUPS:
            yield f"group {mode}: {number - SHOWN_GROUPS} more"

    def with_expert(self, expert: int) -> "Topology":
        """The same world with the data axis cut into expert_data x expert.

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


def topology(sizes: Axes, world_size: int, *, expert: int = 1) -> Topology:
    """Build both views from `[(axis, size), ...]` or `{axis: size, ...}`, outermost first.

    Any order, any subset; one size may be None, -1 or "auto" and is then inferred. Sizes may be
    integral floats (4.0), as arithmetic on world sizes gives them.

    Raises:
        TopologyError: a size is not an integer, two are left open, the product is not
            `world_size`, `expert` does not divide the data axis, or an axis has the name of a
            group that follows from the others.
    """
    axes = list(sizes.items() if isinstance(sizes, Mapping) else sizes)
    if taken := [name for name, _ in axes if name in ("model", "global", *ALIASES)]:
        raise TopologyError(
            f"{taken[0]!r} is no axis: that group follows from the axes; leave it out"
            + ", and give expert= for the ranks that share the experts" * (taken[0] in ALIASES)
        )
    left_open = [name for name, size in axes if size in (None, -1, "auto")]
    if len(left_open) > 1:
        raise TopologyError(
            f"the sizes of {' and '.join(left_open)} are both left open; "
            f"at most one can be inferred"
        )
    known = [(name, whole_size(name, size)) for name, size in axes if name not in left_open]
    product = Mesh(tuple(known)).size
    if left_open:
        if world_size % product:
            raise TopologyError(
                f"{describe(known)} takes {product} ranks for each {left_open[0]} index, which "
                f"does not divide the {world_size} ranks of the world; use a multiple of {product}"
            )
        inferred = dict(known) | {left_open[0]: world_size // product}
        known = [(name, inferred[name]) for name, _ in axes]
    elif product != world_size:
        raise TopologyError(
            f"{describe(known)} is {product} ranks, but the world has {world_size}; "
            f"change a size so that the product is {world_size}, or start {product} ranks"
        )
    dense = Mesh(tuple(known))
    return Topology(dense, _expert_view(dense, expert))


def unknown_axes(names: Iterable[str]) -> str:
    """What to say of axes that nothing in this package uses by itself; "" if there are none."""
    said: list[str] = []
    for name in names:
        if name not in DEFAULT_ORDER:
            close = difflib.get_close_matches(name.lower(), DEFAULT_ORDER, n=1)
            said.append(f"{name!r} (did you mean {close[0]!r}?)" if close else repr(name))
    if not said:
        return ""
    return (
        f"not among the known axes {', '.join(DEFAULT_ORDER)}: {', '.join(said)}; such axes get "
        f"groups, but nothing in this package uses them by name"
    )


def _expert_view(dense: Mesh, expert: int) -> Mesh:
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

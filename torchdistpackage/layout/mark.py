"""Layouts that modules declare, and the marks that carry them on parameters. No torch.

A submodule with a method `layouts()` declares how the parameters it names are cut. An outer module
overrides an inner one. A parameter that no module declares is replicated on every rank.

A mark on a parameter holds its layout, its group and how many reducers sum its gradient. It is a
plain attribute, because torch's optimizers leave their fast paths on subclasses of Parameter.
Operations, copies and pickles drop it, so `torch.load(weights_only=True)` can read the pickle; the
module that holds the parameter marks it again.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from torchdistpackage.layout.layout import Layout

Layouts = dict[str, Layout]
"""Layouts by local parameter name of one module."""


class Parameter(Protocol):
    @property
    def shape(self) -> Iterable[int]: ...


class Module(Protocol):
    """The methods of torch.nn.Module that this file calls."""

    def named_modules(self) -> Iterable[tuple[str, object]]: ...

    def named_parameters(
        self, *, remove_duplicate: bool = True
    ) -> Iterable[tuple[str, Parameter]]: ...


def collect(module: Module, prefix: str = "") -> Layouts:
    """Return the layouts of `module.named_parameters()`, under their local names.

    prefix: put before every global name, for a module inside a larger model.
    A shared parameter is listed once, under its first name.
    """
    declared, result = declared_in(module), Layouts()
    for name, parameter in module.named_parameters():
        layout = declared.get(name) or Layout(name, tuple(parameter.shape))
        result[name] = layout.named(join(prefix, layout.name))
    return result


def declared_in(module: Module) -> Layouts:
    """Return those layouts of `collect(module)` that a submodule declares."""
    declared: Layouts = {}
    for path, part in module.named_modules():
        layouts: Callable[[], Layouts] | None = getattr(part, "layouts", None)
        if callable(layouts):
            declared = prefixed(path, layouts()) | declared
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    firsts = ((aliases[0], next(filter(declared.get, aliases), None)) for aliases in names.values())
    return {name: declared[alias] for name, alias in firsts if alias is not None}


def prefixed(prefix: str, layouts: Layouts) -> Layouts:
    """Return the same layouts one level further out: `weight` becomes `prefix.weight`."""
    return {
        join(prefix, name): layout.named(join(prefix, layout.name))
        for name, layout in layouts.items()
    }


def join(prefix: str, name: str) -> str:
    """Return `prefix.name`, or `name` if there is no prefix."""
    return f"{prefix}.{name}" if prefix else name


ATTRIBUTE = "tdp_layout"
"""Name of the attribute; not `layout`, which in torch means strided or sparse."""
PLACE = "tdp_place"


class Mark:
    """The description of its split that one parameter carries.

    layout: as the outermost declaring module gave it, `depth` levels above the parameter.
    group: ranks that each hold a shard of it, or a partial sum of its gradient; None: not known.
    num_reducers: number of reducers that sum these partial gradients; with 0 the layer does it.
    """

    __slots__ = ("depth", "group", "layout", "num_reducers")

    def __init__(self, layout: Layout, group: object, depth: float):
        self.layout, self.group, self.depth = layout, group, depth
        self.num_reducers = 0

    @property
    def is_told(self) -> bool:
        """True if a user gave the layout, not a module."""
        return self.depth == math.inf

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # pickles as an empty dict: torch.load(weights_only=True) refuses classes of our own
        return OrderedDict, ()

    def remove(self) -> None:
        """Withdraw one reducer's claim to sum this gradient."""
        self.num_reducers -= 1


@dataclass(frozen=True)
class ShardPlace:
    """The shard, out of `num` in one process, that holds this parameter, and the split between
    them.
    """

    layout: Layout
    index: int
    num: int

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()  # dropped in a pickle, as a Mark is


def place_of(parameter: object) -> ShardPlace | None:
    """Return the shard of a parameter if one process holds all shards, else None."""
    shard_place = getattr(parameter, PLACE, None)
    return shard_place if isinstance(shard_place, ShardPlace) else None


def note_place(parameter: object, shard_place: ShardPlace) -> None:
    """Record on `parameter` its shard in this process; copies drop the record."""
    setattr(parameter, PLACE, shard_place)


def mark_of(parameter: object) -> Mark | None:
    """Return the mark of a parameter, or None."""
    mark_ = getattr(parameter, ATTRIBUTE, None)
    return mark_ if isinstance(mark_, Mark) else None


def layout_of(parameter: object) -> Layout | None:
    """Return the layout in a parameter's mark, or None if it is replicated on every rank."""
    mark = mark_of(parameter)
    return None if mark is None else mark.layout


def mark_parameter(
    parameter: object, layout: Layout, group: object, depth: float = math.inf
) -> None:
    """Mark `parameter` with the layout from a module `depth` levels above it, or from the user.

    The mark keeps an outer module's layout if an inner one declares the same cut.
    """
    existing = mark_of(parameter)
    if existing is None:
        setattr(parameter, ATTRIBUTE, Mark(layout, group, depth))
        return
    if depth >= existing.depth or _cut(layout) != _cut(existing.layout):
        existing.layout, existing.depth = layout, depth
    if group is not None:
        existing.group = group


def mark(module: Module, layouts: Layouts | None = None) -> None:
    """Mark the parameters of your own module with their splits.

    Layers of this package mark their parameters, and wrappers mark those of their module. layouts:
    default: those declared by submodules. Replicated parameters need no entry.
    """
    declared = declared_in(module) if layouts is None else layouts
    for name, parameter in module.named_parameters():
        if name in declared and not declared[name].is_whole:
            depth = name.count(".") if layouts is None else math.inf
            mark_parameter(parameter, declared[name], None, depth)


def _cut(layout: Layout) -> Layout:
    """Return the fields of a layout that decide whether two layouts cut alike."""
    heads = layout.heads if layout.is_shared else None
    return replace(layout, name="", stages=(), uneven=False, heads=heads)

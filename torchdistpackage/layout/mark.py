"""What modules and parameters say of their layouts. No torch.

A part of a module that has `layouts()` speaks for the parameters it names, the outermost such part
first; what no part speaks for is replicated on every rank.

A parameter carries its layout, its group and who sums its gradient in a mark: a plain attribute,
because torch's optimizers leave their fast paths on subclasses of Parameter. Operations and copies
drop it, and a pickled parameter leaves it behind, so that `torch.load(weights_only=True)` reads
that; the module that holds the parameter marks it again.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from torchdistpackage.layout.layout import Layout

Layouts = dict[str, Layout]
"""Layouts by parameter name, local to one module."""


class Parameter(Protocol):
    @property
    def shape(self) -> Iterable[int]: ...


class Module(Protocol):
    """What is used of a torch.nn.Module."""

    def named_modules(self) -> Iterable[tuple[str, object]]: ...

    def named_parameters(
        self, *, remove_duplicate: bool = True
    ) -> Iterable[tuple[str, Parameter]]: ...


def collect(module: Module, prefix: str = "") -> Layouts:
    """Layouts of `module.named_parameters()`, under their local names.

    prefix: put before every global name, for a module that is a part of a larger model.
    A shared parameter is listed once, under its first name.
    """
    declared, result = declared_in(module), Layouts()
    for name, parameter in module.named_parameters():
        layout = declared.get(name) or Layout(name, tuple(parameter.shape))
        result[name] = layout.named(join(prefix, layout.name))
    return result


def declared_in(module: Module) -> Layouts:
    """Those of `collect(module)` that some part of it declares."""
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
    """The same layouts one level further out: `weight` becomes `prefix.weight`."""
    return {
        join(prefix, name): layout.named(join(prefix, layout.name))
        for name, layout in layouts.items()
    }


def join(prefix: str, name: str) -> str:
    """`prefix.name`, or `name` where there is no prefix."""
    return f"{prefix}.{name}" if prefix else name


ATTRIBUTE = "tdp_layout"
"""Not `layout`, which is torch's word for strided or sparse."""
PLACE = "tdp_place"


class Mark:
    """Of one parameter.

    layout: under its name in the outermost module that has spoken for it, `depth` levels out.
    group: ranks that cut it, or each of which has a part of its gradient; None: not known.
    num_reducers: how many sum these parts of its gradient. Without one its layer does.
    """

    __slots__ = ("depth", "group", "layout", "num_reducers")

    def __init__(self, layout: Layout, group: object, depth: float):
        self.layout, self.group, self.depth = layout, group, depth
        self.num_reducers = 0

    @property
    def is_told(self) -> bool:
        """Whether a user gave the layout, not a module."""
        return self.depth == math.inf

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()

    def remove(self) -> None:
        """A reducer that summed no longer does."""
        self.num_reducers -= 1


@dataclass(frozen=True)
class ShardPlace:
    """The shard of `num` in one process that has this parameter, and how shards split it."""

    layout: Layout
    index: int
    num: int

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()  # as of a Mark: a pickled parameter leaves it behind


def place_of(parameter: object) -> ShardPlace | None:
    """The shard that a parameter is in, where all shards are in one process."""
    found = getattr(parameter, PLACE, None)
    return found if isinstance(found, ShardPlace) else None


def note_place(parameter: object, place: ShardPlace) -> None:
    """Note on `parameter` which shard of this process has it; copies drop the note."""
    setattr(parameter, PLACE, place)


def mark_of(parameter: object) -> Mark | None:
    """The mark of a parameter, if it has one."""
    found = getattr(parameter, ATTRIBUTE, None)
    return found if isinstance(found, Mark) else None


def layout_of(parameter: object) -> Layout | None:
    """How a parameter is cut, as far as it knows; None: replicated on every rank."""
    mark = mark_of(parameter)
    return None if mark is None else mark.layout


def mark_parameter(
    parameter: object, layout: Layout, group: object, depth: float = math.inf
) -> None:
    """Note on `parameter` what a module `depth` levels above its own says, or the user.

    An outer module's word stays where an inner one says the same cut.
    """
    known = mark_of(parameter)
    if known is None:
        setattr(parameter, ATTRIBUTE, Mark(layout, group, depth))
        return
    if depth >= known.depth or _cut(layout) != _cut(known.layout):
        known.layout, known.depth = layout, depth
    if group is not None:
        known.group = group


def mark(module: Module, layouts: Layouts | None = None) -> None:
    """Note on the parameters of `module` how they are cut: for modules of one's own.

    Layers of this package do it themselves, wrappers do it for the module they are given.
    layouts: default what its parts declare. That a parameter is replicated need not be noted.
    """
    found = declared_in(module) if layouts is None else layouts
    for name, parameter in module.named_parameters():
        if name in found and not found[name].is_whole:
            depth = name.count(".") if layouts is None else math.inf
            mark_parameter(parameter, found[name], None, depth)


def _cut(layout: Layout) -> Layout:
    """What of a layout another one must say too; how uneven parts are cut goes without saying."""
    heads = layout.heads if layout.is_shared else None
    return replace(layout, name="", stages=(), uneven=False, heads=heads)

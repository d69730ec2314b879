"""What a parameter says of itself: its layout, its group, who sums its gradient. No torch.

A mark is a plain attribute of the parameter, because torch's optimizers leave their fast paths on
subclasses of Parameter. Operations and copies drop it, and a pickled parameter leaves it behind, so
that `torch.load(weights_only=True)` reads that; the module that holds the parameter marks it again.
"""

import math
from collections import OrderedDict
from dataclasses import replace

from torchdistpackage.layout.collect import Layouts, Module, declared_in
from torchdistpackage.layout.layout import Layout

ATTRIBUTE = "tdp_layout"
"""Not `layout`, which is torch's word for strided or sparse."""


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


def mark_of(parameter: object) -> Mark | None:
    """The mark of a parameter, if it has one."""
    found = getattr(parameter, ATTRIBUTE, None)
    return found if isinstance(found, Mark) else None


def layout_of(parameter: object) -> Layout | None:
    """How a parameter is cut, as far as it knows; None: whole on every rank."""
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
    layouts: default what its parts declare. That a parameter is whole need not be noted.
    """
    found = declared_in(module) if layouts is None else layouts
    for name, parameter in module.named_parameters():
        if name in found and not found[name].is_whole:
            depth = name.count(".") if layouts is None else math.inf
            mark_parameter(parameter, found[name], None, depth)


def _cut(layout: Layout) -> Layout:
    return replace(layout, name="", stages=())

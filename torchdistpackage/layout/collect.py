"""The layouts of a whole module, by parameter name. No torch.

A part that has `layouts()` speaks for the parameters it names, the outermost such part first; what
nobody speaks for is whole on every rank.
"""

from collections.abc import Callable, Iterable
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

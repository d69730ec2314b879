"""The layouts of a whole module, by parameter name.

One rule: a part that has `layouts()` speaks for the parameters it names, the outermost such
part first; whatever nobody speaks for is whole on every rank.
"""

from torch import nn

from torchdistpackage.layout.layout import Layout
from torchdistpackage.parallel.tensor.layouts import Layouts, join, prefixed


def collect(module: nn.Module, prefix: str = "") -> dict[str, Layout]:
    """Layouts of `module.named_parameters()`, under their local names.

    prefix: put before every global name, for a module that is a part of a larger model.
    A shared parameter is listed once, under its first name.
    """
    spoken: Layouts = {}
    for path, part in module.named_modules():
        if callable(layouts := getattr(part, "layouts", None)):
            spoken = prefixed(path, layouts()) | spoken
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)

    result: dict[str, Layout] = {}
    for name, parameter in module.named_parameters():
        known = [spoken[alias] for alias in names[id(parameter)] if alias in spoken]
        layout = known[0] if known else Layout(name, tuple(parameter.shape))
        result[name] = layout.named(join(prefix, layout.name))
    return result

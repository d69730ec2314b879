"""Replacement of modules by rule: the root, at any depth, at several places."""

from collections.abc import Callable

from torch import nn

from torchdistpackage.tools.nested import as_module

Picks = Callable[[str, nn.Module], bool]
"""(name that its parent calls it, module) -> whether it is replaced. The root's name is ''."""
Makes = Callable[[str, nn.Module], nn.Module]


def replace_all_module(
    model: nn.Module, if_replace_hook: Picks, get_new_module: Makes
) -> nn.Module:
    """Replace, in place, every module that `if_replace_hook(name, module)` picks.

    A module that has several parents is replaced in all of them, by one new module, if it is picked
    in any. The hook is not called for children of a replaced module.

    Returns the model: `model` itself, or what replaces it where the root is picked.

    Raises:
        TypeError: the model is not a module, or `get_new_module` returned none; nothing is
            replaced.
    """
    as_module(model, "replace_all_module")
    picked: dict[int, tuple[str, nn.Module]] = {}
    seen: set[int] = set()
    _pick("", model, if_replace_hook, picked, seen)
    if id(model) in picked:
        return _new("", model, get_new_module)
    places: list[tuple[nn.Module, str, nn.Module]] = []
    _places(model, picked, places, set())
    # make all new modules first: if one fails, the model is as it was
    old_modules = {id(old): old for _, _, old in places}
    new = {key: _new(picked[key][0], old, get_new_module) for key, old in old_modules.items()}
    for parent, name, old in places:
        parent._modules[name] = new[id(old)]
    return model


def _pick(
    name: str,
    module: nn.Module,
    picks: Picks,
    picked: dict[int, tuple[str, nn.Module]],
    seen: set[int],
) -> None:
    """Collect the modules to replace, by id."""
    if id(module) in picked:
        return
    if picks(name, module):
        picked[id(module)] = name, module
        return
    if id(module) in seen:
        return
    seen.add(id(module))
    for child_name, child in module._modules.items():
        if child is not None:
            _pick(child_name, child, picks, picked, seen)


def _places(
    module: nn.Module,
    picked: dict[int, tuple[str, nn.Module]],
    places: list[tuple[nn.Module, str, nn.Module]],
    seen: set[int],
) -> None:
    """Collect where the picked modules stand: (parent, name, module)."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for name, child in module._modules.items():
        if child is None:
            continue
        if id(child) in picked:
            places.append((module, name, child))
        else:
            _places(child, picked, places, seen)


def _new(name: str, module: nn.Module, make: Makes) -> nn.Module:
    """Return the new module; refuse anything that is not a module."""
    new = make(name, module)
    if not isinstance(new, nn.Module):
        raise TypeError(
            f"replace_all_module: get_new_module({name!r}, {type(module).__name__}) returned a "
            f"{type(new).__name__}; return the module that takes its place"
        )
    return new

"""The place at which a module holds a parameter, and a tensor that replaces it in one forward."""

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.rnn import RNNBase

from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto.nested import find_tied_weight_aliases

Place = tuple[nn.Module, str]
"""A module and the name of one of its own parameters."""


def places_of(shard: nn.Module, names: Collection[str]) -> dict[str, list[Place]]:
    """Return where each parameter is held, under all its names.

    Raises:
        LayoutError: a name is not that of a parameter.
    """
    parameters = dict(shard.named_parameters(remove_duplicate=False))
    if missing := [name for name in names if name not in parameters]:
        raise LayoutError(
            f"no parameters of a shard: {', '.join(missing)}; use names such as "
            f"{', '.join(list(parameters)[:3])}"
        )
    aliases = find_tied_weight_aliases(shard)
    places: dict[str, list[Place]] = {}
    for name in names:
        places[name] = []
        for alias in aliases[id(parameters[name])]:
            path, _, attribute = alias.rpartition(".")
            places[name].append((shard.get_submodule(path), attribute))
    return places


def stand_in(place: Place, value: Tensor | None) -> None:
    """Let the module find `value` under the parameter's name; not as a parameter."""
    module, name = place
    module.__dict__[name] = value  # found before what torch registers
    _refresh(module)


def withdraw(place: Place) -> None:
    """Undo `stand_in`: the parameter is found again."""
    module, name = place
    module.__dict__.pop(name, None)
    _refresh(module)


def _refresh(module: nn.Module) -> None:
    """A recurrent layer keeps a list of its weights too."""
    if isinstance(module, RNNBase):
        names: Any = module._flat_weights_names
        module.__dict__["_flat_weights"] = [getattr(module, name, None) for name in names]

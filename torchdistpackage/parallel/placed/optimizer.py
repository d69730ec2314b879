"""An optimizer of what this rank holds of managed modules, also where that is nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.errors import PlacementError
from torchdistpackage.parallel.placed.managed import ManagedModule, ManagedTensor


def make_optimizer(
    make: Callable[..., torch.optim.Optimizer], params: Any, **options: Any
) -> torch.optim.Optimizer:
    """`make(...)` over what this rank holds of `params`; the groups are the same on all ranks.

    A rank that holds nothing gets one of an empty tensor, without a gradient, so that it steps and
    schedules as the others do.

    params: managed modules, managed leaf tensors, parameters, or groups of options, each a dict
    with such `params`.

    Raises:
        PlacementError: something else is among them, or a group has no `params`.
    """
    single = isinstance(params, ManagedModule | ManagedTensor | Tensor)
    if not single and not isinstance(params, Iterable):
        raise _unknown(params)
    given = [params] if single else list(params)
    groups = [
        {**one, "params": list(_held(one.get("params")))} for one in given if isinstance(one, dict)
    ]
    plain = [p for one in given if not isinstance(one, dict) for p in _held(one)]
    if plain or not groups:
        groups.append({"params": plain})
    if not any(group["params"] for group in groups):
        groups[0]["params"] = [torch.nn.Parameter(torch.empty(0))]
    return make(groups, **options)


def _held(params: Any) -> Iterable[Tensor]:
    """What this rank has of modules, leaf tensors, parameters, or iterables of them."""
    if isinstance(params, Tensor):
        yield params
    elif isinstance(params, ManagedModule):
        yield from params.parameters()
    elif isinstance(params, ManagedTensor):
        if params.is_here:
            yield params.tensor
    elif isinstance(params, Iterable) and not isinstance(params, str | dict):
        for one in params:
            yield from _held(one)
    else:
        raise _unknown(params)


def _unknown(params: object) -> PlacementError:
    return PlacementError(
        f"an optimizer is of managed modules, managed tensors, parameters, or dicts with such "
        f"'params', not of {params!r}"
    )

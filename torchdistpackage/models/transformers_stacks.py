"""Adapters on stacked matrices of experts, as peft's `target_parameters` makes them.

peft wraps the module once for each matrix, and in its files only the depth tells the wrappers
apart. Here the factors are parameters of the module itself, stacked as the matrix is, so that ranks
share them as they share the matrix: A (E, r, Din) and B (E, Dout, r). While the module's forward
runs, its matrix is W + scaling * B A.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

FACTORS = ("lora_A", "lora_B")


def adapt_stacks(
    experts: Any,
    shapes: Mapping[str, tuple[int, ...]],
    inputs: Mapping[str, int],
    scaling: float,
    dtype: torch.dtype,
) -> None:
    """Give a module of stacked experts adapters without values.

    shapes: of the factors, by their names in the module, such as lora_A.down_proj. inputs: by name
    of a matrix the dim of its inputs, 1 or 2.
    """
    for factor in FACTORS:
        matrices = {key: shapes[f"{factor}.{key}"] for key in inputs}
        device = next(iter(experts._parameters.values())).device
        empty = {
            key: nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
            for key, shape in matrices.items()
        }
        setattr(experts, factor, nn.ParameterDict(empty))
    experts._disable_adapters = False
    experts._adapted_inputs, experts._scaling = dict(inputs), scaling
    experts.register_forward_pre_hook(_hide)
    # also where the forward fails, or a later one would add to what is added already
    experts.register_forward_hook(_show, always_call=True)


def adapt_as(experts: Any, adapted: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Give `experts`, which take the place of `adapted`, the adapters of that with these shapes."""
    dtype = next(iter(adapted.lora_A.values())).dtype
    adapt_stacks(experts, shapes, adapted._adapted_inputs, adapted._scaling, dtype)


def is_adapted(experts: Any) -> bool:
    """Return whether a module of stacked experts has adapters."""
    return hasattr(experts, "_adapted_inputs")


def without_hooks(experts: Any) -> None:
    """Make a shallow copy of adapted experts run with the matrices that it is given."""
    for hooks in ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called"):
        experts.__dict__[hooks] = type(experts.__dict__[hooks])()


def _hide(experts: Any, args: object) -> None:
    """Hide the matrices by adapted ones, for this forward alone."""
    if experts._disable_adapters:
        return
    for name, inputs in experts._adapted_inputs.items():
        weight = experts._parameters[name]
        a, b = (getattr(experts, factor)[name].to(weight.dtype) for factor in FACTORS)
        left, right = (b, a) if inputs == 2 else (a.mT, b.mT)
        # autocast would give the sum another type than the matrix has
        with torch.autocast(weight.device.type, enabled=False):
            adapted = torch.baddbmm(weight, left, right, alpha=experts._scaling)
        experts.__dict__[name] = adapted


def _show(experts: Any, args: object, output: object) -> None:
    for name in experts._adapted_inputs:
        experts.__dict__.pop(name, None)

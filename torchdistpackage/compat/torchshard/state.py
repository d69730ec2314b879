"""Conversion of state dicts of split models: slices to full tensors, and back."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.attendance import expect_all
from torchdistpackage.compat.torchshard.chunks import chunk
from torchdistpackage.compat.torchshard.functional import lengths
from torchdistpackage.compat.torchshard.marks import weight_dim
from torchdistpackage.compat.torchshard.model_groups import get_group
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.mark import layout_of

WRAPPED = "module."
"""The prefix that DistributedDataParallel puts before every name."""


def collect_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], prefix: str = ""
) -> "OrderedDict[str, Any]":
    """Return `state_dict` with every split entry gathered; all ranks of the group must call.

    model, state_dict: each of the wrapped or the plain model. prefix: put before every name.

    Raises:
        ValueError: `model` is not a module, or `state_dict` is not a mapping.
        LayoutError: split entries have other shapes; it names all of them.
    """
    split = _split_parameters(model)
    _check(split, state_dict, "", "collect_state_dict", lambda p, dim: tuple(p.shape))
    if split:
        expect_all("collect_state_dict()", get_group())
    full: OrderedDict[str, Any] = OrderedDict()
    for name, value in state_dict.items():
        if (split_entry := split.get(name.removeprefix(WRAPPED))) is not None:
            dim, parameter = split_entry
            sizes = lengths(_whole_length(parameter, dim))
            value = collectives.gather(value.detach(), dim, get_group(), sizes)
        full[prefix + name] = value
    return full


def relocate_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], prefix: str = ""
) -> "OrderedDict[str, Any]":
    """Return this rank's slices of a collected state dict, to load; `prefix` is removed from names.

    Raises:
        ValueError: `model` is not a module, or `state_dict` is not a mapping.
        LayoutError: split entries have other shapes; it names all of them.
    """
    split = _split_parameters(model)
    _check(split, state_dict, prefix, "relocate_state_dict", _whole_shape)
    local: OrderedDict[str, Any] = OrderedDict()
    for name, value in state_dict.items():
        name = name.removeprefix(prefix)
        if (split_entry := split.get(name.removeprefix(WRAPPED))) is not None:
            dim, _ = split_entry
            group = get_group()
            start, length = chunk(value.shape[dim], group.size(), group.rank())
            value = value.narrow(dim, start, length).clone()
        local[name] = value
    return local


def register_ddp_parameters_to_ignore(module: nn.Module) -> list[str]:
    """Return the names of split parameters, and note them for torch's DistributedDataParallel.

    Call it before wrapping: each rank has another slice, which must not be averaged.

    Raises:
        ValueError: `module` is not a module.
    """
    check_module(module)
    names = [
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if weight_dim(parameter) is not None
    ]
    module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
    return names


def check_module(module: object) -> None:
    """Check that `module` is a torch.nn.Module.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"a {type(module).__name__} is not a torch.nn.Module; pass a module")


def _split_parameters(model: nn.Module) -> dict[str, tuple[int, Tensor]]:
    """Return (split dim, parameter) of split parameters by plain name, tied names included."""
    check_module(model)
    return {
        name.removeprefix(WRAPPED): (dim, parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if (dim := weight_dim(parameter)) is not None
    }


def _whole_shape(parameter: Tensor, dim: int) -> tuple[int, ...]:
    shape = list(parameter.shape)
    shape[dim] = _whole_length(parameter, dim)
    return tuple(shape)


def _check(
    split: Mapping[str, tuple[int, Tensor]],
    state_dict: Mapping[str, Any],
    prefix: str,
    caller: str,
    shape_of: Callable[[Tensor, int], tuple[int, ...]],
) -> None:
    """Check the entries of split parameters in a state dict.

    Raises:
        ValueError: `state_dict` is not a mapping.
        LayoutError: entries are not tensors of the expected shape; it names all of them.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"{caller} takes a state dict, not {type(state_dict).__name__}")
    wrong: list[str] = []
    for name, value in state_dict.items():
        plain = name.removeprefix(prefix).removeprefix(WRAPPED)
        if plain not in split:
            continue
        expected = shape_of(split[plain][1], split[plain][0])
        actual = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if actual != expected:
            wrong.append(f"{name} is {actual}, not {expected}")
    if wrong:
        raise LayoutError(
            f"{caller}: {'; '.join(wrong)}; pass the entries of a model to collect_state_dict, and "
            f"full tensors, as a file has them, to relocate_state_dict"
        )


def _whole_length(parameter: Tensor, dim: int) -> int:
    """Return the length of the split dim over all ranks.

    Our layers have it in their layout; for other layers all ranks have equal slices.
    """
    layout = layout_of(parameter)
    if layout is not None:
        return layout.shape[dim]
    return parameter.shape[dim] * get_group().size()

"""State dicts of models with split parameters: whole ones from parts, and parts from whole ones."""

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
"""What DistributedDataParallel puts before every name."""


def collect_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], prefix: str = ""
) -> "OrderedDict[str, Any]":
    """`state_dict` with every split entry whole, on every rank; all ranks of the group must call.

    model and state_dict may each be of the wrapped or of the plain model. `prefix` is put before
    every name.

    Raises:
        ValueError: `model` is no module, or `state_dict` no mapping.
        LayoutError: split entries have other shapes; all are named.
    """
    split = _split_parameters(model)
    _check(split, state_dict, "", "collect_state_dict", lambda p, dim: tuple(p.shape))
    if split:
        expect_all("collect_state_dict()", get_group())
    whole: OrderedDict[str, Any] = OrderedDict()
    for name, value in state_dict.items():
        if (found := split.get(name.removeprefix(WRAPPED))) is not None:
            dim, parameter = found
            sizes = lengths(_whole_length(parameter, dim))
            value = collectives.gather(value.detach(), dim, get_group(), sizes)
        whole[prefix + name] = value
    return whole


def relocate_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], prefix: str = ""
) -> "OrderedDict[str, Any]":
    """My parts of what `collect_state_dict` gave, to be loaded; `prefix` is taken off the names.

    Raises:
        ValueError: `model` is no module, or `state_dict` no mapping.
        LayoutError: split entries have other shapes; all are named.
    """
    split = _split_parameters(model)
    _check(split, state_dict, prefix, "relocate_state_dict", _whole_shape)
    mine: OrderedDict[str, Any] = OrderedDict()
    for name, value in state_dict.items():
        name = name.removeprefix(prefix)
        if (found := split.get(name.removeprefix(WRAPPED))) is not None:
            dim, group = found[0], get_group()
            start, length = chunk(value.shape[dim], group.size(), group.rank())
            value = value.narrow(dim, start, length).clone()
        mine[name] = value
    return mine


def register_ddp_parameters_to_ignore(module: nn.Module) -> list[str]:
    """Names of the parameters that are split, noted where torch's DistributedDataParallel looks.

    Call it before wrapping: each rank's part is its own.

    Raises:
        ValueError: `module` is no module.
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
    """
    Raises:
        ValueError: it is none.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"a torch.nn.Module was expected, not {type(module).__name__}")


def _split_parameters(model: nn.Module) -> dict[str, tuple[int, Tensor]]:
    """By plain name, tied second names too, the dim that is split."""
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
    what: str,
    shape_of: Callable[[Tensor, int], tuple[int, ...]],
) -> None:
    """
    Raises:
        ValueError: `state_dict` is no mapping.
        LayoutError: entries of split parameters are no tensors of the expected shape; all of them.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"{what} takes a state dict, not {type(state_dict).__name__}")
    wrong: list[str] = []
    for name, value in state_dict.items():
        plain = name.removeprefix(prefix).removeprefix(WRAPPED)
        if plain not in split:
            continue
        expected = shape_of(split[plain][1], split[plain][0])
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if found != expected:
            wrong.append(f"{name} is {found}, not {expected}")
    if wrong:
        raise LayoutError(
            f"{what}: {'; '.join(wrong)}. collect_state_dict takes parts, as a model has them, and "
            f"relocate_state_dict whole tensors, as a file has them"
        )


def _whole_length(parameter: Tensor, dim: int) -> int:
    """Our layers say it; of a layer of one's own all ranks hold alike."""
    layout = layout_of(parameter)
    if layout is not None:
        return layout.shape[dim]
    return parameter.shape[dim] * get_group().size()

"""torchshard.nn.init: initial values of a split parameter that are slices of one whole."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.compat.torchshard.cuts import check_tensors
from torchdistpackage.compat.torchshard.marks import MARK, marked_parameters, weight_dim
from torchdistpackage.compat.torchshard.model_groups import get_group
from torchdistpackage.layout.derive import chunk
from torchdistpackage.layout.mark import layout_of


@torch.no_grad()
def shard_init_helper_(init_method: Callable[..., object], tensor: Tensor, **kwargs: Any) -> None:
    """Fill `tensor`, or its part, with what `init_method` draws for the whole on the first rank.

    A marked parameter, or its `.data`, is known as split, and gets its slice; one whose mark is
    None gets the same on all ranks of the group. What has no mark is filled by `init_method` alone.

    Raises:
        ValueError: `tensor` is no tensor, or `init_method` cannot be called.
    """
    check_tensors("shard_init_helper_", tensor=tensor)
    if not callable(init_method):
        raise ValueError(
            f"init_method is {init_method!r}; pass a function that fills a tensor, such as "
            f"torch.nn.init.xavier_uniform_"
        )
    parameter = _parameter_of(tensor)
    if parameter is None:
        init_method(tensor, **kwargs)
        return
    group, dim = get_group(), weight_dim(parameter)
    shape = list(tensor.shape)
    if dim is not None:
        layout = layout_of(parameter)
        shape[dim] = shape[dim] * group.size() if layout is None else layout.shape[dim]
    whole = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    init_method(whole, **kwargs)
    if group.size() > 1:
        primitives.broadcast(whole, group)
    if dim is not None:
        whole = whole.narrow(dim, *chunk(shape[dim], group.size(), group.rank()))
    tensor.data.copy_(whole)


def _parameter_of(tensor: Tensor) -> Tensor | None:
    if hasattr(tensor, MARK):
        return tensor
    for parameter in marked_parameters.values():
        same = parameter.data_ptr() == tensor.data_ptr() and parameter.shape == tensor.shape
        if same and tensor.numel():
            return parameter
    return None

"""Weights of transformers' linear layers that adapters are trained over, in 4 bits.

They stay on the meta device until a folder is read, and then go one by one through the device: it
never holds two of them in full.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.layout.derive import local_shape
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.transformers_layout import TransformersShape, global_name, weights
from torchdistpackage.parallel.tensor.four_bit import (
    PackedLinear,
    pack_weight,
    packed,
    unpacked,
)
from torchdistpackage.parallel.tensor.linear import Linear
from torchdistpackage.topology.mesh import Mesh


def weights_to_pack(made: nn.Module, shape: TransformersShape) -> dict[str, str]:
    """Local name -> global name of those of a stage; layers that are whole are made ready."""
    inside = {
        name: key
        for name, _ in made.named_parameters()
        if (key := global_name(shape, name.removeprefix("decoder."))) in shape.packed
    }
    for name in inside:
        path = name.removesuffix(".weight")
        layer: Any = made.get_submodule(path)
        if not isinstance(layer, Linear):
            parent, _, key = path.rpartition(".")
            setattr(made.get_submodule(parent), key, PackedLinear(layer.weight, layer.bias))
    return inside


def read_packed(
    made: Any,
    mesh: Mesh,
    index: int,
    device: torch.device,
    read: Callable[[str, Layout, Tensor], object],
) -> None:
    """Fill them one by one. made: a `TransformersStage`; read: puts the values of (local name,
    layout) at `index` of `mesh` into a tensor."""
    known, lora = weights(made.shape, None, made.axis), made.shape.lora
    for name, key in made.to_pack.items():
        layer, weight = made.get_submodule(name.removesuffix(".weight")), known[key]
        shape = local_shape(weight.layout, mesh, index)
        wide = torch.empty(shape, dtype=layer.weight.dtype, device=device)
        read(name, weight.layout, wide)
        pack_weight(layer, wide if weight.inputs == 1 else wide.t(), lora.quant_type)


@torch.no_grad()
def round_weights(model: nn.Module, shape: TransformersShape) -> None:
    """Set the weights of a whole model to those that its adapters were trained over."""
    known, lora = weights(shape), shape.lora
    assert lora is not None and lora.quant_type is not None
    for name, parameter in model.named_parameters():
        if (key := global_name(shape, name)) in shape.packed:
            value = parameter if known[key].inputs == 1 else parameter.t()
            rounded = unpacked(*packed(value, lora.quant_type), parameter.dtype)
            parameter.copy_(rounded if known[key].inputs == 1 else rounded.t())

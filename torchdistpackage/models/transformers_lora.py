"""Adapters on the modules of transformers, and the packed weights below them.

peft, of the extra `hf`, makes the adapters. Packed weights stay on the meta device until a
folder is read, and then go through the device one by one: it never holds two of them in full.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from torchdistpackage.config.model_section import is_adapter, is_token_rows
from torchdistpackage.layout.derive import local_shape
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.lora_layout import (
    Lora,
    from_peft,
    is_of_stack,
    local_name,
    peft_name,
)
from torchdistpackage.models.transformers_dora import Dora
from torchdistpackage.models.transformers_layout import TransformersShape, global_name, weights
from torchdistpackage.models.transformers_stacks import adapt_stacks
from torchdistpackage.parallel.tensor.four_bit import (
    PackedLinear,
    PackedShard,
    pack_weight,
    packed,
    unpacked,
)
from torchdistpackage.parallel.tensor.full import copy_part
from torchdistpackage.parallel.tensor.linear import Linear, RowLinear
from torchdistpackage.topology.mesh import Mesh


def with_adapters(
    model: nn.Module, shape: TransformersShape, lora: Lora, dtype: torch.dtype
) -> nn.Module:
    """Return `model` with peft's layers around the adapted ones; only what `lora` trains has
    gradients.
    """
    from peft import LoraConfig, inject_adapter_in_model

    listed = weights(shape)
    adapters = [name for name in listed if is_adapter(name) and not is_token_rows(name)]
    stacked = [name for name in adapters if is_of_stack(listed[name].layout)]
    layers = {name.rpartition(".lora_")[0]: name for name in adapters if name not in stacked}
    settings = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # of which it takes any number
        lora_dropout=lora.dropout,
        use_rslora=lora.use_rslora,
        target_modules=list(layers),
        fan_in_fan_out=any(listed[f"{layer}.weight"].inputs == 0 for layer in layers),
    )
    if layers:
        with exact_targets():
            model = inject_adapter_in_model(settings, model)
    else:
        model.requires_grad_(False)
    _adapt_experts(model, {name: listed[name].layout.shape for name in stacked}, shape, dtype)
    if lora.use_dora:
        _add_magnitudes(model, dtype)
    for name, parameter in model.named_parameters():
        if is_adapter(name):  # peft ignores the dtype of layers on the meta device
            parameter.data = parameter.data.to(dtype)
        elif lora.trains(global_name(shape, name)):
            parameter.requires_grad_(True)
    return model


def _adapt_experts(
    model: nn.Module,
    adapters: Mapping[str, tuple[int, ...]],
    shape: TransformersShape,
    dtype: torch.dtype,
) -> None:
    """Put adapters on modules of stacked experts. adapters: their shapes, by global name."""
    listed, lora = weights(shape), shape.lora
    assert lora is not None
    by_module: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, size in adapters.items():
        module = name.rpartition(".")[0].rpartition(".")[0]
        by_module.setdefault(module, {})[local_name(name)] = size
    for path, shapes in by_module.items():
        matrices = dict.fromkeys(key.partition(".")[2] for key in shapes)
        inputs = {key: listed[f"{path}.{key}"].stacked or 0 for key in matrices}
        adapt_stacks(model.get_submodule(path), shapes, inputs, lora.scaling, dtype)


@contextmanager
def exact_targets() -> Iterator[None]:
    """Let peft adapt the layers that are named and no others.

    peft (0.21) takes a layer whose name ends in `gate_proj` or `up_proj` for an expert of
    transformers 4, also in the MLP of a dense block, and adapts the stacked experts in its place.
    """
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # an earlier peft, which converts nothing
        yield
        return
    convert = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = convert


def _add_magnitudes(model: nn.Module, dtype: torch.dtype) -> None:
    """Make the injected adapters of a model those of DoRA, without values."""
    from peft.tuners.lora.layer import Linear as LoraLinear
    from peft.tuners.lora.variants import DoraLinearVariant

    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            outputs: int = layer.out_features
            for name in layer.lora_A:
                dora = Dora(outputs, layer.fan_in_fan_out, dtype)
                layer.lora_magnitude_vector[name] = dora
                layer.lora_variant[name] = DoraLinearVariant()


def weights_to_pack(stage: nn.Module, shape: TransformersShape) -> dict[str, str]:
    """Return the weights of a stage that are held in 4 or 8 bits: local name -> global name.

    Layers that no rank splits become `PackedLinear` here; split ones can pack a weight already.
    """
    to_pack = {
        name: key
        for name, _ in stage.named_parameters()
        if (key := global_name(shape, name.removeprefix("decoder."))) in shape.packed
    }
    for name in to_pack:
        path = name.removesuffix(".weight")
        layer: Any = stage.get_submodule(path)
        if not isinstance(layer, Linear):
            parent, _, key = path.rpartition(".")
            setattr(stage.get_submodule(parent), key, PackedLinear(layer.weight, layer.bias))
    return to_pack


def read_packed(
    stage: Any,
    mesh: Mesh,
    index: int,
    device: torch.device,
    reader: Callable[[str, Layout, Tensor], object],
) -> None:
    """Read and pack the weights of a `TransformersStage` that are held in 4 or 8 bits, one by one.

    reader: puts the values of (local name, layout) at `index` of `mesh` into a tensor.
    """
    listed, lora = weights(stage.shape, None, stage.axis), stage.shape.lora
    for name, key in stage.to_pack.items():
        layer, weight = stage.get_submodule(name.removesuffix(".weight")), listed[key]
        shape = local_shape(weight.layout, mesh, index)
        unpacked_weight = torch.empty(shape, dtype=layer.weight.dtype, device=device)
        reader(name, weight.layout, unpacked_weight)
        rows = unpacked_weight if weight.inputs == 1 else unpacked_weight.t()
        group = layer.group if isinstance(layer, RowLinear) else None
        shard = None
        if stage._group is not None and weight.layout.split_axes:
            shard = PackedShard(weight.layout, weight.inputs or 0, mesh, index, stage._group)
        pack_weight(layer, rows, lora.packing, group, shard)


@torch.no_grad()
def read_adapters(
    file: Path,
    lora: Lora,
    names: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    index: int,
) -> None:
    """Read the trained parameters of a stage from a file of peft. names: of `peft_names`. tensors,
    layouts: of the stage, by their names there; a rank takes its own part at `index` of `mesh`.
    """
    with safe_open(file, framework="pt") as opened:
        for name, layout in layouts.items():
            if lora.trains(layout.name):
                key = names.get(layout.name) or peft_name(layout.name)
                full = from_peft(layout, opened.get_tensor(key))
                copy_part(tensors[name], full, layout, mesh, index)


@torch.no_grad()
def round_weights(model: nn.Module, shape: TransformersShape) -> None:
    """Round the weights of a full model to the values over which its adapters were trained."""
    listed, lora = weights(shape), shape.lora
    assert lora is not None and lora.packing is not None
    for name, parameter in model.named_parameters():
        if (key := global_name(shape, name)) in shape.packed:
            value = parameter if listed[key].inputs == 1 else parameter.t()
            rounded = unpacked(*packed(value, lora.packing), parameter.dtype)
            parameter.copy_(rounded if listed[key].inputs == 1 else rounded.t())

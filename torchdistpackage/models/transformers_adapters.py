"""peft's low-rank adapters on the modules of transformers; peft, of the extra `hf`, is imported."""

import torch
from torch import nn

from torchdistpackage.config.model_section import is_adapter
from torchdistpackage.models.lora_layout import Lora
from torchdistpackage.models.transformers_layout import TransformersShape, weights


def with_adapters(
    model: nn.Module, shape: TransformersShape, lora: Lora, dtype: torch.dtype
) -> nn.Module:
    """`model` with peft's layers around those that are adapted, whose weights alone train."""
    from peft import LoraConfig, inject_adapter_in_model

    known = weights(shape)
    layers = {name.rpartition(".lora_")[0]: name for name in known if is_adapter(name)}
    settings = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # of which it takes any number
        lora_dropout=lora.dropout,
        target_modules=list(layers),
        fan_in_fan_out=any(known[f"{layer}.weight"].inputs == 0 for layer in layers),
    )
    model = inject_adapter_in_model(settings, model)
    for name, parameter in model.named_parameters():
        if is_adapter(name):  # which peft leaves as they are on the meta device
            parameter.data = parameter.data.to(dtype)
    return model

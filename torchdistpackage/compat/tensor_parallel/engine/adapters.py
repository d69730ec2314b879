"""Adapters of peft on a model that is split: which are cut with their layers, which are refused.

| adapter | put on | |
|---|---|---|
| LoRA | before the split | B or A is cut as the layer is (`add_lora_rules`) |
| IA3 | before the split | its vector is cut as the outputs or inputs are that it scales |
| prompt tuning, P-tuning, prefix tuning | after the split | their parameters belong to no shard |
| others | | refused |
"""

import dataclasses
import re
import sys
from typing import Any

from torch import nn

from torchdistpackage.compat.tensor_parallel.engine.actions import Partial, StateAction, on_dim
from torchdistpackage.compat.tensor_parallel.engine.rules import (
    Config,
    add_lora_rules,
    state_action,
)
from torchdistpackage.errors import LayoutError


def add_adapter_rules(model: nn.Module, config: Config) -> Config:
    """Return `config` with rules for the adapters of layers that it cuts.

    Raises:
        LayoutError: there are adapters that cannot be split, or not before they are put on.
    """
    check_prompts(model)
    rules: dict[re.Pattern[str], StateAction] = {}
    for name, module in model.named_modules():
        if not hasattr(module, "adapter_layer_names"):  # what peft's layers say of themselves
            continue
        action = state_action(config, [f"{name}.weight"])
        if action is None:
            continue
        if hasattr(module, "ia3_l"):
            rules[re.compile(rf"^{re.escape(name)}\.ia3_l\.")] = rule_of_ia3(name, module, action)
        elif not is_lora(module):
            raise LayoutError(
                f"the layer {name} has adapters of type {type(module).__module__}, which cannot "
                "be sharded; use LoRA or IA3, or merge the adapters first"
            )
    config = add_lora_rules(model, config)
    return dataclasses.replace(config, state_rules=rules | config.state_rules) if rules else config


def is_lora(module: nn.Module) -> bool:
    """Return whether the adapter adds B A x; AdaLoRA scales each rank in between."""
    has_factors = hasattr(module, "lora_A") or hasattr(module, "lora_embedding_A")
    return has_factors and not hasattr(module, "lora_E")


def rule_of_ia3(name: str, module: Any, action: StateAction) -> StateAction:
    """Its vector scales what the shard has, or, with gradients of each shard's part, all of it."""
    weight_dim, base = getattr(action, "dim", None), module.base_layer
    if weight_dim is None or getattr(base, "groups", 1) > 1:
        raise LayoutError(
            f"the layer {name} has adapters of IA3 and is cut by {action!r}, which has no single "
            "dim to cut them along; cut it by Split, SplitInChunks or SplitInGroupedChunks, or "
            "merge the adapters first"
        )
    out_dim = 1 if type(base).__name__ == "Conv1D" else 0
    if (weight_dim == out_dim) == module.is_feedforward:
        return Partial()
    is_linear = base.weight.dim() == 2
    return on_dim(action, 1 if module.is_feedforward or not is_linear else 0)


def check_prompts(model: nn.Module) -> None:
    """Raises LayoutError where a model to split has prompts, whose keys are of all heads."""
    library = sys.modules.get("peft.peft_model")
    if library is None or not isinstance(model, library.PeftModel):
        return
    for adapter, config in model.peft_config.items():
        if config.is_prompt_learning:
            raise LayoutError(
                f"the {type(model).__name__} to split has the adapter {adapter!r} of type "
                f"{config.peft_type.value}, whose parameters belong to no layer; split the model "
                f"first, then call get_peft_model(split, config)"
            )

"""Mixtral: attention as in Llama; every shard has a part of each expert."""

from collections.abc import Sequence
from typing import Any

from torchdistpackage.parallel.auto.actions import Split, SplitInGroupedChunks
from torchdistpackage.parallel.auto.families.heads import even_part_of
from torchdistpackage.parallel.auto.families.llama import attention, ends
from torchdistpackage.parallel.auto.families.rules import FamilyRules, path
from torchdistpackage.parallel.auto.rules import Config


def get_mixtral_config(model_config: Any, devices: Sequence[Any]) -> Config:
    """Plan of Mixtral with `model_config` on `devices`."""
    num = len(devices)
    rules = FamilyRules(num)
    attention(rules, model_config)
    # (experts, gate and up, inputs) and (experts, outputs, inputs)
    rules.state[path("experts\\.gate_up_proj$")] = SplitInGroupedChunks(num, 1, 2, 1)
    rules.state[path("experts\\.down_proj$")] = Split(num, 2)
    # tokens, and the weights of experts, which multiply partial products
    rules.enter("experts", 0, 2)
    rules.outputs[path("experts$")] = {0: "sum"}
    rules.attribute("experts", intermediate_dim=even_part_of(num))
    ends(rules, model_config)
    return rules.config()

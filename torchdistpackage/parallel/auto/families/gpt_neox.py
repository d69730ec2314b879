"""GPT-NeoX: q, k, v of a head after one another; a head of its own weight."""

from collections.abc import Sequence
from typing import Any

from torchdistpackage.parallel.auto.actions import SplitInChunks
from torchdistpackage.parallel.auto.families.heads import deal_heads
from torchdistpackage.parallel.auto.families.rules import FamilyRules
from torchdistpackage.parallel.auto.rules import Config


def get_gpt_neox_config(model_config: Any, devices: Sequence[Any]) -> Config:
    """Plan of GPT-NeoX with `model_config` on `devices`."""
    num_heads, dim = model_config.num_attention_heads, model_config.hidden_size
    rules = FamilyRules(len(devices))
    heads = deal_heads("gpt_neox", num_heads, dim // num_heads, rules.world_size)
    fused = SplitInChunks(rules.world_size, 0, 3 * heads.head_dim)
    rules.column("attention\\.query_key_value", fused)
    rules.row("attention\\.dense", heads.cut_queries(1))
    rules.enter("attention", "hidden_states")
    rules.attribute("attention", num_attention_heads=heads.num_queries, hidden_size=heads.width)
    rules.column("mlp\\.dense_h_to_4h")
    rules.row("mlp\\.dense_4h_to_h")
    rules.enter("mlp")
    rules.embedding("embed_in", dim)
    rules.head("(embed_out|lm_head)", model_config)  # by release
    rules.key_heads = heads.keys
    rules.draws_apart("attention")
    return rules.config()

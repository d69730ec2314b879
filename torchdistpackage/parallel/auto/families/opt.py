"""OPT: q, k, v apart, MLP layers in the block itself, tied head."""

from collections.abc import Sequence
from typing import Any

from torchdistpackage.parallel.auto.families.heads import deal_heads
from torchdistpackage.parallel.auto.families.rules import FamilyRules
from torchdistpackage.parallel.auto.rules import Config


def get_opt_config(model_config: Any, devices: Sequence[Any]) -> Config:
    """Plan of OPT with `model_config` on `devices`."""
    num_heads, dim = model_config.num_attention_heads, model_config.hidden_size
    rules = FamilyRules(len(devices))
    heads = deal_heads("opt", num_heads, dim // num_heads, rules.world_size)
    rules.column("self_attn\\.(q_proj|k_proj|v_proj)", heads.cut_queries(0))
    rules.row("self_attn\\.out_proj", heads.cut_queries(1))
    rules.enter("self_attn", "hidden_states")
    rules.attribute("self_attn", num_heads=heads.num_queries, embed_dim=heads.width)
    rules.column("fc1")
    rules.enter("fc1")
    rules.row("fc2")
    rules.embedding("embed_tokens", model_config.word_embed_proj_dim)
    rules.embedding("embed_positions", dim)
    rules.head("lm_head", model_config)
    rules.key_heads = heads.keys
    rules.draws_apart("self_attn")
    return rules.config()

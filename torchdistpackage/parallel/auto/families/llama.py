"""Llama and the families built like it: q, k, v apart, grouped key and value heads, gated MLP."""

from collections.abc import Sequence
from typing import Any

from torchdistpackage.parallel.auto.actions import Partial
from torchdistpackage.parallel.auto.families.heads import Heads, deal_heads
from torchdistpackage.parallel.auto.families.rules import FamilyRules, path
from torchdistpackage.parallel.auto.rules import Config


def get_llama_config(model_config: Any, devices: Sequence[Any]) -> Config:
    """Plan of Llama, Mistral, Qwen 2 and Gemma with `model_config` on `devices`."""
    rules = FamilyRules(len(devices))
    attention(rules, model_config)
    rules.column("mlp\\.(gate_proj|up_proj)")
    rules.row("mlp\\.down_proj")
    rules.enter("mlp")
    ends(rules, model_config)
    return rules.config()


def attention(rules: FamilyRules, model_config: Any) -> Heads:
    """Rules for `self_attn` with q_proj, k_proj, v_proj and o_proj."""
    num_heads = model_config.num_attention_heads
    head_dim = getattr(model_config, "head_dim", None) or model_config.hidden_size // num_heads
    num_keys = getattr(model_config, "num_key_value_heads", None)
    kind = model_config.model_type
    heads = deal_heads(kind, num_heads, head_dim, rules.world_size, num_keys)
    rules.column("self_attn\\.q_proj", heads.cut_queries(0))
    rules.column("self_attn\\.(k_proj|v_proj)", heads.cut_keys(0))
    rules.row("self_attn\\.o_proj", heads.cut_queries(1))
    rules.enter("self_attn", "hidden_states")
    # norms of single heads, of which each shard has its own
    rules.state[path("self_attn\\.(q_norm|k_norm)\\.weight$")] = Partial()
    rules.attribute(
        "self_attn",
        num_heads=heads.num_queries,
        num_key_value_heads=heads.num_keys,
        num_key_value_groups=heads.num_groups,
        hidden_size=heads.width,
    )
    rules.key_heads = heads.keys
    rules.draws_apart("self_attn")
    return heads


def ends(rules: FamilyRules, model_config: Any) -> None:
    """Rules for `embed_tokens` and `lm_head`."""
    rules.embedding("embed_tokens", model_config.hidden_size)
    rules.head("lm_head", model_config)

"""GPT-2: fused q, k, v in Conv1D layers, whose weights are (inputs, outputs); tied head."""

from collections.abc import Sequence
from typing import Any

from torchdistpackage.parallel.auto.actions import SplitInChunks, SplitInGroupedChunks
from torchdistpackage.parallel.auto.families.heads import deal_heads, even_part_of
from torchdistpackage.parallel.auto.families.rules import FamilyRules
from torchdistpackage.parallel.auto.rules import Config


def get_gpt2_config(model_config: Any, devices: Sequence[Any]) -> Config:
    """Plan of GPT-2 with `model_config` on as many shards as there are devices."""
    num, dim = len(devices), model_config.hidden_size
    head_dim = dim // model_config.num_attention_heads
    heads = deal_heads("gpt2", model_config.num_attention_heads, head_dim, num)
    rules = FamilyRules(num)
    rules.column("attn\\.c_attn", SplitInGroupedChunks(num, 1, 3, head_dim))
    rules.column("crossattention\\.c_attn", SplitInGroupedChunks(num, 1, 2, head_dim))
    rules.column("q_attn", SplitInChunks(num, 1, head_dim))
    rules.row("(attn|crossattention)\\.c_proj", SplitInChunks(num, 0, head_dim))
    rules.column("mlp\\.c_fc", dim=1)
    rules.row("mlp\\.c_proj", dim=0)
    rules.enter("(attn|crossattention)", "hidden_states", "encoder_hidden_states")
    rules.enter("mlp")
    rules.embedding("wte", dim)
    rules.embedding("wpe", dim)
    rules.head("lm_head", model_config)
    attention = {
        "embed_dim": heads.width,
        "split_size": heads.width,
        "num_heads": heads.num_queries,
    }
    rules.attribute("(attn|crossattention)", **attention)
    rules.attribute("attn\\.c_attn", nf=lambda value, *, rank: 3 * heads.width(rank=rank))
    rules.attribute("crossattention\\.c_attn", nf=lambda value, *, rank: 2 * heads.width(rank=rank))
    rules.attribute("q_attn", nf=heads.width)
    rules.attribute("mlp\\.c_fc", nf=even_part_of(num))
    rules.key_heads = heads.keys
    rules.draws_apart("(attn|crossattention)")
    return rules.config()

"""T5: attention in encoder and decoder with biases of positions by head, gated or plain MLPs."""

from collections.abc import Sequence
from typing import Any

from torchdistpackage.parallel.auto.actions import Split
from torchdistpackage.parallel.auto.families.heads import deal_heads
from torchdistpackage.parallel.auto.families.rules import FamilyRules, path
from torchdistpackage.parallel.auto.rules import Config


def get_t5_config(model_config: Any, devices: Sequence[Any]) -> Config:
    """Plan of T5 with `model_config` on `devices`."""
    rules = FamilyRules(len(devices))
    heads = deal_heads("t5", model_config.num_heads, model_config.d_kv, rules.world_size)
    attention = "(SelfAttention|EncDecAttention)"
    rules.column(f"{attention}\\.(q|k|v)", heads.cut_queries(0))
    rules.row(f"{attention}\\.o", heads.cut_queries(1))
    rules.enter(attention, "hidden_states", "key_value_states")
    rules.attribute(attention, n_heads=heads.num_queries, inner_dim=heads.width)
    # a column a head, which stays with its head
    bias = path("relative_attention_bias\\.weight$")
    rules.state[bias] = Split(rules.world_size, 1)
    rules.column("DenseReluDense\\.(wi|wi_0|wi_1)")
    rules.row("DenseReluDense\\.wo")
    rules.enter("DenseReluDense")
    rules.embedding("(shared|embed_tokens)", model_config.d_model)
    rules.head("lm_head", model_config)
    rules.key_heads = heads.keys
    rules.draws_apart(attention, "DenseReluDense\\.dropout")
    return rules.config()

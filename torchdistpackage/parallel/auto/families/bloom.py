"""BLOOM: q, k, v of a head after one another, position biases by head, tied head."""

from collections.abc import Sequence
from typing import Any

from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto.actions import SplitInChunks
from torchdistpackage.parallel.auto.families.heads import deal_heads
from torchdistpackage.parallel.auto.families.rules import FamilyRules
from torchdistpackage.parallel.auto.rules import Config


def get_bloom_config(model_config: Any, devices: Sequence[Any]) -> Config:
    """Plan of BLOOM with `model_config` on `devices`.

    Raises:
        LayoutError: too few heads, or products that are to be cut as in the original training.
    """
    if model_config.pretraining_tp > 1 and model_config.slow_but_exact:
        raise LayoutError(
            f"bloom with pretraining_tp={model_config.pretraining_tp} and slow_but_exact=True "
            f"multiplies by slices of whole weights; set slow_but_exact=False"
        )
    num_heads, dim = model_config.n_head, model_config.hidden_size
    rules = FamilyRules(len(devices))
    heads = deal_heads("bloom", num_heads, dim // num_heads, rules.world_size)
    fused = SplitInChunks(rules.world_size, 0, 3 * heads.head_dim)
    rules.column("self_attention\\.query_key_value", fused)
    rules.row("self_attention\\.dense", heads.cut_queries(1))
    rules.enter("self_attention", "hidden_states")
    rules.input("self_attention", "alibi", heads.of_folded)
    rules.attribute(
        "self_attention",
        num_heads=heads.num_queries,
        hidden_size=heads.width,
        split_size=heads.width,
    )
    rules.column("mlp\\.dense_h_to_4h")
    rules.row("mlp\\.dense_4h_to_h")
    rules.enter("mlp", "hidden_states")
    rules.embedding("word_embeddings", dim)
    rules.head("lm_head", model_config)
    rules.key_heads = heads.keys
    rules.draws_apart("self_attention")
    return rules.config()

"""Falcon, once RefinedWeb: fused q, k, v in one of three arrangements, biases by head or none.

| arrangement | heads of the fused weight |
|---|---|
| new_decoder_architecture | for each key head its query heads, the key, the value |
| multi_query | all query heads, one key, one value |
| neither | q, k, v of each head |
"""

from collections.abc import Sequence
from typing import Any

from torchdistpackage.parallel.auto.actions import TakeChunks
from torchdistpackage.parallel.auto.families.heads import Heads, deal_heads
from torchdistpackage.parallel.auto.families.rules import FamilyRules
from torchdistpackage.parallel.auto.rules import Config


def get_refined_web_config(model_config: Any, devices: Sequence[Any]) -> Config:
    """Plan of Falcon with `model_config` on `devices`."""
    num_heads = one_of(model_config, "num_attention_heads", "n_head")
    dim, num = model_config.hidden_size, len(devices)
    is_new = getattr(model_config, "new_decoder_architecture", True)
    is_single = getattr(model_config, "multi_query", False) and not is_new
    num_keys = one_of(model_config, "num_kv_heads", "n_head_kv") if is_new else num_heads
    rules = FamilyRules(num)
    heads = deal_heads("falcon", num_heads, dim // num_heads, num, 1 if is_single else num_keys)
    fused = [fused_heads(heads, rank, num_heads, num_keys, is_single) for rank in range(num)]
    rules.column("self_attention\\.query_key_value", TakeChunks(0, heads.head_dim, fused))
    rules.row("self_attention\\.dense", heads.cut_queries(1))
    rules.enter("self_attention", "hidden_states")
    if getattr(model_config, "alibi", False):
        rules.input("self_attention", "alibi", heads.of_folded)
        rules.input("self_attention", "attention_mask", heads.of_mask)
    sizes: dict[str, Any] = {"num_heads": heads.num_queries}
    if not is_single:
        sizes |= {"num_kv_heads": heads.num_keys, "num_kv": heads.num_keys}
    rules.attribute("self_attention", hidden_size=heads.width, split_size=heads.width, **sizes)
    rules.column("mlp\\.dense_h_to_4h")
    rules.row("mlp\\.dense_4h_to_h")
    rules.enter("mlp")
    rules.embedding("word_embeddings", dim)
    rules.head("lm_head", model_config)
    # in this arrangement each query head has a copy of its key in the cache
    rules.key_heads = heads.queries if is_new else heads.keys
    rules.draws_apart("self_attention")
    return rules.config()


def fused_heads(
    heads: Heads, rank: int, num_heads: int, num_keys: int, is_single: bool
) -> list[int]:
    """Heads of the fused weight for the shard `rank`, in the arrangement of the whole."""
    queries, keys = heads.queries[rank], heads.keys[rank]
    if is_single:
        return [*queries, num_heads, num_heads + 1]
    per_key, mine = num_heads // num_keys, len(queries) // len(keys)
    found = []
    for place, key in enumerate(keys):
        first = key * (per_key + 2)
        group = queries[place * mine : (place + 1) * mine]
        found += [first + query % per_key for query in group]
        found += [first + per_key, first + per_key + 1]
    return found


def one_of(model_config: Any, *names: str) -> int:
    """The first of these values that the configuration has; it is called so in some release."""
    return next(v for name in names if (v := getattr(model_config, name, None)) is not None)

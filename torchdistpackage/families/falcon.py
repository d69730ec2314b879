"""Falcon, formerly RefinedWeb: q, k, v fused by key-value head, rotary positions or ALiBi. No
torch.
"""

from dataclasses import replace

from torchdistpackage.families.fused import last_norm, sizes_of, wide_mlp
from torchdistpackage.families.table import BlockOrder, Family, Settings, Sizes, Weights
from torchdistpackage.layout.layout import HeadSplit
from torchdistpackage.layout.table import CachedHeads, Count

_FALCON = {
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "max_position_embeddings": 2048,
    "num_kv_heads": None,
    "ffn_hidden_size": None,
    "num_ln_in_parallel_attn": None,
    "new_decoder_architecture": False,
    "multi_query": True,
    "parallel_attn": True,
    "alibi": False,
    "bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}


def _falcon_sizes(s: Settings) -> Sizes:
    heads = s["num_attention_heads"]
    num_key_heads = 1 if s["multi_query"] else heads
    keys = (s["num_kv_heads"] or heads) if s["new_decoder_architecture"] else num_key_heads
    return replace(sizes_of(s, s["ffn_hidden_size"] or 4 * s["hidden_size"]), kv_heads=keys)


def _falcon_block(w: Weights, s: Settings, n: Sizes) -> None:
    size = (n.heads + 2 * n.kv_heads) * n.head_dim
    counts: dict[str, Count] = {"num_heads": "heads", "num_kv_heads": "keys", "num_kv": "keys"}
    counts |= {"hidden_size": "width", "split_size": "width"}
    by_head = ("alibi", "attention_mask") if s["alibi"] else ()
    # with many queries to a key head the cache gets a copy of it for each
    cached: CachedHeads = "heads" if s["new_decoder_architecture"] else "keys"
    w.attention("self_attention", n, by_head=by_head, cached=cached, **counts)
    # for each key head its query heads, the key, the value
    w.column("self_attention.query_key_value", size, n.dim, HeadSplit(n.kv_heads), bias=s["bias"])
    w.row("self_attention.dense", n.dim, n.dim, HeadSplit(n.heads), bias=s["bias"])
    wide_mlp(w, n, s["bias"])
    two = s["num_ln_in_parallel_attn"] or (2 if s["new_decoder_architecture"] else 1)
    names = ["input_layernorm"]
    if not s["parallel_attn"]:
        names.append("post_attention_layernorm")
    elif two == 2:
        names = ["ln_attn", "ln_mlp"]
    for name in names:
        w.norm(name, n.dim, bias=True)


FALCON = Family(
    _FALCON,
    _falcon_sizes,
    "transformer.h",
    lambda w, s, n: w.table("transformer.word_embeddings", n.vocab, n.dim),
    _falcon_block,
    last_norm("transformer.ln_f"),
    "transformer.word_embeddings",
    "FalconForCausalLM",
    shares_keys=False,
    documents="mask",
    own_attention="its attention is not one of transformers' functions",
    order=lambda s: BlockOrder(is_parallel=s["parallel_attn"] or s["new_decoder_architecture"]),
    nullable=frozenset(
        {"new_decoder_architecture", "multi_query", "parallel_attn", "alibi", "bias"}
    ),
)
REFINED_WEB = replace(
    FALCON,
    defaults={**_FALCON, "new_decoder_architecture": True, "multi_query": False},
    earlier_settings={"num_attention_heads": "n_head", "num_kv_heads": "n_head_kv"},
)

"""BLOOM: q, k and v interleaved by head, and ALiBi instead of positions. No torch."""

from torchdistpackage.families.fused import (
    SHORT,
    last_norm,
    query_key_value,
    sizes_of,
    wide_mlp,
)
from torchdistpackage.families.table import Family, Settings, Sizes, Weights
from torchdistpackage.layout.table import Count

_BLOOM = {
    "vocab_size": 250880,
    "hidden_size": 64,
    "n_layer": 2,
    "n_head": 8,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "slow_but_exact": False,
}


def _bloom_sizes(s: Settings) -> Sizes:
    return sizes_of(s, 4 * s["hidden_size"], **SHORT)


def _bloom_embed(w: Weights, s: Settings, n: Sizes) -> None:
    w.table("transformer.word_embeddings", n.vocab, n.dim)
    w.norm("transformer.word_embeddings_layernorm", n.dim, bias=True)


def _bloom_block(w: Weights, s: Settings, n: Sizes) -> None:
    counts: dict[str, Count] = {"num_heads": "heads", "hidden_size": "width", "split_size": "width"}
    w.attention("self_attention", n, by_head=("alibi",), **counts)
    query_key_value(w, n, "self_attention", True)
    wide_mlp(w, n, True)
    for name in ("input_layernorm", "post_attention_layernorm"):
        w.norm(name, n.dim, bias=True)


def _bloom_uncut(s: Settings) -> list[str]:
    if s["pretraining_tp"] > 1 and s["slow_but_exact"]:
        return ["slow_but_exact multiplies by slices of whole weights; set it to false"]
    return []


BLOOM = Family(
    _BLOOM,
    _bloom_sizes,
    "transformer.h",
    _bloom_embed,
    _bloom_block,
    last_norm("transformer.ln_f"),
    "transformer.word_embeddings",
    "BloomForCausalLM",
    uncut=_bloom_uncut,
    documents="distances",
    own_attention="its distances (ALiBi) are of the whole sequence",
)

"""GPT-NeoX: q, k and v interleaved by head, and an untied output head. No torch."""

from torchdistpackage.families.fused import last_norm, query_key_value, sizes_of, wide_mlp
from torchdistpackage.families.table import BlockOrder, Family, Settings, Sizes, Weights

_NEOX = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "max_position_embeddings": 2048,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "initializer_range": 0.02,
}


def _neox_sizes(s: Settings) -> Sizes:
    return sizes_of(s, s["intermediate_size"])


def _neox_block(w: Weights, s: Settings, n: Sizes) -> None:
    w.attention("attention", n, num_attention_heads="heads", hidden_size="width")
    query_key_value(w, n, "attention", s["attention_bias"])
    wide_mlp(w, n, True)
    for name in ("input_layernorm", "post_attention_layernorm"):
        w.norm(name, n.dim, bias=True)


GPT_NEOX = Family(
    _NEOX,
    _neox_sizes,
    "gpt_neox.layers",
    lambda w, s, n: w.table("gpt_neox.embed_in", n.vocab, n.dim),
    _neox_block,
    last_norm("gpt_neox.final_layer_norm"),
    "gpt_neox.embed_in",
    "GPTNeoXForCausalLM",
    saved_names={"embed_out.weight": "lm_head.weight"},
    order=lambda s: BlockOrder(is_parallel=s["use_parallel_residual"]),
)

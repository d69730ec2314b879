"""Llama and the families with its names: q, k, v apart, grouped queries, a gated MLP. No torch."""

from dataclasses import replace

from torchdistpackage.families.table import Family, Part, Settings, Sizes, Weights
from torchdistpackage.layout.layout import HeadSplit
from torchdistpackage.layout.table import Count

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "pad_token_id": None,
}


def _llama_sizes(s: Settings) -> Sizes:
    heads = s["num_attention_heads"]
    return Sizes(
        vocab=s["vocab_size"],
        dim=s["hidden_size"],
        layers=s["num_hidden_layers"],
        heads=heads,
        kv_heads=s["num_key_value_heads"] or heads,
        head_dim=s["head_dim"] or s["hidden_size"] // heads,
        hidden=s["intermediate_size"],
        tied=s["tie_word_embeddings"],
        std=s["initializer_range"],
        padding=s["pad_token_id"],
    )


def _llama_block(w: Weights, s: Settings, n: Sizes) -> None:
    attention(w, n, s["attention_bias"], s["attention_bias"])
    _gated_mlp(w, n, s["mlp_bias"])
    w.norm("input_layernorm", n.dim)
    w.norm("post_attention_layernorm", n.dim)


_COUNTS: dict[str, Count] = {
    "num_heads": "heads",
    "num_key_value_heads": "keys",
    "num_key_value_groups": "groups",
    "hidden_size": "width",
}


def attention(w: Weights, n: Sizes, bias: bool, out_bias: bool = False) -> None:
    query, key = HeadSplit(n.heads), HeadSplit(n.kv_heads, shared=True)
    w.attention("self_attn", n, **_COUNTS)
    w.column("self_attn.q_proj", n.heads * n.head_dim, n.dim, query, bias=bias)
    for name in ("k_proj", "v_proj"):
        w.column(f"self_attn.{name}", n.kv_heads * n.head_dim, n.dim, key, bias=bias)
    w.row("self_attn.o_proj", n.dim, n.heads * n.head_dim, query, bias=out_bias)


def _gated_mlp(w: Weights, n: Sizes, bias: bool) -> None:
    for name in ("gate_proj", "up_proj"):
        w.column(f"mlp.{name}", n.hidden, n.dim, bias=bias)
    w.row("mlp.down_proj", n.dim, n.hidden, bias=bias)


def _qwen2_block(w: Weights, s: Settings, n: Sizes) -> None:
    attention(w, n, True, False)
    _gated_mlp(w, n, False)
    w.norm("input_layernorm", n.dim)
    w.norm("post_attention_layernorm", n.dim)


def _qwen3_block(w: Weights, s: Settings, n: Sizes) -> None:
    _llama_block(w, s, n)
    for name in ("q_norm", "k_norm"):  # of single heads, of which each rank has its own
        w.whole(f"self_attn.{name}.weight", n.head_dim, partial=True)


_GEMMA2_NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


def _gemma2_block(w: Weights, s: Settings, n: Sizes) -> None:
    attention(w, n, s["attention_bias"], s["attention_bias"])
    _gated_mlp(w, n, False)
    for name in _GEMMA2_NORMS:
        w.norm(name, n.dim, kind="zeros")  # they scale by 1 + weight


def _gemma2_head(w: Weights, s: Settings, n: Sizes) -> None:
    w.norm("model.norm", n.dim, kind="zeros")


def _llama_head(w: Weights, s: Settings, n: Sizes) -> None:
    w.norm("model.norm", n.dim)


def _like_llama(settings: Settings, block: Part = _llama_block, head: Part = _llama_head) -> Family:
    """A family with Llama's names. settings: its own defaults."""
    return Family(
        {**_LLAMA, **settings},
        _llama_sizes,
        "model.layers",
        lambda w, s, n: w.table("model.embed_tokens", n.vocab, n.dim, n.padding),
        block,
        head,
        "model.embed_tokens",
    )


LLAMA = _like_llama({})
MISTRAL = replace(
    _like_llama(
        {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    ),
    nullable=frozenset({"attention_bias", "mlp_bias"}),
)
_QWEN = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
QWEN2 = replace(
    _like_llama(_QWEN, _qwen2_block),
    nullable=frozenset({"num_key_value_heads", "attention_bias", "mlp_bias"}),
)
QWEN3 = replace(
    _like_llama({**_QWEN, "head_dim": 128}, _qwen3_block),
    nullable=frozenset({"num_key_value_heads", "mlp_bias"}),
)
_GEMMA2 = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
GEMMA2 = replace(
    _like_llama(_GEMMA2, _gemma2_block, _gemma2_head),
    own_attention="it caps its scores (attn_logit_softcapping)",
    ends_in_norm=lambda _: True,
    nullable=frozenset({"mlp_bias"}),
)

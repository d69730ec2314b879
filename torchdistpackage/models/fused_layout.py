"""GPT-2 and other families whose q, k, v are one product. No torch."""

from dataclasses import replace

from torchdistpackage.layout.layout import HeadSplit
from torchdistpackage.models.family_layout import Family, Part, Settings, Sizes, Weights

_SHORT = {"layers": "n_layer", "heads": "n_head"}


def _sizes(
    s: Settings,
    hidden: int,
    *,
    dim: str = "hidden_size",
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
) -> Sizes:
    """Of a family that calls its sizes so. hidden: width of the MLP."""
    return Sizes(
        vocab=s["vocab_size"],
        dim=s[dim],
        layers=s[layers],
        heads=s[heads],
        kv_heads=s[heads],
        head_dim=s[dim] // s[heads],
        hidden=hidden,
        tied=s["tie_word_embeddings"],
        std=s["initializer_range"],
    )


# -- GPT-2 -----------------------------------------------------------------------------------

_GPT2 = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "add_cross_attention": False,
}


def _gpt2_sizes(s: Settings) -> Sizes:
    hidden = s["n_inner"] or 4 * s["n_embd"]
    return replace(_sizes(s, hidden, dim="n_embd", **_SHORT), positions=s["n_positions"])


def _gpt2_embed(w: Weights, s: Settings, n: Sizes) -> None:
    w.table("transformer.wte", n.vocab, n.dim)
    w.table("transformer.wpe", s["n_positions"], n.dim)


def _gpt2_block(w: Weights, s: Settings, n: Sizes) -> None:
    heads, branch = HeadSplit(n.heads), (2 * n.layers) ** -0.5
    matrix = {"bias": True, "transposed": True}
    w.norm("ln_1", n.dim, bias=True)
    w.column("attn.c_attn", 3 * n.dim, n.dim, heads, parts=(n.dim,) * 3, **matrix)
    w.row("attn.c_proj", n.dim, n.dim, heads, scale=branch, **matrix)
    w.norm("ln_2", n.dim, bias=True)
    w.column("mlp.c_fc", n.hidden, n.dim, **matrix)
    w.row("mlp.c_proj", n.dim, n.hidden, scale=branch, **matrix)


def _gpt2_problems(s: Settings) -> list[str]:
    if s["add_cross_attention"]:
        return ["add_cross_attention is true, whose blocks need an encoder; set it to false"]
    return []


# -- GPT-NeoX --------------------------------------------------------------------------------

_NEOX = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "max_position_embeddings": 2048,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}


def _neox_sizes(s: Settings) -> Sizes:
    return _sizes(s, s["intermediate_size"])


def _neox_block(w: Weights, s: Settings, n: Sizes) -> None:
    _query_key_value(w, n, "attention", s["attention_bias"])
    _wide_mlp(w, n, True)
    for name in ("input_layernorm", "post_attention_layernorm"):
        w.norm(name, n.dim, bias=True)


def _query_key_value(w: Weights, n: Sizes, name: str, bias: bool) -> None:
    """q, k and v of a head after one another."""
    heads = HeadSplit(n.heads)
    w.column(f"{name}.query_key_value", 3 * n.dim, n.dim, heads, bias=bias)
    w.row(f"{name}.dense", n.dim, n.dim, heads, bias=bias)


def _wide_mlp(w: Weights, n: Sizes, bias: bool) -> None:
    w.column("mlp.dense_h_to_4h", n.hidden, n.dim, bias=bias)
    w.row("mlp.dense_4h_to_h", n.dim, n.hidden, bias=bias)


# -- BLOOM -----------------------------------------------------------------------------------

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
    return _sizes(s, 4 * s["hidden_size"], **_SHORT)


def _bloom_embed(w: Weights, s: Settings, n: Sizes) -> None:
    w.table("transformer.word_embeddings", n.vocab, n.dim)
    w.norm("transformer.word_embeddings_layernorm", n.dim, bias=True)


def _bloom_block(w: Weights, s: Settings, n: Sizes) -> None:
    _query_key_value(w, n, "self_attention", True)
    _wide_mlp(w, n, True)
    for name in ("input_layernorm", "post_attention_layernorm"):
        w.norm(name, n.dim, bias=True)


def _bloom_problems(s: Settings) -> list[str]:
    if s["pretraining_tp"] > 1 and s["slow_but_exact"]:
        return ["slow_but_exact multiplies by slices of whole weights; set it to false"]
    return []


# -- Falcon ----------------------------------------------------------------------------------

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
    "bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}


def _falcon_sizes(s: Settings) -> Sizes:
    heads = s["num_attention_heads"]
    one = 1 if s["multi_query"] else heads
    keys = (s["num_kv_heads"] or heads) if s["new_decoder_architecture"] else one
    return replace(_sizes(s, s["ffn_hidden_size"] or 4 * s["hidden_size"]), kv_heads=keys)


def _falcon_block(w: Weights, s: Settings, n: Sizes) -> None:
    size = (n.heads + 2 * n.kv_heads) * n.head_dim
    # for each key head its query heads, the key, the value
    w.column("self_attention.query_key_value", size, n.dim, HeadSplit(n.kv_heads), bias=s["bias"])
    w.row("self_attention.dense", n.dim, n.dim, HeadSplit(n.heads), bias=s["bias"])
    _wide_mlp(w, n, s["bias"])
    two = s["num_ln_in_parallel_attn"] or (2 if s["new_decoder_architecture"] else 1)
    names = ["input_layernorm"]
    if not s["parallel_attn"]:
        names.append("post_attention_layernorm")
    elif two == 2:
        names = ["ln_attn", "ln_mlp"]
    for name in names:
        w.norm(name, n.dim, bias=True)


def _last_norm(name: str) -> Part:
    return lambda w, s, n: w.norm(name, n.dim, bias=True)


GPT2 = Family(
    _GPT2,
    _gpt2_sizes,
    "transformer.h",
    _gpt2_embed,
    _gpt2_block,
    _last_norm("transformer.ln_f"),
    "transformer.wte",
    _gpt2_problems,
)
GPT_NEOX = Family(
    _NEOX,
    _neox_sizes,
    "gpt_neox.layers",
    lambda w, s, n: w.table("gpt_neox.embed_in", n.vocab, n.dim),
    _neox_block,
    _last_norm("gpt_neox.final_layer_norm"),
    "gpt_neox.embed_in",
    saved_names={"embed_out.weight": "lm_head.weight"},
)
BLOOM = Family(
    _BLOOM,
    _bloom_sizes,
    "transformer.h",
    _bloom_embed,
    _bloom_block,
    _last_norm("transformer.ln_f"),
    "transformer.word_embeddings",
    _bloom_problems,
    documents="not",
)
FALCON = Family(
    _FALCON,
    _falcon_sizes,
    "transformer.h",
    lambda w, s, n: w.table("transformer.word_embeddings", n.vocab, n.dim),
    _falcon_block,
    _last_norm("transformer.ln_f"),
    "transformer.word_embeddings",
    shares_keys=False,
    documents="mask",
)

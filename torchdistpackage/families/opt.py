"""OPT: separate q, k and v, learned positions, MLP layers directly in the block. No torch."""

from torchdistpackage.families.table import BlockOrder, Family, Settings, Sizes, Weights
from torchdistpackage.layout.layout import HeadSplit

_OPT = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "word_embed_proj_dim": None,
    "num_attention_heads": 12,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "pad_token_id": 1,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
}
_MORE_ROWS = 2
"""Number of rows in the position table before the row of the first position."""


def _sizes(s: Settings) -> Sizes:
    heads = s["num_attention_heads"]
    return Sizes(
        vocab=s["vocab_size"],
        dim=s["hidden_size"],
        layers=s["num_hidden_layers"],
        heads=heads,
        kv_heads=heads,
        head_dim=s["hidden_size"] // heads,
        hidden=s["ffn_dim"],
        tied=s["tie_word_embeddings"],
        std=s["init_std"],
        positions=s["max_position_embeddings"],
        padding=s["pad_token_id"],
    )


def _embed(w: Weights, s: Settings, n: Sizes) -> None:
    columns = s["word_embed_proj_dim"] or n.dim
    w.table("model.decoder.embed_tokens", n.vocab, columns, n.padding)
    w.table("model.decoder.embed_positions", s["max_position_embeddings"] + _MORE_ROWS, n.dim)


def _block(w: Weights, s: Settings, n: Sizes) -> None:
    heads, bias = HeadSplit(n.heads), s["enable_bias"]
    for name in ("k_proj", "v_proj", "q_proj"):
        w.column(f"self_attn.{name}", n.dim, n.dim, heads, bias=bias)
    w.attention("self_attn", n, num_heads="heads", embed_dim="width")
    w.row("self_attn.out_proj", n.dim, n.dim, heads, bias=bias)
    w.column("fc1", n.hidden, n.dim, bias=bias)
    w.row("fc2", n.dim, n.hidden, bias=bias)
    if s["layer_norm_elementwise_affine"]:
        w.norm("self_attn_layer_norm", n.dim, bias=True)
        w.norm("final_layer_norm", n.dim, bias=True)


def _head(w: Weights, s: Settings, n: Sizes) -> None:
    has_norm = s["do_layer_norm_before"] and not s["_remove_final_layer_norm"]
    if has_norm and s["layer_norm_elementwise_affine"]:
        w.norm("model.decoder.final_layer_norm", n.dim, bias=True)


def _problems(s: Settings) -> list[str]:
    problems: list[str] = []
    if s["word_embed_proj_dim"] not in (None, s["hidden_size"]):
        problems.append(
            f"word_embed_proj_dim is {s['word_embed_proj_dim']}; only that of hidden_size, "
            f"{s['hidden_size']}, can be cut"
        )
    if s["layerdrop"]:
        problems.append(f"layerdrop is {s['layerdrop']}; stages run all their blocks: set it to 0")
    return problems


OPT = Family(
    _OPT,
    _sizes,
    "model.decoder.layers",
    _embed,
    _block,
    _head,
    "model.decoder.embed_tokens",
    "OPTForCausalLM",
    _problems,
    documents="mask",
    order=lambda s: BlockOrder(ends_in_norm=not s["do_layer_norm_before"]),
)

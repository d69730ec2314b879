"""Helpers for families that compute q, k and v in one matmul. No torch."""

from torchdistpackage.families.table import Part, Settings, Sizes, Weights
from torchdistpackage.layout.layout import HeadSplit

SHORT = {"layers": "n_layer", "heads": "n_head"}


def sizes_of(
    s: Settings,
    hidden: int,
    *,
    dim: str = "hidden_size",
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
) -> Sizes:
    """Return the sizes of a family with these setting names. hidden: width of the MLP."""
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


def query_key_value(w: Weights, n: Sizes, name: str, bias: bool) -> None:
    """List an attention whose fused layer interleaves q, k and v by head."""
    heads = HeadSplit(n.heads)
    w.column(f"{name}.query_key_value", 3 * n.dim, n.dim, heads, bias=bias)
    w.row(f"{name}.dense", n.dim, n.dim, heads, bias=bias)


def wide_mlp(w: Weights, n: Sizes, bias: bool) -> None:
    w.column("mlp.dense_h_to_4h", n.hidden, n.dim, bias=bias)
    w.row("mlp.dense_4h_to_h", n.dim, n.hidden, bias=bias)


def last_norm(name: str) -> Part:
    return lambda w, s, n: w.norm(name, n.dim, bias=True)

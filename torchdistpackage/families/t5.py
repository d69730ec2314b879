"""T5: encoder and decoder, positional biases by head, gated or plain MLPs. No torch.

Used by `tensor_parallel(model)` only.
"""

from torchdistpackage.families.table import Family, Settings, Sizes, Weight, Weights
from torchdistpackage.layout.layout import HeadSplit

_T5 = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": True,
    "initializer_factor": 1.0,
}


def _t5_sizes(s: Settings) -> Sizes:
    return Sizes(
        vocab=s["vocab_size"],
        dim=s["d_model"],
        layers=s["num_layers"],
        heads=s["num_heads"],
        kv_heads=s["num_heads"],
        head_dim=s["d_kv"],
        hidden=s["d_ff"],
        tied=s["tie_word_embeddings"],
        std=s["initializer_factor"],
    )


def _t5_embed(w: Weights, s: Settings, n: Sizes) -> None:
    for name in ("shared", "embed_tokens"):
        w.table(name, n.vocab, n.dim)


def _t5_block(w: Weights, s: Settings, n: Sizes) -> None:
    heads, width = HeadSplit(n.heads), n.heads * n.head_dim
    own_inputs = ("hidden_states",)
    for name, inputs in (
        ("SelfAttention", own_inputs),
        ("EncDecAttention", (*own_inputs, "key_value_states")),
    ):
        w.attention(name, n, inputs=inputs, n_heads="heads", inner_dim="width")
        for layer in ("q", "k", "v"):
            w.column(f"{name}.{layer}", width, n.dim, heads)
        w.row(f"{name}.o", n.dim, width, heads)
    # a column a head, which stays with its head
    bias = w.cut("", (s["relative_attention_num_buckets"], n.heads), 1)
    w.add("relative_attention_bias.weight", Weight(bias, "normal", n.std))
    for name in ("wi", "wi_0", "wi_1"):  # the first of a plain MLP, the others of a gated one
        w.column(f"DenseReluDense.{name}", n.hidden, n.dim)
    w.row("DenseReluDense.wo", n.dim, n.hidden)
    w.dropout("DenseReluDense.dropout")


T5 = Family(
    _T5,
    _t5_sizes,
    "block",
    _t5_embed,
    _t5_block,
    lambda w, s, n: w.norm("final_layer_norm", n.dim),
    "shared",
    "T5ForConditionalGeneration",
)

"""CodeGen: weights of q, v and k in four blocks, each with a quarter of the heads. No torch.

Used by `tensor_parallel(model)` only.
"""

from torchdistpackage.families.fused import SHORT, last_norm, sizes_of
from torchdistpackage.families.table import Family, Settings, Sizes, Weights
from torchdistpackage.layout.layout import HeadSplit

_CODEGEN = {
    "vocab_size": 50400,
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "n_inner": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
BLOCKS = 4
"""Number of devices in the original training, which determines the arrangement of the weights."""


def _codegen_sizes(s: Settings) -> Sizes:
    return sizes_of(s, s["n_inner"] or 4 * s["n_embd"], dim="n_embd", **SHORT)


def _codegen_block(w: Weights, s: Settings, n: Sizes) -> None:
    heads, block = HeadSplit(n.heads // BLOCKS), n.dim // BLOCKS  # of each block
    queries = HeadSplit(n.heads // BLOCKS, BLOCKS)
    w.attention("attn", n, queries=queries, num_attention_heads="heads", embed_dim="width")
    w.column("attn.qkv_proj", 3 * n.dim, n.dim, heads, parts=(block,) * (3 * BLOCKS))
    w.row("attn.out_proj", n.dim, n.dim, heads, parts=(block,) * BLOCKS)
    w.column("mlp.fc_in", n.hidden, n.dim, bias=True)
    w.row("mlp.fc_out", n.dim, n.hidden, bias=True)


CODEGEN = Family(
    _CODEGEN,
    _codegen_sizes,
    "transformer.h",
    lambda w, s, n: w.table("transformer.wte", n.vocab, n.dim),
    _codegen_block,
    last_norm("transformer.ln_f"),
    "transformer.wte",
    "CodeGenForCausalLM",
)

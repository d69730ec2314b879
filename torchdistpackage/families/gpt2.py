"""GPT-2: q, k, v fused one after another, matrices stored as (inputs, outputs), learned positions.
No torch.
"""

from collections.abc import Mapping
from dataclasses import replace

from torchdistpackage.families.fused import SHORT, last_norm, sizes_of
from torchdistpackage.families.table import Family, Settings, Sizes, Weights
from torchdistpackage.layout.layout import HeadSplit
from torchdistpackage.layout.table import Count

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
_COUNTS: dict[str, Count] = {"num_heads": "heads", "embed_dim": "width", "split_size": "width"}
_BOTH = ("hidden_states", "encoder_hidden_states")


def _gpt2_sizes(s: Settings) -> Sizes:
    hidden = s["n_inner"] or 4 * s["n_embd"]
    return replace(sizes_of(s, hidden, dim="n_embd", **SHORT), positions=s["n_positions"])


def _gpt2_embed(w: Weights, s: Settings, n: Sizes) -> None:
    w.table("transformer.wte", n.vocab, n.dim)
    w.table("transformer.wpe", s["n_positions"], n.dim, once=True)


def _gpt2_block(w: Weights, s: Settings, n: Sizes) -> None:
    heads, branch = HeadSplit(n.heads), (2 * n.layers) ** -0.5
    matrix = {"bias": True, "transposed": True}
    w.norm("ln_1", n.dim, bias=True)
    w.attention("attn", n, **_COUNTS)
    w.column("attn.c_attn", 3 * n.dim, n.dim, heads, parts=(n.dim,) * 3, **matrix)
    w.row("attn.c_proj", n.dim, n.dim, heads, scale=branch, **matrix)
    w.norm("ln_2", n.dim, bias=True)
    w.column("mlp.c_fc", n.hidden, n.dim, **matrix)
    w.row("mlp.c_proj", n.dim, n.hidden, scale=branch, **matrix)
    if s["add_cross_attention"]:
        _cross_attention(w, n, matrix)


def _cross_attention(w: Weights, n: Sizes, matrix: Mapping[str, bool]) -> None:
    heads = HeadSplit(n.heads)
    w.norm("ln_cross_attn", n.dim, bias=True)
    w.attention("crossattention", n, inputs=_BOTH, **_COUNTS)
    w.column("crossattention.c_attn", 2 * n.dim, n.dim, heads, parts=(n.dim,) * 2, **matrix)
    w.column("crossattention.q_attn", n.dim, n.dim, heads, **matrix)
    w.row("crossattention.c_proj", n.dim, n.dim, heads, **matrix)


def _gpt2_problems(s: Settings) -> list[str]:
    if s["add_cross_attention"]:
        return ["add_cross_attention is true, whose blocks need an encoder; set it to false"]
    return []


GPT2 = Family(
    _GPT2,
    _gpt2_sizes,
    "transformer.h",
    _gpt2_embed,
    _gpt2_block,
    last_norm("transformer.ln_f"),
    "transformer.wte",
    "GPT2LMHeadModel",
    _gpt2_problems,
)

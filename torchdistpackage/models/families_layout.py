"""Families of transformers' causal language models as numbers: names, shapes and cuts of their
parameters, and what they start as. No torch.

A cut here is that of the family's plan in parallel/auto/families. Names, shapes and defaults are
compared with transformers' own modules when a stage is built, so what another release names
otherwise is refused there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torchdistpackage.layout.layout import HeadSplit, Layout

Settings = Mapping[str, Any]
"""Of a config.json, with the family's defaults for what it leaves out."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """positions: rows of a learned table; None: positions are computed. std: of initial draws."""

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    tied: bool
    std: float
    positions: int | None = None
    padding: int | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter. kind, std: of its initial values. zero_row: a row of zeros among them."""

    layout: Layout
    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0
    zero_row: int | None = None


@dataclass
class Weights:
    """Parameters as they are listed, under names that begin with `prefix`."""

    prefix: str
    axis: str
    std: float
    held: dict[str, Weight] = field(default_factory=dict)

    def _add(self, name: str, weight: Weight) -> None:
        full = self.prefix + name
        self.held[full] = Weight(
            weight.layout.named(full), weight.kind, weight.std, weight.zero_row
        )

    def whole(
        self,
        name: str,
        *shape: int,
        kind: Literal["normal", "zeros", "ones"] = "ones",
        partial: bool = False,
    ) -> None:
        """On every rank; partial: each of which has a part of the gradient."""
        layout = Layout(name, shape, unreduced=(self.axis,) if partial else ())
        self._add(name, Weight(layout, kind, self.std))

    def norm(self, name: str, dim: int, *, bias: bool = False, kind: Any = "ones") -> None:
        self.whole(f"{name}.weight", dim, kind=kind)
        if bias:
            self.whole(f"{name}.bias", dim, kind="zeros")

    def table(self, name: str, rows: int, columns: int, zero_row: int | None = None) -> None:
        """An embedding, cut by columns."""
        layout = self._cut(name, (rows, columns), 1, HeadSplit(columns))
        self._add(f"{name}.weight", Weight(layout, "normal", self.std, zero_row))

    def column(
        self,
        name: str,
        size: int,
        inputs: int,
        heads: HeadSplit | None = None,
        *,
        bias: bool = False,
        parts: Sequence[int] = (),
        transposed: bool = False,
    ) -> None:
        """A layer cut by its outputs, along heads or each for itself. parts: fused in them."""
        heads, dim = heads or HeadSplit(size), int(transposed)
        shape = (inputs, size) if transposed else (size, inputs)
        layout = self._cut(name, shape, dim, heads, parts)
        self._add(f"{name}.weight", Weight(layout, "normal", self.std))
        if bias:
            layout = self._cut(name, (size,), 0, heads, parts)
            self._add(f"{name}.bias", Weight(layout, "zeros"))

    def row(
        self,
        name: str,
        size: int,
        inputs: int,
        heads: HeadSplit | None = None,
        *,
        bias: bool = False,
        transposed: bool = False,
        scale: float = 1.0,
    ) -> None:
        """A layer cut by its inputs; its bias is whole. scale: of its initial draws."""
        heads, dim = heads or HeadSplit(inputs), int(not transposed)
        shape = (inputs, size) if transposed else (size, inputs)
        layout = self._cut(name, shape, dim, heads)
        self._add(f"{name}.weight", Weight(layout, "normal", self.std * scale))
        if bias:
            self.whole(f"{name}.bias", size, kind="zeros")

    def _cut(
        self,
        name: str,
        shape: tuple[int, ...],
        dim: int,
        heads: HeadSplit,
        parts: Sequence[int] = (),
    ) -> Layout:
        split = tuple((self.axis,) if at == dim else () for at in range(len(shape)))
        fused = tuple(tuple(parts) if at == dim else () for at in range(len(shape)))
        return Layout(name, shape, split, parts=fused, heads=heads)


Part = Callable[[Weights, Settings, Sizes], None]


@dataclass(frozen=True, slots=True)
class Family:
    """defaults: transformers', of the settings that are read. blocks: path of the list of blocks.
    embed, block, head: list the parameters before the blocks, of one, and behind them but for the
    output matrix. table, output: names of the embedding and of the matrix that makes logits."""

    defaults: Settings
    sizes: Callable[[Settings], Sizes]
    blocks: str
    embed: Part
    block: Part
    head: Part
    table: str
    problems: Callable[[Settings], list[str]] = lambda _: []
    output: str = "lm_head"


# -- Llama and its like ----------------------------------------------------------------------

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
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


def _llama_embed(w: Weights, s: Settings, n: Sizes) -> None:
    w.table("model.embed_tokens", n.vocab, n.dim, n.padding)


def _llama_block(w: Weights, s: Settings, n: Sizes) -> None:
    bias, query = bool(s["attention_bias"]), HeadSplit(n.heads)
    key = HeadSplit(n.kv_heads, shared=True)
    w.column("self_attn.q_proj", n.heads * n.head_dim, n.dim, query, bias=bias)
    for name in ("k_proj", "v_proj"):
        w.column(f"self_attn.{name}", n.kv_heads * n.head_dim, n.dim, key, bias=bias)
    w.row("self_attn.o_proj", n.dim, n.heads * n.head_dim, query, bias=bias)
    _gated_mlp(w, n, bool(s["mlp_bias"]))
    w.norm("input_layernorm", n.dim)
    w.norm("post_attention_layernorm", n.dim)


def _gated_mlp(w: Weights, n: Sizes, bias: bool) -> None:
    for name in ("gate_proj", "up_proj"):
        w.column(f"mlp.{name}", n.hidden, n.dim, bias=bias)
    w.row("mlp.down_proj", n.dim, n.hidden, bias=bias)


def _llama_head(w: Weights, s: Settings, n: Sizes) -> None:
    w.norm("model.norm", n.dim)


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
    return Sizes(
        vocab=s["vocab_size"],
        dim=s["n_embd"],
        layers=s["n_layer"],
        heads=s["n_head"],
        kv_heads=s["n_head"],
        head_dim=s["n_embd"] // s["n_head"],
        hidden=s["n_inner"] or 4 * s["n_embd"],
        tied=s["tie_word_embeddings"],
        std=s["initializer_range"],
        positions=s["n_positions"],
    )


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


def _gpt2_head(w: Weights, s: Settings, n: Sizes) -> None:
    w.norm("transformer.ln_f", n.dim, bias=True)


def _gpt2_problems(s: Settings) -> list[str]:
    if s["add_cross_attention"]:
        return ["add_cross_attention is true, whose blocks need an encoder; set it to false"]
    return []


FAMILIES: dict[str, Family] = {
    "llama": Family(
        _LLAMA,
        _llama_sizes,
        "model.layers",
        _llama_embed,
        _llama_block,
        _llama_head,
        "model.embed_tokens",
    ),
    "gpt2": Family(
        _GPT2,
        _gpt2_sizes,
        "transformer.h",
        _gpt2_embed,
        _gpt2_block,
        _gpt2_head,
        "transformer.wte",
        _gpt2_problems,
    ),
}
"""By the model_type of a config.json."""

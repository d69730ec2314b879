"""A family that is read from transformers' modules, where no table is written by hand. No torch.

What is known of it are names and shapes of its parameters, which of them are matrices of linear
layers, which share memory, and where its blocks are: enough for whatever cuts nothing of the model.
What tensor ranks share of it follows from rules (models/transformers_cuts.py).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchdistpackage.families.cuts import FoundCut, StackedCut
from torchdistpackage.families.table import (
    Family,
    FoundModel,
    FoundParameter,
    Settings,
    Sizes,
    Weight,
    Weights,
)
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.table import LayerCut, SplitTable

_EXPERT = re.compile(r"\.experts\.\d+\.")
SHARED = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
"""Families whose experts ranks can share: all of a block are stacked in two matrices."""
UNSEEN = "it has no table here, and nobody has seen how it attends"
"""Why a sequence is not shared."""
WIDE_WEIGHTS = ("mixtral",)
"""Of these, whose routers leave the weights of a token's experts in float32 under autocast."""
SAMPLED = {
    "phimoe": "its router (PhimoeTopKRouter) samples experts in training, so a trial has no one "
    "answer to hold"
}
"""Families that no ranks cut, by what no trial of theirs can show."""
_ASSISTS = "pre_projection (Linear) reads activations and key-value states of the model it assists"
BESIDE = {"gemma4_assistant": _ASSISTS, "gemma4_unified_assistant": _ASSISTS}
"""Families that token ids alone do not run, by what else they read."""
TRAINED = ("reformer",)
"""Families whose backward runs in training mode alone."""
_STACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


def family(found: FoundModel) -> Family:
    """As plans, layouts and builds know families."""

    def before(w: Weights, s: Settings, n: Sizes) -> None:
        for p in found.by_block.get("", ()):
            if found.is_before(p.name):
                _add(w, p, found)

    def behind(w: Weights, s: Settings, n: Sizes) -> None:
        for p in found.by_block.get("", ()):
            if not found.is_before(p.name):
                _add(w, p, found)
        for alias, name in found.aliases.items():  # a head that is the embedding too
            path, shape = alias.rpartition(".")[0], shapes[name]
            if (cut := found.cuts.layers.get(path)) is not None and alias == f"{path}.weight":
                layout = _of_layer(w, FoundParameter(name, shape), cut, "weight")
                _list_layer(w, path, cut, layout)

    shapes = {p.name: p.shape for p in found.parameters}

    def block(w: Weights, s: Settings, n: Sizes) -> None:
        for p in found.by_block.get(w.prefix, ()):
            _add(w, replace(p, name=p.name.removeprefix(w.prefix)), found)

    return Family(
        {"max_position_embeddings": found.positions, "pad_token_id": None},
        lambda _: found.sizes,
        found.blocks,
        before,
        block,
        behind,
        "",
        found.class_name,
        lambda _: [] if found.refused is None else [found.refused],
        output="",
        documents="not",
        own_attention=found.own_attention,
        aliases=found.aliases,
        buffers=found.buffers,
        unreached=found.unreached,
        sides=found.around,
        folder="torchdistpackage.models.transformers_weights:ConvertedFolder",
        auxiliary=found.auxiliary,
        shared_experts=found.shared_experts,
        top_k=found.top_k,
        uses_is_causal=False,
        deals_heads=False,
        unshared=found.uncut,
        unstaged=found.unstaged,
        splits_head=found.cuts.head,
        splits_sequence=False,
        order=lambda _: found.order,
        cache="torchdistpackage.models.transformers_cache:tried_cache",
    )


def _add(w: Weights, p: FoundParameter, found: FoundModel) -> None:
    """A parameter, whole or as `found.cuts` says."""
    full, cuts = w.prefix + p.name, found.cuts
    path, _, last = full.rpartition(".")
    is_expert = len(p.shape) == 3 or _EXPERT.search(full) is not None
    share = found.active if is_expert else 1.0
    layout = Layout(p.name, p.shape)
    if path in cuts.experts:
        layout = _of_stacked(w, p, cuts.experts[path][last])
    elif (cut := cuts.layers.get(path)) is not None:
        layout = _of_layer(w, p, cut, last)
    elif full in cuts.partial:
        layout = replace(layout, unreduced=(w.axis,))
    if found.shared_experts and is_stacked(full, p.shape):
        split = (("expert",), *layout.split[1:])
        layout = replace(layout, split=split, view="expert", uneven=True)
    layout = replace(layout, is_table=p.is_table)
    w.add(p.name, Weight(layout, "made", inputs=p.inputs, share=share))
    layout = w.parameters[full].layout
    if path in cuts.experts and not found.shared_experts:
        w.split.experts.setdefault(path, {})[last] = layout
    elif last == "weight" and (cut := cuts.layers.get(path)) is not None:
        _list_layer(w, path, cut, layout)
    around = path.rpartition(".")[0]
    for module in (path, around):
        if module in cuts.attention:
            w.split.attention[module] = cuts.attention[module]


def _of_layer(w: Weights, p: FoundParameter, cut: FoundCut, last: str) -> Layout:
    if last != "weight":
        is_cut = cut.kind in ("column", "joined")
        return (
            w.cut(p.name, p.shape, 0, cut.heads, cut.parts) if is_cut else Layout(p.name, p.shape)
        )
    return w.cut(p.name, p.shape, cut.dim, cut.heads, cut.parts)


def _of_stacked(w: Weights, p: FoundParameter, cut: StackedCut) -> Layout:
    if cut.dim is None:
        return Layout(p.name, p.shape)
    return w.cut(p.name, p.shape, cut.dim, cut.heads, cut.parts)


def _list_layer(w: Weights, path: str, cut: FoundCut, layout: Layout) -> None:
    how = {"transposed": cut.transposed, "entrance": cut.entrance or path}
    w.split.layers[path] = LayerCut(cut.kind, layout, **how)


def table_of(found: FoundModel, axis: str = "tensor") -> tuple[SplitTable, dict[str, Layout]]:
    """What tensor ranks have in place of which layers, and the layout of every parameter."""
    table, layouts = SplitTable(), dict[str, Layout]()
    made = family(found)
    for prefix in found.by_block:
        w = Weights(prefix, axis, found.sizes.std)
        for part in (made.block,) if prefix else (made.embed, made.head):
            part(w, {}, found.sizes)
        table |= w.split
        layouts |= {name: weight.layout for name, weight in w.parameters.items()}
    return table, layouts


def is_stacked(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a matrix of each expert of a block."""
    return len(shape) == 3 and _STACKED.search(name) is not None


def active_share(settings: Mapping[str, Any]) -> float:
    """The part of the experts that works on a token, by the names that configs have for them."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    k = chosen_experts(settings)
    all_of_them = next((settings[x] for x in counts if type(settings.get(x)) is int), 0)
    return min(k / all_of_them, 1.0) if k and all_of_them else 1.0


def chosen_experts(settings: Mapping[str, Any]) -> int:
    """How many a token goes to; 0 if no setting says so."""
    chosen = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k")
    return next((settings[x] for x in chosen if type(settings.get(x)) is int), 0)

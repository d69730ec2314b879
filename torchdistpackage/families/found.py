"""A family read from transformers' modules when no table is written by hand. No torch.

Known are the names and shapes of its parameters, which of them are matrices of linear layers or
share memory, and where its blocks are. That is enough to train it unsplit.
models/transformers_cuts.py derives by rules what tensor ranks can share.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torchdistpackage.families.table import (
    Family,
    FoundModel,
    Settings,
    Sizes,
    Weight,
    Weights,
)
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.table import LayerCut, SplitTable

WIDE_WEIGHTS = ("mixtral",)
"""Families whose routers leave the weights of a token's experts in float32 under autocast."""
_ASSISTS = "pre_projection (Linear) reads activations and key-value states of the model it assists"
BESIDE = {"gemma4_assistant": _ASSISTS, "gemma4_unified_assistant": _ASSISTS}
"""Families that need more inputs than token ids, each with these inputs."""
TRAINED = ("reformer",)
"""Families whose backward works only in training mode."""


def family(model: FoundModel) -> Family:
    """Return the table of a model in the form that plans, layouts and builds use."""

    def before(w: Weights, s: Settings, n: Sizes) -> None:
        _list(w, model, [x for x in model.by_block.get("", ()) if model.is_before(x)])

    def behind(w: Weights, s: Settings, n: Sizes) -> None:
        _list(w, model, [x for x in model.by_block.get("", ()) if not model.is_before(x)])
        for alias in model.aliases:  # a head that is the embedding too
            path = alias.rpartition(".")[0]
            cut = model.table.layers.get(path)
            if cut is not None and alias == f"{path}.weight":
                w.split.layers[path] = replace(cut, weight=_along(cut.weight, w.axis))

    def block(w: Weights, s: Settings, n: Sizes) -> None:
        _list(w, model, model.by_block.get(w.prefix, ()))

    return Family(
        {"max_position_embeddings": model.positions, "pad_token_id": None},
        lambda _: model.sizes,
        model.blocks,
        before,
        block,
        behind,
        "",
        model.class_name,
        lambda _: [] if model.refused is None else [model.refused],
        output="",
        documents=model.documents,
        aliases=model.aliases,
        found_tables=(model.embedding, model.output),
        buffers=model.buffers,
        unreached=model.unreached,
        sides=model.around,
        folder="torchdistpackage.models.transformers_weights:ConvertedFolder",
        auxiliary=model.auxiliary,
        shared_experts=model.shared_experts,
        top_k=model.top_k,
        experts_alone=model.experts_alone,
        counts_routers=model.counts_routers,
        uses_is_causal=False,
        deals_heads=False,
        unshared=model.uncut,
        unstaged=model.unstaged,
        splits_head=model.splits_head,
        splits_sequence=False,
        order=lambda _: model.order,
        cache="torchdistpackage.models.transformers_cache:tried_cache",
    )


def _list(w: Weights, model: FoundModel, names: Iterable[str]) -> None:
    """List these parameters, and the layers and modules of `found.table` that contain them."""
    table = model.table
    for name in names:
        weight, (path, _, last) = model.parameters[name], name.rpartition(".")
        layout = _along(weight.layout, w.axis)
        w.add(name.removeprefix(w.prefix), replace(weight, layout=layout))
        if path in table.experts:
            w.split.experts.setdefault(path, {})[last] = layout
        elif last == "weight" and path in table.layers:
            w.split.layers[path] = replace(table.layers[path], weight=layout)
        for module in (path, path.rpartition(".")[0]):
            if module in table.attention:
                w.split.attention[module] = table.attention[module]


def _along(layout: Layout, axis: str) -> Layout:
    """Return a layout of the finder, whose tensor ranks are along "tensor", along `axis`."""
    if axis == "tensor":
        return layout
    names = {"tensor": axis}
    split = tuple(tuple(names.get(x, x) for x in axes) for axes in layout.split)
    return replace(layout, split=split, unreduced=tuple(names.get(x, x) for x in layout.unreduced))


def split_as(model: FoundModel, table: SplitTable) -> FoundModel:
    """Return `model` with its parameters split according to the layers of `table`.

    The layers of the result follow the order of the parameters.
    """
    parameters: dict[str, Weight] = {}
    layers: dict[str, LayerCut] = {}
    for name, weight in model.parameters.items():
        path, _, last = name.rpartition(".")
        layout = weight.layout
        if path in table.experts:
            layout = table.experts[path][last]
        elif path in table.layers:
            cut = table.layers[path]
            layout = cut.weight if last == "weight" else cut.bias(name)
        elif name in table.partial:
            layout = table.partial[name]
        layout = replace(layout, name=name, is_table=weight.layout.is_table)
        if weight.layout.view == "expert":  # whole experts on each rank of `expert`, then split
            split = (*weight.layout.split[:1], *layout.split[1:])
            layout = replace(layout, split=split, view="expert", uneven=True)
        parameters[name] = replace(weight, layout=layout)
        if last == "weight" and path in table.layers:
            layers[path] = replace(table.layers[path], weight=layout)
    # a head that is the embedding too has no parameter of its own
    layers |= {path: cut for path, cut in table.layers.items() if path not in layers}
    experts = {} if model.shared_experts else table.experts
    listed = replace(table, layers=layers, experts=experts)
    return replace(model, parameters=parameters, table=listed)


def without_shared_experts(model: FoundModel) -> FoundModel:
    """Return `model` with whole experts on every rank of `expert`."""
    parameters = {
        name: replace(x, layout=Layout(name, x.layout.shape)) if x.layout.view == "expert" else x
        for name, x in model.parameters.items()
    }
    return replace(model, parameters=parameters, shared_experts=0)


def active_share(settings: Mapping[str, Any]) -> float:
    """Return the fraction of the experts that work on a token, from the settings' usual names."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    k = chosen_experts(settings)
    all_of_them = next((settings[x] for x in counts if type(settings.get(x)) is int), 0)
    return min(k / all_of_them, 1.0) if k and all_of_them else 1.0


def chosen_experts(settings: Mapping[str, Any]) -> int:
    """Return the number of experts that each token is sent to, or 0 if no setting says so."""
    chosen = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k")
    return next((settings[x] for x in chosen if type(settings.get(x)) is int), 0)

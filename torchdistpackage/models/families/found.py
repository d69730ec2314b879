"""A family that is read from transformers' modules, where no table is written by hand. No torch.

What is known of it are names and shapes of its parameters, which of them are matrices of linear
layers, which share memory, and where its blocks are: enough for whatever cuts nothing of the model.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.families.table import (
    Family,
    FoundModel,
    FoundParameter,
    Settings,
    Sizes,
    Weight,
    Weights,
)

_EXPERT = re.compile(r"\.experts\.\d+\.")
SHARED = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
"""Families whose experts ranks can share: all of a block are stacked in two matrices."""
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
        lambda _: [] if found.refused is None else [found.refused],
        output="",
        documents="not",
        found=found,
    )


def _add(w: Weights, p: FoundParameter, found: FoundModel) -> None:
    is_expert = len(p.shape) == 3 or _EXPERT.search(w.prefix + p.name) is not None
    share = found.active if is_expert else 1.0
    layout = Layout(p.name, p.shape)
    if found.shared_experts and is_stacked(w.prefix + p.name, p.shape):
        cut = (("expert",), (), ())
        layout = Layout(p.name, p.shape, cut, view="expert", uneven=True, split_rule="even")
    w.add(p.name, Weight(layout, "made", inputs=p.inputs, share=share))


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

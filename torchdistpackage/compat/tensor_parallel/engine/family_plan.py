"""The plan of a known family, from the table that `model.hf` trains by (families/).

A table says of each layer, by its path in a block, how it is cut. The same statements become rules
here for the ends of names, so that a family's base model, its other heads and one with adapters
have the plan too. Two cuts differ from those of `model.hf`: heads that do not divide evenly are
dealt (heads.py), and an embedding is cut by columns, also where the head has its weight.
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from torchdistpackage.compat.tensor_parallel.engine.actions import (
    FirstOnly,
    Partial,
    Split,
    SplitInGroupedChunks,
    StateAction,
    TakeChunks,
    on_dim,
)
from torchdistpackage.compat.tensor_parallel.engine.heads import deal_heads
from torchdistpackage.compat.tensor_parallel.engine.layerwise import even_part
from torchdistpackage.compat.tensor_parallel.engine.ops import SizedGather
from torchdistpackage.compat.tensor_parallel.engine.rules import Config
from torchdistpackage.errors import LayoutError
from torchdistpackage.families.registry import FAMILIES, SPLIT_ALONE
from torchdistpackage.families.table import Family, Settings, Sizes, Weights
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.layout.table import AttentionCut, LayerCut

EXPERT_INPUTS = (0, 2)
"""Inputs of transformers' stacked experts that need a gradient sum: tokens, and the weights that
multiply partial products."""


def plan_for(module: Any, num: int) -> Config | None:
    """Return the plan for `num` shards of a module that has a family's `config`, such as with
    adapters.
    """
    return find_plan(getattr(module, "config", None), num) if num > 1 else None


def find_plan(model_config: Any, num: int) -> Config | None:
    """Return the plan for `num` shards of a model with this configuration; None where none is
    known.

    Raises:
        LayoutError: the family is known, but this model cannot be split over so many.
    """
    kind = getattr(model_config, "model_type", None) or ""
    has_plan = kind in FAMILIES or kind in SPLIT_ALONE
    return family_plan(kind, model_config, num) if has_plan and num > 1 else None


def family_plan(kind: str, model_config: Any, num: int) -> Config:
    """Return the plan of the family `kind` for a model with `model_config`, for `num` shards.

    Raises:
        LayoutError: there are more shards than heads, or this model is one that cannot be cut.
    """
    family = FAMILIES.get(kind) or SPLIT_ALONE[kind]
    settings = settings_of(family, model_config)
    if problems := family.uncut(settings):
        raise LayoutError(f"{kind} cannot be split: {'; '.join(problems)}")
    rules = TableRules(kind, family, settings, num)
    return Config(
        rules.state,
        rules.inputs,
        rules.outputs,
        rules.attributes,
        full_gradients=True,
        split_modules=rules.split,
        is_general=True,
        key_heads=rules.cached_heads,
        entrances=rules.entrances,
    )


def settings_of(family: Family, model_config: Any) -> Settings:
    """Read a family's settings from a configuration, whose release may use earlier names."""
    settings: dict[str, Any] = {}
    for name, default in family.defaults.items():
        settings[name] = getattr(model_config, name, default)
        earlier = family.earlier_settings.get(name, name)
        if not hasattr(model_config, name) and hasattr(model_config, earlier):
            settings[name] = getattr(model_config, earlier)
    return settings


class TableRules:
    """The dicts of a plan, for the layers that a family's table lists.

    split: patterns of modules that draw random numbers on split values: dropout layers, and
    attention, whose scores are of the shard's heads. cached_heads: of each shard, those in its
    key-value cache.
    """

    def __init__(self, kind: str, family: Family, settings: Settings, num: int):
        self.num = num
        self.state: dict[str, Any] = {}
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}
        self.attributes: dict[str, Any] = {}
        self.entrances: dict[str, Any] = {}
        self.split: list[str] = []
        sizes = family.sizes(settings)
        block, top = (Weights("", "tensor", sizes.std) for _ in range(2))
        # one block stands for all: patterns begin behind its number
        family.block(block, settings, sizes)
        family.embed(top, settings, sizes)
        self._names = tuple(block.split.layers)
        self._attention = block.split.attention
        self.heads = deal_heads(
            kind, sizes.heads, sizes.head_dim, num, sizes.kv_heads, blocks(block)
        )
        # all attentions of a family fill one cache, whose heads are therefore alike
        cached = {cut.cached for cut in self._attention.values()}
        self.cached_heads = self.heads.queries if cached == {"heads"} else self.heads.keys
        self._add_block(block)
        for name, cut in top.split.layers.items():
            self._add_embedding(name.rpartition(".")[2], cut.weight.shape[1])
        self._add_head(family, sizes)

    # -- parts of a table ------------------------------------------------------------------

    def _add_block(self, block: Weights) -> None:
        for name, cut in block.split.layers.items():
            if cut.kind == "column":
                self._add_column(name, cut)
            else:
                self._add_row(name, self._action(cut.weight))
        for name, cut in block.split.attention.items():
            self._add_attention(name, cut)
        for name, layers in columns_by_entrance(block).items():
            self._share(name, layers)
        for name, layouts in block.split.experts.items():
            for each, layout in layouts.items():
                self.state[f"{path(name)}\\.{each}$"] = self._action(layout)
            self._enter(name, *EXPERT_INPUTS)
            self.outputs[f"{path(name)}$"] = {0: "sum"}
            part = partial(even_part, world_size=self.num)
            self.attributes[f"{path(name)}$"] = {"intermediate_dim": part}
        for name in block.split.partial:
            self.state[f"{path(name)}$"] = Partial()
        for name, layout in alone(block):
            self.state[f"{path(name)}$"] = self._action(layout)
        self.split += [f"{path(name)}$" for name in block.split.dropouts]

    def _add_attention(self, name: str, cut: AttentionCut) -> None:
        heads = self.heads
        values = {
            "heads": heads.num_queries,
            "keys": heads.num_keys,
            "groups": heads.num_groups,
            "width": heads.width,
        }
        pattern = f"{path(name)}$"
        self.attributes[pattern] = {each: values[count] for each, count in cut.counts.items()}
        self._enter(name, *cut.inputs)
        for argument in cut.by_head:
            self.inputs[pattern][argument] = heads.of_heads
        self.split.append(pattern)

    def _add_column(self, name: str, cut: LayerCut) -> None:
        """Add a column layer, whose outputs stay split."""
        action, layer = self._action(cut.weight), self._path(name)
        self._add_parameters(layer, action, on_dim(action, 0))
        if cut.transposed:  # transformers' Conv1D notes its outputs, and shapes what it returns so
            self.attributes[f"{layer}$"] = {"nf": partial(_length, on_dim(action, 0))}
        # an attention enters by name, since one of another sequence multiplies two of its arguments
        if cut.entrance not in self._attention:
            self._enter(cut.entrance, 0)

    def _add_row(self, layer: str, action: StateAction) -> None:
        """Add a row layer: its products are summed, and its bias is added once."""
        pattern = self._path(layer)
        self._add_parameters(pattern, action, FirstOnly())
        self.outputs[f"{pattern}$"] = {0: "sum"}

    def _add_embedding(self, name: str, columns: int) -> None:
        """Add an embedding, whose rows are joined. columns: of the full table."""
        self.state[f"{path(name)}\\.weight$"] = Split(self.num, 1)
        self.outputs[f"{path(name)}$"] = {0: self._joined(columns)}

    def _add_head(self, family: Family, sizes: Sizes) -> None:
        """The layer that makes logits, under all its names. A weight that is an embedding's too is
        cut by columns, so that the layer multiplies parts of its input."""
        names = {family.output}
        for saved, today in family.saved_names.items():
            if today == f"{family.output}.weight":
                names.add(saved.removesuffix(".weight"))
        for name in names:
            if sizes.tied:
                self.inputs[f"{path(name)}$"] = {0: "split -1"}
                self._add_row(name, Split(self.num, 1))
            else:
                self._add_parameters(path(name), Split(self.num, 0), Split(self.num, 0))
                self._enter(name, 0)
                self._share(name, [""])
                self.outputs[f"{path(name)}$"] = {0: self._joined(sizes.vocab)}
        for saved, today in family.saved_names.items():
            if (action := self.state.get(f"{path(today)}$")) is not None:
                self.state[f"{path(saved)}$"] = action

    # -- rules -----------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        """Return a layer's pattern, with its block's number if its name ends another layer's name,
        as in BERT.
        """
        is_end = any(other.endswith(f".{name}") for other in self._names)
        return rf"(^|\.)[0-9]+\.{re.escape(name)}" if is_end else path(name)

    def _add_parameters(self, layer: str, weight: StateAction, bias: StateAction) -> None:
        self.state[f"{layer}\\.weight$"] = weight
        self.state[f"{layer}\\.bias$"] = bias

    def _enter(self, name: str, *targets: int | str) -> None:
        """Inputs from which each shard computes parts of layers."""
        self.inputs.setdefault(f"{path(name)}$", {}).update(dict.fromkeys(targets, "copy"))

    def _share(self, name: str, layers: Sequence[str]) -> None:
        """Column layers below `name` that read its input, and nothing else does; in an attention of
        another sequence they read two."""
        inputs = self.inputs[f"{path(name)}$"]
        if len(copied := [target for target in inputs if inputs[target] == "copy"]) == 1:
            self.entrances[f"{path(name)}$"] = {copied[0]: tuple(layers)}

    def _joined(self, length: int) -> SizedGather:
        return SizedGather(-1, tuple(even_sizes(length, self.num)))

    def _action(self, layout: Layout) -> StateAction:
        """Return the cut of a layout, with heads as they are dealt here."""
        dim = next(dim for dim, axes in enumerate(layout.split) if axes)
        parts, heads, width = layout.parts[dim], layout.heads, self.heads.head_dim
        if heads is None and not parts:
            return Split(self.num, dim)
        if heads is None or (parts and heads.groups == self.heads.num):
            each = 1 if heads is None else width
            return SplitInGroupedChunks(self.num, dim, len(parts), each)
        if parts:
            return TakeChunks(dim, width, self.heads.in_parts(len(parts), heads.groups))
        if layout.shape[dim] == self.heads.num * width:
            return self.heads.cut_queries(dim)
        return self.heads.cut_keys(dim) if heads.shared else self.heads.cut_fused(dim)


def path(name: str) -> str:
    """Return a pattern that begins where a name between dots begins."""
    return rf"(^|\.){re.escape(name)}"


def columns_by_entrance(block: Weights) -> dict[str, list[str]]:
    """Entrance -> names of its column layers below it, in the order of the table."""
    columns: dict[str, list[str]] = {}
    for name, cut in block.split.layers.items():
        if cut.kind == "column":
            below = name.removeprefix(cut.entrance).removeprefix(".")
            columns.setdefault(cut.entrance, []).append(below)
    return columns


def blocks(block: Weights) -> int:
    """Return runs of heads that are dealt separately: fused parts of an attention's projection."""
    rows = [cut.weight for cut in block.split.layers.values() if cut.kind == "row"]
    return max((len(parts) for layout in rows for parts in layout.parts), default=0) or 1


def alone(block: Weights) -> Iterator[tuple[str, Layout]]:
    """Cut parameters that belong to no layer, such as biases of positions by head."""
    for name, weight in block.parameters.items():
        module = name.rpartition(".")[0]
        is_listed = module in block.split.layers or module in block.split.experts
        if weight.layout.split_axes and not is_listed:
            yield name, weight.layout


def _length(action: StateAction, value: int, *, rank: int) -> int:
    """Return the length of a shard's part of a dim of `value` elements."""
    return len(action(torch.empty(value, device="meta"), rank=rank))

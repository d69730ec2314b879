"""A plan for any module: pairs of layers without a gather between them, the others by themselves.

Pairs are found where the flow of data can be known (pairs.py). A layer by itself is cut and its
output joined again:

| layer | weight | input | output |
|---|---|---|---|
| Linear | rows | | joined |
| Linear whose weight is an embedding's | columns | cut | summed |
| Embedding, EmbeddingBag | columns | | joined |
| convolution | output channels | | joined |
| convolution with as many groups as shards or more | groups | cut by groups | joined |
| convolution with fewer groups | input channels of each group | cut alike | summed |

What cannot be cut stays whole on every shard: a layer with fewer outputs than shards, or with a
forward of its own, or with hooks, which would see a part; an embedding that limits the norm of its
rows; the weights of torch's MultiheadAttention, which does not call its layers; and a weight that
is also that of a module which stays whole.
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from torchdistpackage.compat.tensor_parallel.engine.actions import (
    FirstOnly,
    Split,
    SplitInChunks,
    SplitInGroupedChunks,
)
from torchdistpackage.compat.tensor_parallel.engine.ops import SizedGather
from torchdistpackage.compat.tensor_parallel.engine.own_forward import has_own_forward, only_scales
from torchdistpackage.compat.tensor_parallel.engine.pairs import Pair, find_pairs
from torchdistpackage.compat.tensor_parallel.engine.rules import Config, plain_name
from torchdistpackage.layout.partition import even_sizes

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
LAYERS = (*EMBEDDINGS, nn.Linear, _ConvNd)
ADAPTERS = re.compile(r"(^|\.)lora_")
"""Parts of adapters, which are cut as their layer is."""


def get_default_config(module: nn.Module, device_ids: Sequence[torch.device | str | int]) -> Config:
    """Return rules for each linear, embedding and convolutional layer of `module`, by itself."""
    return default_rules(module, len(device_ids), with_pairs=False).config()


def default_rules(module: nn.Module, world_size: int, *, with_pairs: bool = True) -> "LayerRules":
    """Return the rules by which `tensor_parallel` splits a module of no known family, and the
    layers that stay unsplit.

    with_pairs: look for layers that need no gather between them.
    """
    builder = LayerRules(module, world_size)
    layers = list(builder.layers())
    names_of = {names[0]: names for names, _ in layers}
    by_name = dict(module.named_modules())
    paired: set[str] = set()
    for pair in find_pairs(module, world_size) if with_pairs else ():
        if all(name in names_of for name in (*pair.firsts, *pair.seconds)):
            builder.add_pair(pair, by_name)
            paired |= {*pair.firsts, *pair.seconds}
    for names, layer in layers:
        if names[0] not in paired:
            builder.add(names, layer)
    return builder


class LayerRules:
    """The four dicts of a plan, filled layer by layer.

    kept: layer -> why it stays whole. pairs: layers without a gather between them.
    """

    def __init__(self, module: nn.Module, world_size: int):
        self.module, self.world_size = module, world_size
        self.state: dict[str, Any] = {}
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}
        self.attributes: dict[str, Any] = {}
        self.entrances: dict[str, Any] = {}
        self.kept: dict[str, str] = {}
        self.pairs: list[Pair] = []
        self.embeddings = {m.weight: m for m in module.modules() if isinstance(m, EMBEDDINGS)}
        self.whole = whole_tensors(module)

    def config(self) -> Config:
        between = (f"^{re.escape(name)}$" for pair in self.pairs for name in pair.between)
        rules = (self.state, self.inputs, self.outputs, self.attributes)
        return Config(*rules, True, between, entrances=self.entrances)

    def layers(self) -> Iterator[tuple[list[str], nn.Module]]:
        """Yield layers that a plan may cut, with all their names."""
        names_of: dict[nn.Module, list[str]] = {}
        inside: set[nn.Module] = set()
        for name, module in self.module.named_modules(remove_duplicate=False):
            names_of.setdefault(module, []).append(name)
            if isinstance(module, nn.MultiheadAttention):
                inside.update(module.modules())
                self.kept[name] = "torch's attention reads the weights of its layers itself"
            elif isinstance(module, nn.TransformerEncoderLayer):
                # its fast path reads the weights of its layers too
                self.attributes[f"^{re.escape(name)}$"] = {"activation_relu_or_gelu": no_fast_path}
        for module, names in names_of.items():
            if module not in inside and not ADAPTERS.search(names[0]):
                yield list(dict.fromkeys(map(plain_name, names))), module

    def add(self, names: list[str], layer: nn.Module) -> None:
        """Add the rules of a layer, if it is of a kind that can be cut."""
        if not isinstance(layer, LAYERS):
            return
        if why := why_whole(layer):
            self.keep(names, why)
            return
        if holder := self.whole.get(layer.weight):
            self.keep(names, f"its weight is also that of {holder}, which is whole")
            return
        if isinstance(layer, EMBEDDINGS):
            self._add_embedding(names, layer)
        elif isinstance(layer, nn.Linear):
            self._add_linear(names, layer)
        elif isinstance(layer, _ConvNd):
            self._add_convolution(names, layer)

    def add_pair(self, pair: Pair, layers: dict[str, nn.Module]) -> None:
        """Add rules for layers that pass split values on, with one sum behind the last ones."""
        self.pairs.append(pair)
        num = self.world_size
        for name in pair.firsts:
            layer: Any = layers[name]
            split = Split(num, 1 if getattr(layer, "transposed", False) else 0)
            bias = Split(num, 0) if layer.bias is not None else None
            self.set([name], weight=split, bias=bias)
            self._enter(name)
        for name in pair.seconds:
            layer = layers[name]
            split = Split(num, 0 if getattr(layer, "transposed", False) else 1)
            self.set([name], weight=split, bias=FirstOnly() if layer.bias is not None else None)
            self.outputs[f"^{re.escape(name)}$"] = {0: "sum"}

    def set(self, names: list[str], **rules: Any) -> None:
        """weight, bias: state actions. input, output: on the first one. attr: of the layer."""
        for name in names:
            pattern = re.escape(name)
            for key in ("weight", "bias"):
                if rules.get(key) is not None:
                    dot = r"\." if name else ""
                    self.state[rf"^{pattern}{dot}{key}$"] = rules[key]
            if "output" in rules and "input" not in rules:
                self._enter(name)
            elif "output" in rules:
                self.inputs[f"^{pattern}$"] = {0: rules["input"]}
            if "output" in rules:
                self.outputs[f"^{pattern}$"] = {0: rules["output"]}
            if "attr" in rules:
                self.attributes[f"^{pattern}$"] = rules["attr"]

    def _enter(self, name: str) -> None:
        pattern = f"^{re.escape(name)}$"
        self.inputs[pattern], self.entrances[pattern] = {0: "copy"}, {0: ("",)}

    def gather(self, dim: int, length: int) -> SizedGather:
        return SizedGather(dim, tuple(even_sizes(length, self.world_size)))

    def keep(self, names: list[str], why: str) -> None:
        self.kept[names[0]] = why

    def _too_few(self, names: list[str], unit: str, num: int) -> bool:
        if num >= self.world_size:
            return False
        self.keep(names, f"{num} {unit} for {self.world_size} shards")
        return True

    def _add_embedding(self, names: list[str], layer: nn.Embedding | nn.EmbeddingBag) -> None:
        if self._too_few(names, "columns", layer.embedding_dim):
            return
        split, joined = Split(self.world_size, 1), self.gather(-1, layer.embedding_dim)
        self.set(names, weight=split, output=joined)
        if isinstance(getattr(layer, "bias", None), nn.Parameter):
            self.set(names, bias=Split(self.world_size, 0))

    def _add_linear(self, names: list[str], layer: nn.Linear) -> None:
        tied = self.embeddings.get(layer.weight)
        if tied is not None:
            if not self._too_few(names, "inputs", layer.in_features):
                bias = FirstOnly() if layer.bias is not None else None
                split = Split(self.world_size, 1)
                self.set(names, weight=split, input="split -1", bias=bias, output="sum")
            return
        if self._too_few(names, "outputs", layer.out_features):
            return
        split = Split(self.world_size, 0)
        bias = split if layer.bias is not None else None
        output = self.gather(-1, layer.out_features)
        self.set(names, weight=split, bias=bias, output=output)

    def _add_convolution(self, names: list[str], layer: _ConvNd) -> None:
        num, groups = self.world_size, layer.groups
        has_bias = layer.bias is not None
        if groups == 1:
            if self._too_few(names, "output channels", layer.out_channels):
                return
            weight = Split(num, 1 if layer.transposed else 0)
            output = self.gather(1, layer.out_channels)
            self.set(names, weight=weight, bias=Split(num, 0) if has_bias else None, output=output)
        elif groups >= num:
            self._cut_groups(names, layer)
        elif not self._too_few(names, "input channels in a group", layer.in_channels // groups):
            cut = SplitInGroupedChunks(num, 1, groups, 1)
            weight = SplitInGroupedChunks(num, 0, groups, 1) if layer.transposed else Split(num, 1)
            bias = FirstOnly() if has_bias else None
            self.set(names, weight=weight, bias=bias, input=cut, output="sum")

    def _cut_groups(self, names: list[str], layer: _ConvNd) -> None:
        num, groups = self.world_size, layer.groups
        wide_in, wide_out = layer.in_channels // groups, layer.out_channels // groups
        rows = wide_in if layer.transposed else wide_out
        sizes = tuple(size * wide_out for size in even_sizes(groups, num))
        self.set(
            names,
            weight=SplitInChunks(num, 0, rows),
            bias=SplitInChunks(num, 0, wide_out) if layer.bias is not None else None,
            input=SplitInChunks(num, 1, wide_in),
            output=SizedGather(1, sizes),
            attr={"groups": partial(even_part, world_size=num)},
        )


def why_whole(layer: nn.Module) -> str | None:
    """Return why a layer of a kind that can be cut is not cut; None: it can be."""
    weight = layer._parameters.get("weight")
    if weight is None:
        return "its weight is computed from other tensors"
    if not (weight.is_floating_point() or weight.is_complex()):
        return None  # quantised, which is refused where its numbers would be cut
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "it has hooks, which need all of its input and output"
    if has_own_forward(layer) and not (isinstance(layer, EMBEDDINGS) and only_scales(layer)):
        return f"{type(layer).__name__} has a forward of its own"
    if isinstance(layer, EMBEDDINGS) and layer.max_norm is not None:
        return "max_norm needs whole rows"
    return None


def whole_tensors(module: nn.Module) -> dict[torch.Tensor, str]:
    """Return the parameters of modules that cannot be cut, each with the name of one such
    module.
    """
    names: dict[torch.Tensor, str] = {}
    for name, part in module.named_modules():
        if not isinstance(part, LAYERS) or why_whole(part):
            for parameter in part._parameters.values():
                if parameter is not None:
                    names[parameter] = name or "the module"
    return names


def even_part(value: int, *, rank: int, world_size: int) -> int:
    """Return the share of `rank` in `value` items; the first ranks have one more."""
    return even_sizes(value, world_size)[rank]


def no_fast_path(value: int, *, rank: int) -> int:
    return 0

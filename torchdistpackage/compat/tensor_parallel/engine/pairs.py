"""Pairs of consecutive layers: the first is cut by outputs, the second by inputs, without a gather
in between.

A module is traced with torch.fx, and the flow of split values through it followed: what works on
each element alone keeps a value split, a second layer of the same kind takes it as its input, and
any other use needs it whole. A module that cannot be traced is looked at part by part. What depends
on arguments that may be left out is not trusted: only modules without optional arguments are
traced, in training and in evaluation, and a pair must be there both times.
"""

import copy
import inspect
import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from torchdistpackage.compat.tensor_parallel.engine.own_forward import has_own_forward

ELEMENTWISE_MODULES = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Identity,
    nn.Dropout,
)
ELEMENTWISE_FUNCTIONS = (
    F.relu,
    F.leaky_relu,
    F.elu,
    F.gelu,
    F.silu,
    F.mish,
    F.hardtanh,
    F.hardswish,
    F.softplus,
    F.dropout,
    F.tanh,
    F.sigmoid,
    torch.relu,
    torch.tanh,
    torch.sigmoid,
    torch.square,
    torch.mul,
    torch.add,
    torch.sub,
    torch.div,
    torch.neg,
    torch.abs,
    operator.mul,
    operator.add,
    operator.sub,
    operator.truediv,
    operator.neg,
    operator.pow,
)
ELEMENTWISE_METHODS = (
    "relu",
    "tanh",
    "sigmoid",
    "square",
    "abs",
    "neg",
    "contiguous",
    "clone",
    "mul",
    "add",
    "sub",
    "div",
)


@dataclass(frozen=True)
class Pair:
    """Layers by name. firsts: cut by outputs, of one length. seconds: cut by inputs.

    between: modules that see split values, for which dropout differs by shard.
    """

    firsts: tuple[str, ...]
    seconds: tuple[str, ...]
    between: tuple[str, ...] = ()


@dataclass
class _Flow:
    """Split values met so far. firsts: layers whose outputs went into one."""

    firsts: frozenset[str]
    kind: type
    length: int
    between: frozenset[str] = field(default_factory=frozenset)


class LayerTracer(fx.Tracer):
    """Stops at every module that is not a plain container of others."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(True for _ in m.children()) or super().is_leaf_module(
            m, module_qualified_name
        )


def find_pairs(module: nn.Module, world_size: int) -> list[Pair]:
    """Return pairs of layers of `module`; each layer is in at most one pair."""
    pairs: list[Pair] = []
    _search(module, "", world_size, pairs)
    used_names: set[str] = set()
    chosen = []
    for pair in pairs:
        names = {*pair.firsts, *pair.seconds}
        if not names & used_names:
            used_names |= names
            chosen.append(pair)
    return chosen


def _search(module: nn.Module, prefix: str, world_size: int, pairs: list[Pair]) -> None:
    graphs = _traced(module)
    if graphs is None:
        for name, child in module.named_children():
            _search(child, f"{prefix}{name}.", world_size, pairs)
        return
    users = Counter(
        id(p) for m in module.modules() for p in m._parameters.values() if p is not None
    )
    in_each = [_pairs_of(graph, module, world_size, users) for graph in graphs]
    for pair in in_each[0]:
        if all(pair in others for others in in_each[1:]):
            pairs.append(_prefixed(pair, prefix))


def _prefixed(pair: Pair, prefix: str) -> Pair:
    def named(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(prefix + name for name in names)

    return Pair(named(pair.firsts), named(pair.seconds), named(pair.between))


def _traced(module: nn.Module) -> list[fx.Graph] | None:
    """Its graph in training and in evaluation; None where it cannot be known."""
    if not any(True for _ in module.children()):
        return None
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind in kinds or parameter.default is not parameter.empty:
            return None
    if type(module).forward is nn.Module.forward:
        return None
    graphs = []
    try:
        # what a forward leaves behind when it is called with stand-ins, it leaves on a copy
        twin = copy.deepcopy(module, {id(t): t for t in every_tensor(module)})
        for mode in (True, False):
            graphs.append(LayerTracer().trace(twin.train(mode)))
    except Exception:  # whatever a forward may raise then
        return None
    return graphs


def every_tensor(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _pairs_of(
    graph: fx.Graph, module: nn.Module, world_size: int, users: Counter[int]
) -> list[Pair]:
    layers = dict(module.named_modules())
    calls = Counter(str(n.target) for n in graph.nodes if n.op == "call_module")

    read_directly = {str(n.target).rpartition(".")[0] for n in graph.nodes if n.op == "get_attr"}

    def kind_of(node: fx.Node) -> type | None:
        """Return the kind of a layer that may be cut: called once, its weight shared and read by
        none.
        """
        if str(node.target) in read_directly:
            return None
        if (
            node.op != "call_module"
            or calls[str(node.target)] != 1
            or len(node.all_input_nodes) != 1
        ):
            return None
        return cuttable(layers[str(node.target)], users)

    barred: set[str] = set()
    while True:
        groups, escaped = _flow_through(graph, layers, kind_of, barred, world_size)
        if not escaped:
            return groups
        barred |= escaped  # and again, as what was a second layer may now be a first one


def cuttable(layer: nn.Module, users: Counter[int]) -> type | None:
    """Return Linear or _ConvNd if a layer is of that type and shares its weights with no other."""
    if layer._forward_hooks or layer._forward_pre_hooks or layer._parameters.get("weight") is None:
        return None
    if any(p is not None and users[id(p)] > 1 for p in layer._parameters.values()):
        return None
    if type(layer) is nn.Linear and not has_own_forward(layer):
        return nn.Linear
    if isinstance(layer, _ConvNd) and layer.groups == 1 and not has_own_forward(layer):
        return _ConvNd
    return None


def _flow_through(
    graph: fx.Graph, layers: dict[str, nn.Module], kind_of: Any, barred: set[str], world_size: int
) -> tuple[list[Pair], set[str]]:
    """Return the pairs in which no layer of `barred` comes first, and first layers whose full
    output is needed.
    """
    flows: dict[fx.Node, _Flow] = {}
    seconds: dict[str, _Flow] = {}
    escaped: set[str] = set()
    merged: list[set[str]] = []
    for node in graph.nodes:
        inputs = [flows[n] for n in node.all_input_nodes if n in flows]
        kind = kind_of(node)
        if kind is not None:
            name = str(node.target)
            if inputs and inputs[0].kind is kind:
                seconds[name] = inputs[0]
                continue
            escaped |= {f for flow in inputs for f in flow.firsts}
            length = outputs_of(layers[name])
            if name not in barred and length >= world_size:
                flows[node] = _Flow(frozenset({name}), kind, length)
            continue
        if not inputs:
            continue
        mixes_full = len(inputs) < len(node.all_input_nodes)
        same_cut = len({(flow.kind, flow.length) for flow in inputs}) == 1
        if is_elementwise(node, layers) and same_cut and not mixes_full:
            firsts = frozenset().union(*(flow.firsts for flow in inputs))
            between = frozenset().union(*(flow.between for flow in inputs))
            if node.op == "call_module":
                between |= {str(node.target)}
            flows[node] = _Flow(firsts, inputs[0].kind, inputs[0].length, between)
            merged.append(set(firsts))
        else:
            escaped |= {f for flow in inputs for f in flow.firsts}
    fed = {f for flow in seconds.values() for f in flow.firsts}
    escaped |= {f for flow in flows.values() for f in flow.firsts} - fed
    for group in merged:  # values that were joined stay split together or not at all
        if group & escaped:
            escaped |= group
    return _grouped(seconds), escaped


def _grouped(seconds: dict[str, _Flow]) -> list[Pair]:
    groups: list[tuple[set[str], set[str], set[str]]] = []
    for name, flow in seconds.items():
        merged = (set(flow.firsts), {name}, set(flow.between))
        for group in [g for g in groups if g[0] & merged[0]]:
            groups.remove(group)
            merged = (merged[0] | group[0], merged[1] | group[1], merged[2] | group[2])
        groups.append(merged)
    return [Pair(*(tuple(sorted(names)) for names in group)) for group in groups]


def outputs_of(layer: Any) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def is_elementwise(node: fx.Node, layers: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return type(layers[str(node.target)]) in ELEMENTWISE_MODULES
    if node.op == "call_function":
        return node.target in ELEMENTWISE_FUNCTIONS
    return node.op == "call_method" and node.target in ELEMENTWISE_METHODS

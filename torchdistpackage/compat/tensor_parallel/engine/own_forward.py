"""Checks that a layer computes as torch's layer of its kind does, so that its weight can be cut.

A subclass of `nn.Linear` may choose the largest of its outputs, or use its weight in groups.
"""

import copy
import operator
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

CALLED = ("forward", "_conv_forward", "__call__")


def has_own_forward(layer: nn.Module) -> bool:
    """Return whether the class of `layer`, or the layer itself, overrides torch's computation."""
    kind: Any = next(k for k in type(layer).__mro__ if k.__module__.startswith("torch.nn."))
    set_here = vars(layer).get("forward", kind.forward)
    return getattr(set_here, "__func__", set_here) is not kind.forward or any(
        getattr(type(layer), name, None) is not getattr(kind, name, None) for name in CALLED
    )


def only_scales(embedding: nn.Module) -> bool:
    """Return whether an embedding's own forward only looks up rows and multiplies them by a number.

    Embeddings of many language models do, whose columns can be cut all the same.
    """
    try:
        # a trace leaves constants on what it traces
        tensors = [*embedding.parameters(), *embedding.buffers()]
        graph = fx.Tracer().trace(copy.deepcopy(embedding, {id(t): t for t in tensors}))
    except Exception:  # whatever a forward may raise when it is called with stand-ins
        return False
    attributes = dict(embedding.named_parameters()) | dict(embedding.named_buffers())
    ids = {node for node in graph.nodes if node.op == "placeholder"}
    if len(ids) > 1:  # an argument that may be left out stands for another way through
        return False
    numbers: set[fx.Node] = set()
    rows: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr" and str(node.target) != "weight":
            tensor = attributes.get(str(node.target))
            if tensor is not None and tensor.numel() == 1:
                numbers.add(node)
        elif node.target is F.embedding and inputs[0] in ids:
            rows.add(node)
        elif node.target in (operator.mul, "mul") and rows & {*inputs}:
            if not {*inputs} <= rows | numbers or len(rows & {*inputs}) > 1:
                return False
            rows.add(node)
        elif node.target == "to" and inputs[0] in numbers:
            numbers.add(node)
        elif node.op == "output":
            return node.args[0] in rows
        elif rows & {*inputs} or (reads_weight(inputs) and node.args[1:] != ("dtype",)):
            return False
    return False


def reads_weight(nodes: list[fx.Node]) -> bool:
    return any(node.op == "get_attr" and str(node.target) == "weight" for node in nodes)

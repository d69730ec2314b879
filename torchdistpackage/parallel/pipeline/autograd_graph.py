"""Behind the outputs of a stage in autograd's graph: the way to its inputs, and what branches off.

One rule: it is walked once, from the outputs; what is on the way is then found from its other end,
so that a walk costs the same wherever the parameters are.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

Node = Any
"""Of autograd's graph; torch's type of it has no members."""
Edges = tuple[tuple[Node, int], ...]
"""What a node hands its gradients to: by argument, (node, its output), (None, 0) for nobody."""

_NO_LEAVES: frozenset[Node] = frozenset()

_keeps_tensors: dict[type, bool] = {}
"""By the type of a node: whether it has kept tensors for its backward."""


class Graph:
    """way: the nodes between outputs and inputs, these included, and the edges of each.

    outputs: all require a gradient, or are places in the graph. inputs: leaves.
    """

    def __init__(self, outputs: Sequence[Tensor | GradientEdge], inputs: Sequence[Tensor]):
        wanted = set(map(id, inputs))
        self.roots: list[Node] = [
            x.node if isinstance(x, GradientEdge) else _node_of(x) for x in outputs
        ]
        self._edges: dict[Node, Edges] = {}
        self._leaves: dict[Node, frozenset[Node]] = {}
        self._keeping: set[Node] = set()
        parents: dict[Node, list[Node]] = {root: [] for root in self.roots}
        found, ends = list(parents), []
        for node in found:  # which grows
            self._edges[node] = edges = node.next_functions
            if not edges:
                leaf = getattr(node, "variable", None)
                if leaf is None:
                    self._leaves[node] = _NO_LEAVES
                elif id(leaf) in wanted:
                    ends.append(node)
                else:
                    self._leaves[node] = frozenset((node,))
                continue
            for child, _ in edges:
                if child is None:
                    continue
                above = parents.get(child)
                if above is None:
                    parents[child] = [node]
                    found.append(child)
                else:
                    above.append(node)
        self.path: dict[Node, Edges] = {}
        for node in ends:  # which grows
            if node not in self.path:
                self.path[node] = self._edges[node]
                ends += parents[node]

    def leaves(self, node: Node) -> frozenset[Node]:
        """Nodes of the parameters to which `node`, off the way, hands a gradient."""
        known = self._leaves.get(node)
        if known is None:
            below = {node: None}
            todo = [node]
            for other in todo:  # which grows
                for child, _ in self._edges[other]:
                    if child is not None and child not in below:
                        below[child] = None
                        todo.append(child)
            found = [self._leaves.get(other, _NO_LEAVES) for other in below]
            known = self._leaves[node] = _NO_LEAVES.union(*found)
            if any(map(_keeps, below)):
                self._keeping.add(node)
        return known

    def keeps(self, node: Node) -> bool:
        """Whether there are nodes from `node` on, off the way, whose backward needs what they have
        kept: the memory of parameters, which may be gone when a backward comes late."""
        self.leaves(node)
        return node in self._keeping

    def has(self, name: str) -> bool:
        """Whether a type of node has `name` in its own."""
        return any(name in kind.__name__ for kind in set(map(type, self._edges)))


def _node_of(x: Tensor) -> Node:
    """A leaf has no function, but a node that accumulates."""
    return x.grad_fn or get_gradient_edge(x).node


def _keeps(node: Node) -> bool:
    kind = type(node)
    known = _keeps_tensors.get(kind)
    if known is None:
        known = any(name.startswith("_raw_saved") for name in dir(kind))
        _keeps_tensors[kind] = known
    return known

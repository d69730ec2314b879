"""A stage's backward in two passes: I for the gradient of its input, W for those of its weights.

The first pass is an ordinary backward, which frees the graph behind it. For each matmul whose
weight can wait it keeps only the output's gradient and the other factor. The second pass gives each
parameter its gradient in a backward of its own, so that it accumulates as usual: hooks run, in the
dtype of `.grad`.

A parameter waits if all its gradients can be computed later (deferred_wgrad.py). The others get
theirs in the first pass:

- those of norms and added biases, which cost little;
- those behind autograd functions, and so all of a compiled stage;
- those under activation checkpointing, which would run the forward again;
- those from which a matrix is computed (weight norm), because that needs memory that ZeRO 3 frees
  meanwhile.

Each parameter gets its gradient in exactly one of the passes.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchdistpackage.parallel.deferred_wgrad import DeferredGrad, deferred_gradient

Node = Any
"""A node of autograd's graph; torch's type of it has no members."""
Edges = tuple[tuple[Node, int], ...]
"""The nodes that get a node's gradients, by argument: (node, its output), or (None, 0)."""

_NO_LEAVES: frozenset[Node] = frozenset()

AT_ONCE_BYTES = 2**20
"""Bytes of gradients to accumulate in one backward, which costs as much to start as a small
matmul.
"""

_CHECKPOINT = "CheckpointFunction"
"""Part of the names of autograd functions that run a backward of their own, which raise in a
backward for `inputs` alone."""

_run_backward = torch.autograd.Variable._execution_engine.run_backward


class Deferred:
    """The work that the first pass leaves for the second, which uses it up.

    parameters: ids of parameters that get their gradient there; None: all of the stage.
    """

    def __init__(self) -> None:
        self.parameters: frozenset[int] | None = frozenset()
        self._groups: list[list[_DeferPoint]] = []
        # outputs and gradients of a stage that runs its full backward in the second pass
        self._whole: tuple[Sequence[Tensor | GradientEdge], Sequence[Tensor]] | None = None


class _WeightBranch(NamedTuple):
    """A branch from the path to the input that leads to `leaves`, the nodes of parameters."""

    to: GradientEdge
    later: DeferredGrad
    leaves: frozenset[Node]


class _DeferPoint:
    """A node on the path to the input, its branches, and the gradients that they need.

    leaves: nodes of the parameters. position: order in which the first pass reached the node.
    """

    __slots__ = ("branches", "gradients", "leaves", "position")

    def __init__(self, branches: Sequence[_WeightBranch]):
        self.branches, self.position = branches, 0
        self.leaves = frozenset().union(*(branch.leaves for branch in branches))
        self.gradients: tuple[Tensor | None, ...] = ()

    def take(self, positions: Iterator[int], gradients: tuple[Tensor | None, ...]) -> None:
        """Keep the gradients of the node's outputs; this is a prehook of the node."""
        self.gradients, self.position = gradients, next(positions)


def backward_input(
    outputs: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Deferred:
    """Accumulate the gradients of `inputs` into their `.grad`, and leave the rest for later.

    outputs: outputs of a stage, all of which require a gradient, or their edges in the graph, which
        is used up.
    gradients: one for each output.
    inputs: leaves, whose memory must not change until the second pass. If the outputs depend on
        none of them, nothing is computed yet.
    """
    deferred = Deferred()
    graph = Graph(outputs, inputs)
    if not graph.path:
        deferred._whole, deferred.parameters = (outputs, gradients), None
        return deferred
    points, at_once = _split(graph)
    if not points:
        _accumulate(outputs, gradients)
        return deferred
    positions = count()
    for node, point in points.items():
        node.register_prehook(partial(point.take, positions))
    waiting = frozenset().union(*(point.leaves for point in points.values()))
    deferred.parameters = frozenset(id(leaf.variable) for leaf in waiting)
    targets = [*inputs, *(leaf.variable for leaf in at_once)]
    _accumulate(outputs, gradients, targets)
    if gradients[0].is_cuda:
        # Autograd may have computed these on another stream; the second pass uses them on this one,
        # so the allocator must not reuse their memory before it is done.
        for point in points.values():
            if grads := [x for x in point.gradients if x is not None]:
                for x in (*grads, *(x for b in point.branches for x in b.later.kept)):
                    x.record_stream(torch.cuda.current_stream(grads[0].device))
    # in the order of an ordinary backward; `pop` takes the first one from the end
    deferred._groups = sorted(
        _sharing_parameters(points.values()),
        key=lambda group: max(point.position for point in group),
        reverse=True,
    )
    return deferred


def backward_weight(deferred: Deferred) -> None:
    """Accumulate the waiting gradients into the `.grad` of their parameters; call it once."""
    if deferred._whole is not None:
        (outputs, gradients), deferred._whole = deferred._whole, None
        _accumulate(outputs, gradients)
    groups = deferred._groups
    edges: list[GradientEdge] = []
    grads: list[Tensor] = []
    num_bytes = 0
    with torch.no_grad():
        while groups:
            for point in groups.pop():
                gradients, branches = point.gradients, point.branches
                point.gradients, point.branches = (), ()
                for branch in branches if gradients else ():
                    gradient = gradients[branch.later.result]
                    if gradient is None:
                        continue
                    edges.append(branch.to)
                    grads.append(branch.later(gradient))
                    num_bytes += grads[-1].nbytes
            if edges and (num_bytes >= AT_ONCE_BYTES or not groups):
                _accumulate(edges, grads)
                edges, grads, num_bytes = [], [], 0


def _accumulate(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor] = (),
) -> None:
    """Run `torch.autograd.backward`, which does not accept edges in every torch version."""
    _run_backward(
        tuple(roots),
        tuple(gradients),
        keep_graph=False,
        create_graph=False,
        inputs=tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _split(graph: "Graph") -> tuple[dict[Node, _DeferPoint], set[Node]]:
    """Return defer points by node, and the nodes of parameters that get their gradient at once."""
    at_once: set[Node] = set()
    for root in graph.roots:
        if root not in graph.path:
            at_once |= graph.leaves(root)
    if graph.has(_CHECKPOINT):
        return {}, at_once
    branches_found: list[tuple[Node, _WeightBranch]] = []
    path = graph.path
    for node, edges in path.items():
        if len(edges) < 2:
            continue  # its only edge is on the path
        for argument, (child, number) in enumerate(edges):
            if child is None or child in path:
                continue
            leaves = graph.leaves(child)
            waits = leaves and not graph.keeps(child)
            later = deferred_gradient(node, argument, path) if waits else None
            if later is None:
                at_once |= leaves
            else:
                branches_found.append(
                    (node, _WeightBranch(GradientEdge(child, number), later, leaves))
                )
    # a branch that shares a parameter with an immediate one becomes immediate too
    while immediate := [b for _, b in branches_found if not at_once.isdisjoint(b.leaves)]:
        branches_found = [
            (node, branch) for node, branch in branches_found if at_once.isdisjoint(branch.leaves)
        ]
        at_once.update(*(branch.leaves for branch in immediate))
    by_node: dict[Node, list[_WeightBranch]] = {}
    for node, branch in branches_found:
        by_node.setdefault(node, []).append(branch)
    return {node: _DeferPoint(branches) for node, branches in by_node.items()}, at_once


def _sharing_parameters(points: Iterable[_DeferPoint]) -> list[list[_DeferPoint]]:
    """Group points that share parameters, which get their gradients together."""
    groups: list[list[_DeferPoint]] = []
    group_of: dict[Node, list[_DeferPoint]] = {}
    for point in points:
        group = [point]
        for leaf in point.leaves:
            other = group_of.get(leaf, group)
            if other is not group:
                group += other
                groups.remove(other)
                group_of.update((leaf, group) for p in other for leaf in p.leaves)
        group_of.update(dict.fromkeys(point.leaves, group))
        groups.append(group)
    return groups


# -- autograd's graph ------------------------------------------------------------------------------


class Graph:
    """The graph behind the outputs of a stage: the path to its inputs, and its branches.

    It is walked once from the outputs; the path is then found from the inputs' end.

    path: the nodes between outputs and inputs, both included, with their edges.
    outputs: tensors that require a gradient, or edges of the graph. inputs: leaves.
    """

    def __init__(self, outputs: Sequence[Tensor | GradientEdge], inputs: Sequence[Tensor]):
        input_ids = set(map(id, inputs))
        self.roots: list[Node] = [
            (x if isinstance(x, GradientEdge) else get_gradient_edge(x)).node for x in outputs
        ]
        self._edges: dict[Node, Edges] = {}
        self._leaves: dict[Node, frozenset[Node]] = {}
        self._keeping: set[Node] = set()
        parents: dict[Node, list[Node]] = {root: [] for root in self.roots}
        nodes, ends = list(parents), []
        for node in nodes:  # the list grows meanwhile
            self._edges[node] = edges = node.next_functions
            if not edges:
                leaf = getattr(node, "variable", None)
                if leaf is None:
                    self._leaves[node] = _NO_LEAVES
                elif id(leaf) in input_ids:
                    ends.append(node)
                else:
                    self._leaves[node] = frozenset((node,))
                continue
            for child, _ in edges:
                if child is None:
                    continue
                if child not in parents:
                    parents[child] = []
                    nodes.append(child)
                parents[child].append(node)
        self.path: dict[Node, Edges] = {}
        for node in ends:  # the list grows meanwhile
            if node not in self.path:
                self.path[node] = self._edges[node]
                ends += parents[node]

    def leaves(self, node: Node) -> frozenset[Node]:
        """Return the nodes of the parameters to which `node`, off the path, passes a gradient."""
        leaves_ = self._leaves.get(node)
        if leaves_ is None:
            below, todo = {node}, [node]
            for other in todo:  # the list grows meanwhile
                for child, _ in self._edges[other]:
                    if child is not None and child not in below:
                        below.add(child)
                        todo.append(child)
            leaf_sets = [self._leaves.get(other, _NO_LEAVES) for other in below]
            leaves_ = self._leaves[node] = _NO_LEAVES.union(*leaf_sets)
            if any(map(_keeps, map(type, below))):
                self._keeping.add(node)
        return leaves_

    def keeps(self, node: Node) -> bool:
        """Return whether backwards from `node` on, off the path, need saved tensors.

        These are memory of parameters, which may be freed by then.
        """
        self.leaves(node)
        return node in self._keeping

    def has(self, name: str) -> bool:
        """Return whether the name of some node's type contains `name`."""
        return any(name in kind.__name__ for kind in set(map(type, self._edges)))


@cache
def _keeps(kind: type) -> bool:
    """Return whether nodes of this type save tensors for their backward."""
    return any(name.startswith("_raw_saved") for name in dir(kind))

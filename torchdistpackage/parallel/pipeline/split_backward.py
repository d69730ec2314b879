"""A stage's backward in two passes: I for the gradient of its input, W for those of its weights.

One rule: the first pass is an ordinary backward, which frees what it has gone through. Of each
product whose matrix can wait it leaves the gradient that came there and the other factor, nothing
else. The second hands each parameter what it waits for in one backward of its own, so that it is
accumulated as ever: hooks run, in the dtype of `.grad`, and who sums it over ranks is told.

A parameter waits if all its gradients can be had later (deferred_wgrad.py). The others get
theirs in the first pass: those of norms and added biases, which cost little; those behind
autograd functions, so all of a compiled stage; those under a checkpoint, which would be run
again; those from which a matrix is computed (weight norm), as that needs memory of theirs that
ZeRO 3 frees meanwhile. Each gets its gradient in exactly one of the two.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from torchdistpackage.parallel.pipeline.autograd_graph import Graph, Node
from torchdistpackage.parallel.pipeline.deferred_wgrad import DeferredGrad, deferred_gradient

AT_ONCE_BYTES = 2**20
"""Gradients that are handed over in one backward: to start one costs as much as a small product."""

_CHECKPOINT = "CheckpointFunction"
"""In the names of autograd functions, torch's and those made after it, that run a backward of their
own and refuse to in one that is for `inputs` alone."""

_run_backward = torch.autograd.Variable._execution_engine.run_backward


class Deferred:
    """What the first pass left for the second, which uses it up.

    parameters: ids of those that get their gradient there; None: all that the stage has.
    """

    def __init__(self) -> None:
        self.parameters: frozenset[int] | None = frozenset()
        self._groups: list[_SharedParamGroup] = []
        self._whole: tuple[Sequence[Tensor | GradientEdge], Sequence[Tensor]] | None = None


class _WeightBranch(NamedTuple):
    """Where the way to `leaves`, the nodes of parameters, leaves that to the input."""

    to: GradientEdge
    later: DeferredGrad
    leaves: frozenset[Node]


class _DeferPoint:
    """A node on the way to the input, and what branches off and waits for its gradient."""

    __slots__ = ("branches", "gradient", "group")
    group: "_SharedParamGroup"

    def __init__(self, branches: Sequence[_WeightBranch]):
        self.branches = branches
        self.gradient: Tensor | None = None

    def take(self) -> tuple[Tensor | None, Sequence[_WeightBranch]]:
        """The gradient, if one came, and the branches; holds neither any more."""
        taken = self.gradient, self.branches
        self.gradient, self.branches = None, ()
        return taken


class _SharedParamGroup:
    """Joints that have parameters in common, so that these get their gradients together.

    leaves: nodes of these. place: where in the first pass the last of them came.
    """

    __slots__ = ("joints", "leaves", "place")

    def __init__(self, joint: _DeferPoint):
        self.joints, self.place = [joint], 0
        self.leaves = frozenset().union(*(branch.leaves for branch in joint.branches))


def backward_input(
    outputs: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Deferred:
    """Accumulate the gradients of `inputs` into their `.grad`, and leave the rest for later.

    outputs: of a stage, all of which require a gradient, or their places in the graph; this is used
        up. gradients: one for each. inputs: leaves that require a gradient, whose memory must stay
        as it is until the second pass; if the outputs depend on none of them, nothing is done yet.
    """
    deferred = Deferred()
    graph = Graph(outputs, inputs)
    if not graph.path:
        deferred._whole, deferred.parameters = (outputs, gradients), None
        return deferred
    joints, at_once = _split(graph)
    if not joints:
        _accumulate(outputs, gradients)
        return deferred
    groups, places = _grouped(joints.values()), count()
    for node, joint in joints.items():
        node.register_prehook(partial(_came, joint, places))
    deferred.parameters = frozenset(id(leaf.variable) for g in groups for leaf in g.leaves)
    wanted = [*inputs, *(leaf.variable for leaf in at_once)]
    _accumulate(outputs, gradients, wanted)
    if gradients[0].is_cuda:
        _use_on_this_stream(joints.values())
    # handed over in the order in which a whole backward gives them; the first is popped first
    deferred._groups = sorted(groups, key=_place, reverse=True)
    return deferred


def backward_weight(deferred: Deferred) -> None:
    """Accumulate the gradients that wait into the `.grad` of their parameters; once."""
    if deferred._whole is not None:
        (outputs, gradients), deferred._whole = deferred._whole, None
        _accumulate(outputs, gradients)
    with torch.no_grad():
        _hand_over(deferred._groups)


def _hand_over(groups: list[_SharedParamGroup]) -> None:
    """Compute what waits, from the last group to the first, and accumulate it."""
    edges: list[GradientEdge] = []
    grads: list[Tensor] = []
    num_bytes = 0
    while groups:
        for joint in groups.pop().joints:
            gradient, branches = joint.take()
            for branch in branches if gradient is not None else ():
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
    """What `torch.autograd.backward` does, which does not know edges in every torch."""
    _run_backward(
        tuple(roots),
        tuple(gradients),
        keep_graph=False,
        create_graph=False,
        inputs=tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _split(graph: Graph) -> tuple[dict[Node, _DeferPoint], set[Node]]:
    """Joints, and the nodes of parameters that get their gradient at once."""
    at_once: set[Node] = set()
    for root in graph.roots:
        if root not in graph.path:
            at_once |= graph.leaves(root)
    if graph.has(_CHECKPOINT):
        return {}, at_once
    found: list[tuple[Node, _WeightBranch]] = []
    way = graph.path
    for node, edges in way.items():
        if len(edges) < 2:
            continue  # its one edge is the way on
        for argument, (child, number) in enumerate(edges):
            if child is None or child in way:
                continue
            leaves = graph.leaves(child)
            waits = leaves and not graph.keeps(child)
            later = deferred_gradient(node, argument, way) if waits else None
            if later is None:
                at_once |= leaves
            else:
                found.append((node, _WeightBranch(GradientEdge(child, number), later, leaves)))
    # who shares a parameter with one that gets all at once does so too
    while at_once and (taken := [b for _, b in found if not at_once.isdisjoint(b.leaves)]):
        found = [(node, branch) for node, branch in found if at_once.isdisjoint(branch.leaves)]
        at_once.update(*(branch.leaves for branch in taken))
    by_node: dict[Node, list[_WeightBranch]] = {}
    for node, branch in found:
        by_node.setdefault(node, []).append(branch)
    return {node: _DeferPoint(branches) for node, branches in by_node.items()}, at_once


def _grouped(joints: Iterable[_DeferPoint]) -> set[_SharedParamGroup]:
    group_of: dict[Node, _SharedParamGroup] = {}
    for joint in joints:
        group = _SharedParamGroup(joint)
        for other in {group_of[leaf] for leaf in group.leaves if leaf in group_of}:
            group.joints += other.joints
            group.leaves |= other.leaves
        group_of.update(dict.fromkeys(group.leaves, group))
    groups = set(group_of.values())
    for group in groups:
        for joint in group.joints:
            joint.group = group
    return groups


def _came(joint: _DeferPoint, places: Iterator[int], gradients: tuple[Tensor | None, ...]) -> None:
    """Hook of a joint's node, whose gradient is there; products have one result."""
    joint.gradient = gradients[0]
    joint.group.place = next(places)


def _place(group: _SharedParamGroup) -> int:
    return group.place


def _use_on_this_stream(joints: Iterable[_DeferPoint]) -> None:
    """Products that ran on another stream left memory there, which the second pass uses here."""
    for joint in joints:
        if joint.gradient is not None:
            stream = torch.cuda.current_stream(joint.gradient.device)
            joint.gradient.record_stream(stream)
            for branch in joint.branches:
                for kept in branch.later.kept:
                    kept.record_stream(stream)

"""The backward of a placed program: one graph for each operation, joined by hand.

One rule: every rank posts the gradients that go to or come from other ranks from the last operation
to the first (`routes.py`), and computes between as that needs. An operation's inputs are cut from
the graph that made them, so its backward runs once, when the gradients of all its outputs have
arrived; autograd runs only within an operation.

A `StepRecord` is what a rank remembers of an operation; operations that this rank takes no part in
leave none. A value knows its `frontier`, the last steps of this rank that it depends on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdistpackage.comm.tensor_meta import TensorMeta
from torchdistpackage.compat.placed.mail import ExpectedGrads, Mail
from torchdistpackage.compat.placed.structure import Hole, fill, holes
from torchdistpackage.errors import PlacementError
from torchdistpackage.parallel.pipeline.links import Root, graph_root

_MAX_FRONTIER = 32


class GradTarget:
    """A tensor that gets a gradient.

    leaf: the tensor to accumulate in, None for an output. number: of the operation that made it.
    changed_by: an operation that wrote to it since.
    """

    __slots__ = ("changed_by", "device", "leaf", "number")

    def __init__(self, number: int, device: torch.device, leaf: Tensor | None = None):
        self.number = number
        self.device = device
        self.leaf = leaf
        self.changed_by = ""


class _CutEdge(torch.autograd.Function):
    """Cuts the tensor in `box` from its graph; the backward leaves its gradient in `slot`.

    The output is not a leaf, so an operation may write to it, as an in-place ReLU does. `anchor`
    makes it require a gradient.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, box: list[Tensor], slot: list[Tensor | None]) -> Tensor:
        ctx.slot = slot
        ctx.set_materialize_grads(False)
        return box[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None]:
        ctx.slot[:] = gradients
        return None, None, None


class Content(NamedTuple):
    """The tensors of a value, on a rank of its place.

    skeleton: its structure, with a `Hole` for each tensor. targets: the target of each tensor's
    gradient, None for a tensor without one.
    """

    skeleton: Any
    tensors: list[Tensor]
    targets: list[GradTarget | None]

    def part(self, skeleton: Any) -> Content:
        """Return the part with this skeleton."""
        used = holes(skeleton)
        renumbered = fill(skeleton, {old: Hole(new) for new, old in enumerate(used)})
        return Content(renumbered, [self.tensors[i] for i in used], [self.targets[i] for i in used])

    def detached(self) -> Content:
        """Return the content without its graph."""
        return Content(
            self.skeleton, [x.detach() for x in self.tensors], [None] * len(self.tensors)
        )

    def value(self) -> Any:
        """Return the tensors in their structure."""
        return fill(self.skeleton, self.tensors)


class StepInput:
    """A tensor that an operation reads on this rank, cut from its graph.

    target: gets its gradient on this rank; None if the tensor came from another rank.
    """

    __slots__ = ("_begun", "_slot", "cut", "meta", "source", "target")

    def __init__(self, x: Tensor, wants: bool, target: GradTarget | None, anchor: Tensor):
        self.source = x
        self.target = target
        self._slot: list[Tensor | None] = [None]
        self.meta = TensorMeta(tuple(x.shape), x.dtype, wants)
        self.cut: Tensor = _CutEdge.apply(anchor, [x], self._slot) if wants else x
        self._begun = self.cut._version

    def finish(self, operation: str) -> None:
        """Release the tensor after the operation, and note whether the operation wrote to it."""
        if self.target is not None and self.cut._version != self._begun:
            self.target.changed_by = operation
        del self.cut, self.source

    def gradient(self) -> Tensor | None:
        """Return the gradient of the last backward, and forget it; None if there is none."""
        gradient = self._slot[0]
        self._slot[0] = None
        return gradient


class StepRecord:
    """A rank's record of an operation, for a backward.

    outputs: (target, node in the graph) of each output with a gradient, if it runs here. inputs:
    inputs with a gradient. returns: (rank, inputs) whose gradients go to another rank. expects:
    (rank, metas, targets) of gradients that arrive from a rank where it runs.
    """

    __slots__ = ("expects", "inputs", "number", "outputs", "parents", "returns")

    def __init__(self, number: int, parents: tuple[StepRecord, ...]):
        self.number = number
        self.parents = parents
        self.outputs: list[tuple[GradTarget, Root]] = []
        self.inputs: list[StepInput] = []
        self.returns: list[tuple[int, list[StepInput]]] = []
        self.expects: list[tuple[int, list[TensorMeta], list[GradTarget]]] = []

    @property
    def matters(self) -> bool:
        """True if this rank takes part in the operation's backward."""
        return bool(self.outputs or self.returns or self.expects)

    def add_output(self, x: Tensor) -> GradTarget | None:
        """Return the target of this output's gradient, None if it requires none."""
        if not x.requires_grad:
            return None
        target = GradTarget(self.number, x.device)
        root = graph_root(x)
        assert root is not None
        self.outputs.append((target, root))
        return target

    def add_return(self, rank: int, inputs: Sequence[StepInput]) -> None:
        """Send the gradients of these inputs, if they require one, to `rank` in the backward."""
        if wanting := [step_input for step_input in inputs if step_input.meta.requires_grad]:
            self.returns.append((rank, wanting))

    def add_expected(self, rank: int, contents: Sequence[Content | None]) -> None:
        """Expect the gradients of these values from `rank`."""
        metas = list[TensorMeta]()
        targets = list[GradTarget]()
        for x, target in [
            pair
            for content in contents
            if content is not None
            for pair in zip(content.tensors, content.targets, strict=True)
        ]:
            if target is not None:
                metas.append(TensorMeta(tuple(x.shape), x.dtype, True))
                targets.append(target)
        if targets:
            self.expects.append((rank, metas, targets))

    def backward(self, gathered: GatheredGrads, mail: Mail | None, retain_graph: bool) -> None:
        """Run the operation's backward, if it ran here, and pass its gradients on."""
        for rank, metas, targets in self.expects:
            assert mail is not None
            gathered.expect(targets, mail.expect_gradients(self.number, metas, rank), self.number)
        output_grads = [(root, gathered.take(target)) for target, root in self.outputs]
        roots = [(root, g) for root, g in output_grads if g is not None]
        if roots:
            torch.autograd.backward(
                [root for root, _ in roots], [g for _, g in roots], retain_graph=retain_graph
            )
        input_grads = {id(step_input): step_input.gradient() for step_input in self.inputs}
        for step_input in self.inputs:
            if step_input.target is not None:
                gathered.add(step_input.target, input_grads[id(step_input)])
        for rank, inputs in self.returns:
            assert mail is not None
            gradients = [input_grads[id(step_input)] for step_input in inputs]
            mail.send_gradients(
                self.number, gradients, [step_input.meta for step_input in inputs], rank
            )


Frontier = tuple[StepRecord, ...]


def join_frontiers(frontiers: Iterable[Frontier]) -> Frontier:
    """Return the frontier of a value that is computed from several values."""
    steps = tuple({id(step): step for frontier in frontiers for step in frontier}.values())
    if len(steps) <= _MAX_FRONTIER:
        return steps
    return (StepRecord(max(step.number for step in steps), steps),)


def steps_before(frontier: Frontier) -> list[StepRecord]:
    """Return all steps that a value depends on, the last operation first."""
    reached = {id(step): step for step in frontier}
    todo = list(frontier)
    while todo:
        for step in todo.pop().parents:
            if id(step) not in reached:
                reached[id(step)] = step
                todo.append(step)
    return sorted(reached.values(), key=lambda step: -step.number)


def in_order_of_need(steps: Sequence[StepRecord]) -> Iterator[StepRecord]:
    """Yield steps with messages in order, each right after the steps it needs; then the others.

    So no rank waits for a gradient while this one computes something that no rank waits for.

    steps: the last operation first. A step comes after all steps that read its outputs here.
    """
    readers: dict[int, list[StepRecord]] = {}
    for step in steps:
        for parent in step.parents:
            readers.setdefault(id(parent), []).append(step)
    visited: set[int] = set()
    for step in steps:
        if step.returns:
            needed = {id(step): step}
            todo = [step]
            while todo:
                for reader in readers.get(id(todo.pop()), ()):
                    if id(reader) not in visited and id(reader) not in needed:
                        needed[id(reader)] = reader
                        todo.append(reader)
            chosen = sorted(needed.values(), key=lambda node: -node.number)
        else:
            chosen = [step] if step.expects else []
        for node in chosen:
            if id(node) not in visited:
                visited.add(id(node))
                yield node
    for step in steps:
        if id(step) not in visited:
            yield step


class GatheredGrads:
    """The gradients of one backward, kept until the step that made their tensor runs."""

    def __init__(self) -> None:
        self._gathered: dict[int, list[Tensor | tuple[ExpectedGrads, int, int]]] = {}
        self._targets: dict[int, GradTarget] = {}

    def add(self, target: GradTarget, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._at(target).append(gradient)

    def expect(self, targets: Sequence[GradTarget], coming: ExpectedGrads, operation: int) -> None:
        """Add gradients that another rank sends; `take` waits for them."""
        for i, target in enumerate(targets):
            self._at(target).append((coming, i, operation))

    def take(self, target: GradTarget) -> Tensor | None:
        """Return the sum of the gradients of `target`, in the order in which they were added."""
        self._targets.pop(id(target), None)
        total: Tensor | None = None
        for entry in self._gathered.pop(id(target), ()):
            if isinstance(entry, tuple):
                coming, i, operation = entry
                # wait only now, so that computing and receiving overlap
                gradient = coming.wait(operation)[i]
            else:
                gradient = entry
            if gradient is None:
                continue
            gradient = gradient.to(target.device)
            total = gradient if total is None else total + gradient
        return total

    def accumulate(self) -> None:
        """Add the gradients of leaves to their `grad`, the last leaf first."""
        for target in sorted(self._targets.values(), key=lambda t: -t.number):
            gradient = self.take(target)
            if gradient is not None and target.leaf is not None:
                torch.autograd.backward([target.leaf], [gradient])

    def _at(self, target: GradTarget) -> list[Any]:
        self._targets[id(target)] = target
        return self._gathered.setdefault(id(target), [])


def refuse_changed(targets: Iterable[GradTarget | None], operation: str) -> None:
    """Refuse inputs that an earlier operation changed in place; autograd cannot see that.

    Raises:
        PlacementError: an earlier operation wrote to an input of this one.
    """
    for target in targets:
        if target is not None and target.changed_by:
            raise PlacementError(
                f"{operation} reads an output of operation {target.number} that "
                f"{target.changed_by} has changed in place: read the output of the latter instead, "
                f"or let it leave its input as it is"
            )

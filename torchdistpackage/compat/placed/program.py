"""The operations of a placed program, as one rank runs them.

Every rank makes the same calls, so all number them the same. One rule: the messages of an operation
follow from its number and its places alone, so no rank asks another what comes next.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdistpackage.comm.creation import Group, PerGroup, is_joined, ranks_of, world
from torchdistpackage.compat.placed.draws import own_draws
from torchdistpackage.compat.placed.gradients import (
    Content,
    Frontier,
    GatheredGrads,
    GradTarget,
    StepInput,
    StepRecord,
    in_order_of_need,
    join_frontiers,
    refuse_changed,
    steps_before,
)
from torchdistpackage.compat.placed.mail import Mail
from torchdistpackage.compat.placed.order_check import OrderCheck
from torchdistpackage.compat.placed.place import Place
from torchdistpackage.compat.placed.routes import Ranks, backward_routes, forward_routes
from torchdistpackage.compat.placed.structure import Hole, fill, flatten, holes, to_text
from torchdistpackage.errors import PlacementError

DEBUG = "TDP_PLACED_DEBUG"
"""Environment variable; set to 1, all ranks compare each operation before they run it."""


class PlacedValue:
    """An output as this rank knows it.

    content: None on ranks outside of its place. pending: its operation has not run yet.
    """

    __slots__ = ("content", "frontier", "number", "pending", "place")

    def __init__(
        self,
        place: Place,
        number: int,
        content: Content | None = None,
        frontier: Frontier = (),
        pending: bool = False,
    ):
        self.place = place
        self.number = number
        self.content = content
        self.frontier = frontier
        self.pending = pending

    def but(self, content: Content | None, frontier: Frontier | None = None) -> PlacedValue:
        """Return this value with another content."""
        new_frontier = self.frontier if frontier is None else frontier
        return PlacedValue(self.place, self.number, content, new_frontier)


class PlacedTask(NamedTuple):
    """An operation that was called. grads: autograd was on then."""

    function: Callable[..., Any]
    name: str
    arguments: Any
    values: Sequence[PlacedValue]
    output: PlacedValue
    grads: bool

    def __str__(self) -> str:
        return f"operation {self.output.number} ({self.name})"


class Program:
    """The operations of the ranks of a group, numbered as they are called.

    group: None: this process alone.
    """

    def __init__(self, group: Group | None):
        self.rank = 0 if group is None else ranks_of(group)[group.rank()]
        self.ranks = (0,) if group is None else tuple(ranks_of(group))
        self.mail = Mail(group) if group is not None and len(self.ranks) > 1 else None
        self._number = 0
        self._ahead: list[PlacedTask] | None = None
        self._anchor = torch.empty(0, requires_grad=True)
        self._check = OrderCheck(group) if self.mail is not None and group is not None else None
        self.debug = os.environ.get(DEBUG, "0") not in ("", "0")

    def get_next(self) -> int:
        """Return the number of the next operation of all ranks."""
        self._number += 1
        return self._number

    def begin(self, label: str, place: Place | None, reads: Sequence[int] = ()) -> int:
        """Return the number of an operation; in debug mode all ranks compare its label.

        Raises:
            PlacementError: on all ranks: a rank is about to call another operation.
        """
        number = self.get_next()
        if self.debug and self._check is not None:
            self._check.compare(number, label, place, reads)
        return number

    def is_on(self, place: Place) -> bool:
        """Return whether this rank is one of the place's ranks."""
        return self.rank in place.ranks

    def leaf(self, x: Tensor, place: Place) -> PlacedValue:
        """Return the value of a user's tensor on its place."""
        number = self.begin("a tensor", place)
        if not self.is_on(place):
            return PlacedValue(place, number, None, ())
        moved = x.to(place.device)
        if moved is not x and moved.requires_grad and not moved.is_leaf:
            moved.retain_grad()  # both tensors get the gradient
        _, skeleton = flatten(moved, _is_tensor)
        target = GradTarget(number, moved.device, moved) if moved.requires_grad else None
        return PlacedValue(place, number, Content(skeleton, [moved], [target]), ())

    def call(
        self,
        function: Callable[..., Any],
        name: str,
        place: Place,
        arguments: Any,
        values: Sequence[PlacedValue],
    ) -> PlacedValue:
        """Run `function(*args, **kwargs)` on `place`.

        arguments: skeleton of (args, kwargs) with a hole for each value. Ranks outside of the place
        only send what the function reads.
        """
        number = self.begin(name, place, [value.number for value in values])
        output = PlacedValue(place, number, pending=True)
        grads = torch.is_grad_enabled()
        task = PlacedTask(function, name, arguments, values, output, grads)
        if self._ahead is None:
            self._run(task, sends=True)
        else:
            self._ahead.append(task)
        return output

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Queue operations within the context; `flush` runs them, and so does the end."""
        outer = self._ahead
        self._ahead = [] if outer is None else outer
        try:
            yield
            self.flush()
        finally:
            self._ahead = outer

    def flush(self) -> None:
        """Run queued operations in order; tensors that other ranks wait for leave early.

        A send may overtake operations that do not compute what it sends. It overtakes no other
        message, so all ranks keep one order of messages.

        Raises:
            PlacementError: an operation changed a tensor in place that had left already.
        """
        if not self._ahead:
            return
        tasks = list(self._ahead)
        num_sent = 0
        self._ahead.clear()
        sent_early: dict[int, list[tuple[Tensor, int]]] = {}
        for i, task in enumerate(tasks):
            while num_sent < len(tasks) and (num_sent < i or self._may_leave(tasks[num_sent])):
                if num_sent >= i:
                    sent_early[num_sent] = self._send_for(tasks[num_sent])
                num_sent += 1
            for x, version in sent_early.pop(i, ()):
                if x._version != version:
                    raise PlacementError(
                        f"{task} reads a tensor that an earlier operation changed in place after "
                        "it had been sent to another rank; call that operation outside of "
                        "F.ahead()"
                    )
            with torch.set_grad_enabled(task.grads):
                self._run(task, sends=num_sent <= i)

    def _sources(self, task: PlacedTask) -> list[tuple[int, int, list[int]]]:
        """Return (from, to, indices of the values) of each message that the operation needs."""
        ranks = task.output.place.ranks
        return [
            (start, end, indices)
            for source, indices in _by_source(task.values, ranks)
            for start, end in forward_routes(source, ranks)
        ]

    def _may_leave(self, task: PlacedTask) -> bool:
        """Return whether this rank only sends for the operation, and has what it sends."""
        routes = [route for route in self._sources(task) if self.rank in route[:2]]
        return all(
            start == self.rank and not any(task.values[i].pending for i in indices)
            for start, _, indices in routes
        )

    def _send_for(self, task: PlacedTask) -> list[tuple[Tensor, int]]:
        """Send what the operation reads from here; returns the tensors with their versions."""
        sent = list[tuple[Tensor, int]]()
        for start, end, indices in self._sources(task):
            if start == self.rank:
                values = [task.values[i] for i in indices]
                self._send(task.output.number, values, end, task.grads)
                tensors = [x for value in values if value.content for x in value.content.tensors]
                sent += [(x, x._version) for x in tensors]
        return sent

    def _run(self, task: PlacedTask, *, sends: bool) -> None:
        """Run an operation. sends: what it reads from here has not left yet."""
        values = task.values
        output = task.output
        grads = task.grads
        place = output.place
        number = output.number
        operation = str(task)
        parents = join_frontiers(value.frontier for value in values) if grads else ()
        step = StepRecord(number, parents)
        inputs: dict[int, tuple[Any, list[StepInput]]] = {}
        for i, value in enumerate(values if self.is_on(place) else ()):
            if value.content is not None:
                inputs[i] = self._local(value.content, operation, grads)
        for start, end, indices in self._sources(task):
            if start == self.rank and sends:
                self._send(number, [values[i] for i in indices], end, grads)
            elif end == self.rank:
                inputs.update(zip(indices, self._receive(number, start, place), strict=True))
        for source, indices in _by_source(values, place.ranks) if grads else ():
            for start, end in backward_routes(source, place.ranks):
                if start == self.rank:
                    step.add_return(end, [content for i in indices for content in inputs[i][1]])
                elif end == self.rank:
                    step.add_expected(start, [values[i].content for i in indices])
        if self.is_on(place):
            output.content = self._compute(task, step, [inputs[i] for i in range(len(values))])
        output.frontier = (step,) if step.matters else parents
        output.pending = False

    def _compute(
        self, task: PlacedTask, step: StepRecord, inputs: list[tuple[Any, list[StepInput]]]
    ) -> Content:
        """Call the function with its inputs on this rank."""
        device = task.output.place.device
        step.inputs = [
            step_input
            for _, step_inputs in inputs
            for step_input in step_inputs
            if step_input.meta.requires_grad
        ]
        arguments = [
            fill(skeleton, [x.cut.to(device) for x in step_inputs])
            for skeleton, step_inputs in inputs
        ]
        args, kwargs = fill(task.arguments, arguments)
        with own_draws(step.number, device):
            result = task.function(*args, **kwargs)
        del arguments, args, kwargs
        for _, step_inputs in inputs:
            for step_input in step_inputs:
                step_input.finish(str(task))
        tensors, skeleton = flatten(result, _is_tensor)
        return Content(skeleton, tensors, [step.add_output(x) for x in tensors])

    def backward(self, root: PlacedValue, gradient: Any, retain_graph: bool) -> None:
        """Add the gradients of `root` to all leaves and parameters it depends on, on their ranks.

        gradient: of the root's shape, on ranks of its place; None for a single element.
        """
        self.flush()
        self.begin("backward", root.place, [root.number])
        gathered = GatheredGrads()
        if root.content is not None:
            gathered.add(*_root_gradient(root.content, gradient))
        for step in in_order_of_need(steps_before(root.frontier)):
            step.backward(gathered, self.mail, retain_graph)
        gathered.accumulate()

    def everywhere(self, value: PlacedValue, label: str) -> Any:
        """Return the value, without its graph, on every rank; waits for it."""
        self.flush()
        number = self.begin(label, value.place, [value.number])
        content = value.content
        others = tuple(rank for rank in self.ranks if rank not in value.place.ranks)
        if content is not None:
            content = content.detached()
            for rank in others if self.rank == value.place.rank else ():
                assert self.mail is not None
                text = to_text(content.skeleton)
                self.mail.send(number, text, content.tensors, [False] * len(content.tensors), rank)
            return content.value()
        assert self.mail is not None
        delivery = self.mail.receive(number, value.place.rank)
        return fill(delivery.skeleton, delivery.tensors)

    def tell(self, place: Place, label: str, text: str | None) -> str:
        """Return on every rank a text that the ranks of `place` have."""
        content = None if text is None else Content(text, [], [])
        return self.everywhere(PlacedValue(place, 0, content, ()), label)

    def finish(self) -> None:
        """Wait until all messages of this rank have left; all ranks call it when they are done."""
        self.flush()
        self.begin("the end of the program", None)
        if self.mail is not None:
            self.mail.settle()

    def _send(self, number: int, values: list[PlacedValue], rank: int, grads: bool) -> None:
        assert self.mail is not None
        contents = [value.content for value in values if value.content is not None]
        refuse_changed((t for content in contents for t in content.targets), f"operation {number}")
        tensors = list[Tensor]()
        skeletons = list[Any]()
        for content in contents:
            begin = len(tensors)
            skeletons.append(
                fill(content.skeleton, [Hole(begin + i) for i in range(len(content.tensors))])
            )
            tensors += content.tensors
        wants = [grads and t is not None for content in contents for t in content.targets]
        self.mail.send(number, to_text(skeletons), tensors, wants, rank)

    def _receive(self, number: int, source: int, place: Place) -> list[tuple[Any, list[StepInput]]]:
        """Return (skeleton, its tensors) of each value that comes from rank `source`."""
        assert self.mail is not None
        delivery = self.mail.receive(number, source)
        inputs = [
            StepInput(x.to(place.device), wants, None, self._anchor)
            for x, wants in zip(delivery.tensors, delivery.wants, strict=True)
        ]
        values = list[tuple[Any, list[StepInput]]]()
        for skeleton in delivery.skeleton:
            used = holes(skeleton)
            renumbered = fill(skeleton, {old: Hole(new) for new, old in enumerate(used)})
            values.append((renumbered, [inputs[i] for i in used]))
        return values

    def _local(self, content: Content, operation: str, grads: bool) -> tuple[Any, list[StepInput]]:
        refuse_changed(content.targets, operation)
        inputs = [
            StepInput(x, grads and t is not None, t, self._anchor)
            for x, t in zip(content.tensors, content.targets, strict=True)
        ]
        return content.skeleton, inputs


def _by_source(values: Sequence[PlacedValue], ranks: Ranks) -> list[tuple[Ranks, list[int]]]:
    """Return (ranks, indices of the values from there), in the order of the values."""
    indices_of: dict[Ranks, list[int]] = {}
    for i, value in enumerate(values):
        if value.place.ranks != ranks:
            indices_of.setdefault(value.place.ranks, []).append(i)
    return list(indices_of.items())


def _root_gradient(content: Content, gradient: Tensor | None) -> tuple[GradTarget, Tensor]:
    if not isinstance(content.skeleton, Hole):
        raise PlacementError(
            "backward begins at one tensor, but this is an output of several parts; call it on one"
        )
    (x,), (target,) = content.tensors, content.targets
    if target is None:
        raise RuntimeError(
            "this tensor does not require grad and has no backward; call backward() on one that "
            "does"
        )
    if gradient is None:
        if x.numel() != 1:
            raise RuntimeError(
                f"backward of a tensor of shape {tuple(x.shape)} needs a gradient of that shape; "
                f"without one the tensor must be a single number"
            )
        return target, torch.ones_like(x)
    if gradient.shape != x.shape:
        raise RuntimeError(
            f"the gradient has shape {tuple(gradient.shape)}, but the tensor {tuple(x.shape)}; "
            "pass a gradient of the tensor's shape"
        )
    return target, gradient.detach().to(x.device, x.dtype)


def _is_tensor(x: object) -> bool:
    return isinstance(x, Tensor)


_programs: PerGroup[Program] = PerGroup()
_alone: list[Program] = []


def program_of(group: Group | None = None) -> Program:
    """Return the program of a group (default: the world); all of its ranks call it together."""
    if group is None and is_joined():
        group = world()
    if group is None:
        if not _alone:
            _alone.append(Program(None))
        return _alone[0]
    if group not in _programs:
        _programs[group] = Program(group)
    return _programs[group]


def finish_all() -> None:
    """Finish every program of this rank; all ranks call it at their end."""
    for program in [*_programs.values(), *_alone]:
        program.finish()

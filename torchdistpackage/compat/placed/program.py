"""The operations of a placed program, as one rank carries them out.

Every rank makes the same calls, so all number them alike. One rule: which messages an operation
means follows from its number and its places alone, so no rank asks another what comes next.
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
"""Set to 1: compare the operations of all ranks, each before it is carried out."""


class PlacedValue:
    """An output, as this rank knows it. content: None on ranks that are not of its place.

    pending: its operation is still to run.
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
        self.place, self.number, self.content, self.frontier = place, number, content, frontier
        self.pending = pending

    def but(self, content: Content | None, frontier: Frontier | None = None) -> PlacedValue:
        """The same with another content."""
        kept = self.frontier if frontier is None else frontier
        return PlacedValue(self.place, self.number, content, kept)


class PlacedTask(NamedTuple):
    """An operation that was called. grads: whether autograd was on then."""

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
        """A number for what all ranks do next."""
        self._number += 1
        return self._number

    def begin(self, what: str, place: Place | None, reads: Sequence[int] = ()) -> int:
        """The number of an operation; in the debug mode all ranks compare what it is.

        Raises:
            PlacementError: on all ranks: one is about to call another.
        """
        number = self.get_next()
        if self.debug and self._check is not None:
            self._check.compare(number, what, place, reads)
        return number

    def is_on(self, place: Place) -> bool:
        """Whether this rank is one of the place's."""
        return self.rank in place.ranks

    def leaf(self, x: Tensor, place: Place) -> PlacedValue:
        """A tensor of the user's on its place."""
        number = self.begin("a tensor", place)
        if not self.is_on(place):
            return PlacedValue(place, number, None, ())
        moved = x.to(place.device)
        if moved is not x and moved.requires_grad and not moved.is_leaf:
            moved.retain_grad()  # the gradient is for both
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
        """Run `function(*args, **kwargs)` where it is placed.

        arguments: skeleton of (args, kwargs), in which values have their places. On other ranks
        this only sends what the function reads, and returns.
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
        """Inside, operations are only noted; `flush` runs them, and so does the end."""
        outer = self._ahead
        self._ahead = [] if outer is None else outer
        try:
            yield
            self.flush()
        finally:
            self._ahead = outer

    def flush(self) -> None:
        """Run what was noted, in its order; what other ranks wait for leaves as soon as it can.

        A send may pass operations whose output it is not. It passes no other message, so all ranks
        keep one order.

        Raises:
            PlacementError: an operation changed in place what had left already.
        """
        if not self._ahead:
            return
        tasks, num_sent = list(self._ahead), 0
        self._ahead.clear()
        left: dict[int, list[tuple[Tensor, int]]] = {}
        for i, task in enumerate(tasks):
            while num_sent < len(tasks) and (num_sent < i or self._may_leave(tasks[num_sent])):
                if num_sent >= i:
                    left[num_sent] = self._send_for(tasks[num_sent])
                num_sent += 1
            for x, version in left.pop(i, ()):
                if x._version != version:
                    raise PlacementError(
                        f"{task} reads a tensor that an operation before it has changed in place; "
                        f"it had left for another rank before that: call the latter outside of "
                        f"F.ahead()"
                    )
            with torch.set_grad_enabled(task.grads):
                self._run(task, sends=num_sent <= i)

    def _sources(self, task: PlacedTask) -> list[tuple[int, int, list[int]]]:
        """(from, to, indices of the values) of each message that the operation needs."""
        ranks = task.output.place.ranks
        return [
            (start, end, indices)
            for source, indices in _by_source(task.values, ranks)
            for start, end in forward_routes(source, ranks)
        ]

    def _may_leave(self, task: PlacedTask) -> bool:
        """Whether this rank only sends for it, and has what it sends."""
        mine = [route for route in self._sources(task) if self.rank in route[:2]]
        return all(
            start == self.rank and not any(task.values[i].pending for i in indices)
            for start, _, indices in mine
        )

    def _send_for(self, task: PlacedTask) -> list[tuple[Tensor, int]]:
        """Send what the operation reads from here; the tensors, each with its version."""
        sent = list[tuple[Tensor, int]]()
        for start, end, indices in self._sources(task):
            if start == self.rank:
                values = [task.values[i] for i in indices]
                self._send(task.output.number, values, end, task.grads)
                tensors = [x for value in values if value.content for x in value.content.tensors]
                sent += [(x, x._version) for x in tensors]
        return sent

    def _run(self, task: PlacedTask, *, sends: bool) -> None:
        """Carry out an operation. sends: what it reads from here has not left yet."""
        values, output, grads, place = task.values, task.output, task.grads, task.output.place
        number, operation = output.number, str(task)
        before = join_frontiers(value.frontier for value in values) if grads else ()
        step = StepRecord(number, before)
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
                    step.add_return(end, [one for i in indices for one in inputs[i][1]])
                elif end == self.rank:
                    step.add_expected(start, [values[i].content for i in indices])
        if self.is_on(place):
            output.content = self._compute(task, step, [inputs[i] for i in range(len(values))])
        output.frontier = (step,) if step.matters else before
        output.pending = False

    def _compute(
        self, task: PlacedTask, step: StepRecord, inputs: list[tuple[Any, list[StepInput]]]
    ) -> Content:
        """Call the function with its inputs, here."""
        device = task.output.place.device
        step.inputs = [one for _, made in inputs for one in made if one.meta.requires_grad]
        read = [fill(skeleton, [x.cut.to(device) for x in made]) for skeleton, made in inputs]
        args, kwargs = fill(task.arguments, read)
        with own_draws(step.number, device):
            found = task.function(*args, **kwargs)
        del read, args, kwargs
        for _, made in inputs:
            for one in made:
                one.finish(str(task))
        tensors, skeleton = flatten(found, _is_tensor)
        return Content(skeleton, tensors, [step.add_output(x) for x in tensors])

    def backward(self, root: PlacedValue, gradient: Any, retain_graph: bool) -> None:
        """Add the gradients of `root` to all leaves and parameters it was made of, on their ranks.

        gradient: of the root's shape, on ranks of its place; None for a number.
        """
        self.flush()
        self.begin("backward", root.place, [root.number])
        gathered = GatheredGrads()
        if root.content is not None:
            gathered.add(*_root_gradient(root.content, gradient))
        for step in in_order_of_need(steps_before(root.frontier)):
            step.backward(gathered, self.mail, retain_graph)
        gathered.accumulate()

    def everywhere(self, value: PlacedValue, what: str) -> Any:
        """The value, without its graph, on every rank; waits for it."""
        self.flush()
        number = self.begin(what, value.place, [value.number])
        found = value.content
        others = tuple(rank for rank in self.ranks if rank not in value.place.ranks)
        if found is not None:
            found = found.detached()
            for rank in others if self.rank == value.place.rank else ():
                assert self.mail is not None
                text = to_text(found.skeleton)
                self.mail.send(number, text, found.tensors, [False] * len(found.tensors), rank)
            return found.value()
        assert self.mail is not None
        delivery = self.mail.receive(number, value.place.rank)
        return fill(delivery.skeleton, delivery.tensors)

    def tell(self, place: Place, what: str, text: str | None) -> str:
        """A text that the ranks of `place` know, on every rank."""
        content = None if text is None else Content(text, [], [])
        return self.everywhere(PlacedValue(place, 0, content, ()), what)

    def finish(self) -> None:
        """Wait until all that this rank sent has left; all ranks call it when they are done."""
        self.flush()
        self.begin("the end of the program", None)
        if self.mail is not None:
            self.mail.settle()

    def _send(self, number: int, values: list[PlacedValue], rank: int, grads: bool) -> None:
        assert self.mail is not None
        contents = [value.content for value in values if value.content is not None]
        refuse_changed((t for one in contents for t in one.targets), f"operation {number}")
        tensors, skeletons = list[Tensor](), list[Any]()
        for one in contents:
            begin = len(tensors)
            skeletons.append(fill(one.skeleton, [Hole(begin + i) for i in range(len(one.tensors))]))
            tensors += one.tensors
        wants = [grads and t is not None for one in contents for t in one.targets]
        self.mail.send(number, to_text(skeletons), tensors, wants, rank)

    def _receive(self, number: int, source: int, place: Place) -> list[tuple[Any, list[StepInput]]]:
        """(skeleton, its tensors) of each value that comes from rank `source`."""
        assert self.mail is not None
        delivery = self.mail.receive(number, source)
        made = [
            StepInput(x.to(place.device), wants, None, self._anchor)
            for x, wants in zip(delivery.tensors, delivery.wants, strict=True)
        ]
        values = list[tuple[Any, list[StepInput]]]()
        for skeleton in delivery.skeleton:
            used = holes(skeleton)
            renumbered = fill(skeleton, {old: Hole(new) for new, old in enumerate(used)})
            values.append((renumbered, [made[i] for i in used]))
        return values

    def _local(self, content: Content, operation: str, grads: bool) -> tuple[Any, list[StepInput]]:
        refuse_changed(content.targets, operation)
        made = [
            StepInput(x, grads and t is not None, t, self._anchor)
            for x, t in zip(content.tensors, content.targets, strict=True)
        ]
        return content.skeleton, made


def _by_source(values: Sequence[PlacedValue], ranks: Ranks) -> list[tuple[Ranks, list[int]]]:
    """(ranks, indices of the values that come from there), in the order of the values."""
    found: dict[Ranks, list[int]] = {}
    for i, value in enumerate(values):
        if value.place.ranks != ranks:
            found.setdefault(value.place.ranks, []).append(i)
    return list(found.items())


def _root_gradient(content: Content, gradient: Tensor | None) -> tuple[GradTarget, Tensor]:
    if not isinstance(content.skeleton, Hole):
        raise PlacementError(
            "backward begins at one tensor, but this is an output of several parts; call it on one"
        )
    (x,), (target,) = content.tensors, content.targets
    if target is None:
        raise RuntimeError("this tensor does not require grad and has no backward")
    if gradient is None:
        if x.numel() != 1:
            raise RuntimeError(
                f"backward of a tensor of shape {tuple(x.shape)} needs a gradient of that shape; "
                f"without one the tensor must be a single number"
            )
        return target, torch.ones_like(x)
    if gradient.shape != x.shape:
        raise RuntimeError(
            f"the gradient has shape {tuple(gradient.shape)}, but the tensor {tuple(x.shape)}"
        )
    return target, gradient.detach().to(x.device, x.dtype)


def _is_tensor(x: object) -> bool:
    return isinstance(x, Tensor)


_programs: PerGroup[Program] = PerGroup()
_alone: list[Program] = []


def program_of(group: Group | None = None) -> Program:
    """The one of the group (default: the world), which all of its ranks ask for together."""
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
    """Finish every program that this rank has part in; all ranks call it at their end."""
    for program in [*_programs.values(), *_alone]:
        program.finish()

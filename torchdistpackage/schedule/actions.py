"""Actions of a pipeline rank, as small values that print as in papers.

`2F0` is stage 2, forward, micro-batch 0; `2SEND_F0` sends that forward's output to the next stage.
A `Batch` is a set of messages posted together. A program is a tuple of such steps for one pipe
index, and a schedule has one program for each index. A schedule prints as text that `parse` reads
back.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from torchdistpackage.errors import ScheduleError


class ActionKind(StrEnum):
    """Kinds of actions: F, B, I and W compute; the others send or receive outputs and gradients.

    A schedule may split the backward B in two. I computes the gradient of the stage's input, which
    the previous stage waits for. W computes the gradients of its weights, which no rank waits for.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the name that papers and torch use
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    @property
    def is_message(self) -> bool:
        return self not in _COMPUTES

    @property
    def gives_gradient(self) -> bool:
        """True if it computes the gradient of the stage's input."""
        return self in (ActionKind.B, ActionKind.I)

    @property
    def is_send(self) -> bool:
        return self in (ActionKind.SEND_F, ActionKind.SEND_B)


_COMPUTES = frozenset({ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W})


class Action(NamedTuple):
    """An action of one stage for one micro-batch; a tuple, because schedules hold thousands."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def peer(self) -> int:
        """The stage at the other end of a message."""
        return self.stage + (1 if self.kind in (ActionKind.SEND_F, ActionKind.RECV_B) else -1)

    @property
    def send(self) -> "Action | None":
        """The message that sends this computation's result; None for a W or a message."""
        kind = _SENDS.get(self.kind)
        return None if kind is None else Action(self.stage, kind, self.microbatch)

    @property
    def match(self) -> "Action":
        """The peer's action for this message: the receive of a send, and the send of a receive."""
        return Action(self.peer, _MATCH[self.kind], self.microbatch)

    @property
    def result(self) -> "Action":
        """The action whose result others use: B for an I, which give the same gradient."""
        return self._replace(kind=ActionKind.B) if self.kind is ActionKind.I else self


_SENDS: dict[ActionKind, ActionKind] = {
    **dict.fromkeys((ActionKind.B, ActionKind.I), ActionKind.SEND_B),
    ActionKind.F: ActionKind.SEND_F,
}
_PAIRS = ((ActionKind.SEND_F, ActionKind.RECV_F), (ActionKind.SEND_B, ActionKind.RECV_B))
_MATCH = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages of one rank that are posted together, so that none waits for another."""

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.actions))


Step = Action | Batch
Program = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The program of every pipe index, for one step.

    num_stages: number of consecutive pieces of the model; more than programs if a pipe index has
        several stages (*chunks*).
    placement: for each stage the pipe index that runs it.
    """

    name: str
    num_stages: int
    num_microbatches: int
    placement: tuple[int, ...]
    programs: tuple[Program, ...]

    def __str__(self) -> str:
        lines = [f"{i}: {' '.join(map(str, program))}" for i, program in enumerate(self.programs)]
        head = f"{self.name} stages={self.num_stages} microbatches={self.num_microbatches}"
        return "\n".join([f"{head} placement={','.join(map(str, self.placement))}", *lines])

    @property
    def has_backward(self) -> bool:
        return any(a.kind.gives_gradient for program in self.programs for a in flatten(program))

    def stages_of(self, index: int) -> tuple[int, ...]:
        """Return the stages that pipe index `index` runs, ascending."""
        return tuple(s for s, rank in enumerate(self.placement) if rank == index)


def flatten(program: Iterable[Step]) -> Iterable[Action]:
    """Yield the actions of a program in order, with batches opened."""
    for step in program:
        yield from step.actions if isinstance(step, Batch) else (step,)


_ACTION = re.compile(r"(\d{1,18})(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d{1,18})")
_HEAD = re.compile(r"(\S+) stages=(\d+) microbatches=(\d+) placement=([\d,]*)")


def parse_action(text: str) -> Action:
    """Parse the text of an action; raise ScheduleError if it is none."""
    match = _ACTION.fullmatch(text)
    if not match:
        raise ScheduleError(
            f"{text[:40]!r} is not an action; write stage, kind, microbatch, such as 2F0 or "
            f"1SEND_B3 (kinds: {', '.join(ActionKind)})"
        )
    return Action(int(match[1]), ActionKind(match[2]), int(match[3]))


def parse(text: str) -> Schedule:
    """Parse the text of a schedule; raise ScheduleError that names the first bad line."""
    head, *lines = text.strip().splitlines() or [""]
    match = _HEAD.fullmatch(head)
    if not match:
        raise ScheduleError(
            f"{head!r} is not the header of a schedule, which has the form {_HEAD.pattern}"
        )
    programs: list[Program] = []
    for line in lines:
        steps = [
            tuple(map(parse_action, step.split("+"))) for step in line.split(":", 1)[-1].split()
        ]
        programs.append(tuple(s[0] if len(s) == 1 else Batch(s) for s in steps))
    placement = tuple(int(i) for i in match[4].split(",") if i)
    return Schedule(match[1], int(match[2]), int(match[3]), placement, tuple(programs))

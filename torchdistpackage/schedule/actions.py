"""What a pipeline rank does, as tiny values that print as papers write them.

`2F0` is stage 2, forward, microbatch 0; `2SEND_F0` sends that forward's output on. A
`Batch` is a set of messages posted together. A program is a tuple of such steps for one pipe
index, a schedule one program for each; both print and parse back.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from torchdistpackage.errors import ScheduleError


class ActionKind(StrEnum):
    """F, B, I and W compute; the others move the output of an F on, or a gradient back.

    B is the whole backward. A schedule may split it: I gives the gradient of the stage's input,
    which the stage before waits for, W those of its weights, for which no rank waits.
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
        """Whether the gradient of the stage's input is there after it."""
        return self in (ActionKind.B, ActionKind.I)

    @property
    def is_send(self) -> bool:
        return self in (ActionKind.SEND_F, ActionKind.SEND_B)


_COMPUTES = frozenset({ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W})


class Action(NamedTuple):
    """One thing that one stage does for one microbatch.

    A named tuple, as schedules hold thousands, and tuples are made, compared and hashed in C.
    """

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
        """The message that hands on what this computation gives; None of a W or of a message."""
        kind = _SENDS.get(self.kind)
        return None if kind is None else Action(self.stage, kind, self.microbatch)

    @property
    def match(self) -> "Action":
        """The action of the peer that this message meets: a send's receive, and back."""
        return Action(self.peer, _MATCH[self.kind], self.microbatch)


_SENDS = {
    ActionKind.F: ActionKind.SEND_F,
    ActionKind.B: ActionKind.SEND_B,
    ActionKind.I: ActionKind.SEND_B,
}
_MATCH = {
    ActionKind.SEND_F: ActionKind.RECV_F,
    ActionKind.RECV_F: ActionKind.SEND_F,
    ActionKind.SEND_B: ActionKind.RECV_B,
    ActionKind.RECV_B: ActionKind.SEND_B,
}


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages of one rank that are posted together, so none waits for another."""

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.actions))


Step = Action | Batch
Program = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who computes what when: one program for each pipe index.

    num_stages: pieces of the model in order; more than there are programs where a pipe index
        has several (*chunks*).
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
        """The stages that pipe index `index` runs, ascending."""
        return tuple(s for s, place in enumerate(self.placement) if place == index)


def flatten(program: Iterable[Step]) -> Iterable[Action]:
    """The actions of a program in order, batches opened."""
    for step in program:
        yield from step.actions if isinstance(step, Batch) else (step,)


_ACTION = re.compile(r"(\d{1,18})(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d{1,18})")
_HEAD = re.compile(r"(\S+) stages=(\d+) microbatches=(\d+) placement=([\d,]*)")


def parse_action(text: str) -> Action:
    """Read what `str(action)` wrote.

    Raises:
        ScheduleError: the text is no action.
    """
    found = _ACTION.fullmatch(text)
    if not found:
        raise ScheduleError(
            f"{text[:40]!r} is not an action; write stage, kind, microbatch, such as 2F0 or "
            f"1SEND_B3 (kinds: {', '.join(ActionKind)})"
        )
    return Action(int(found[1]), ActionKind(found[2]), int(found[3]))


def parse(text: str) -> Schedule:
    """Read what `str(schedule)` wrote.

    Raises:
        ScheduleError: a line does not read; the text names it.
    """
    head, *lines = text.strip().splitlines() or [""]
    found = _HEAD.fullmatch(head)
    if not found:
        raise ScheduleError(f"{head!r} is no schedule header; it reads {_HEAD.pattern}")
    programs: list[Program] = []
    for line in lines:
        steps = line.split(":", 1)[-1].split()
        programs.append(tuple(_parse_step(step) for step in steps))
    placement = tuple(int(i) for i in found[4].split(",") if i)
    return Schedule(found[1], int(found[2]), int(found[3]), placement, tuple(programs))


def _parse_step(text: str) -> Step:
    actions = tuple(parse_action(part) for part in text.split("+"))
    return actions[0] if len(actions) == 1 else Batch(actions)

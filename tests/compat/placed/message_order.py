"""The messages of a placed program on paper, in the order that compat/placed/routes.py states.

`play` lets ranks go through their own ones, where every send waits for its receive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torchdistpackage.compat.placed.routes import Ranks, backward_routes, forward_routes
from torchdistpackage.errors import ScheduleError


class PlacedMessage(NamedTuple):
    """kind: F or B (a gradient). operation: its number; k: which of its sources."""

    kind: Literal["F", "B"]
    operation: int
    k: int
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.kind}{self.operation}.{self.k} from {self.start} to {self.end}"


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """An operation: where it runs and what it reads.

    sources: for each other place that it reads from, the ranks there and whether any of the tensors
    wants a gradient. parents: numbers of the operations whose outputs it reads.
    """

    number: int
    ranks: Ranks
    sources: tuple[tuple[Ranks, bool], ...]
    parents: tuple[int, ...]


def forward_order(calls: Iterable[PlacedCall]) -> list[PlacedMessage]:
    """All messages of these operations, in the order in which they are posted."""
    return [
        PlacedMessage("F", call.number, k, start, end)
        for call in calls
        for k, (source, _) in enumerate(call.sources)
        for start, end in forward_routes(source, call.ranks)
    ]


def backward_order(calls: Sequence[PlacedCall], root: int) -> list[PlacedMessage]:
    """The gradients that travel in a backward from the output of operation `root`."""
    by_number = {call.number: call for call in calls}
    reached, todo = {root}, [root]
    while todo:
        for parent in by_number[todo.pop()].parents:
            if parent in by_number and parent not in reached:
                reached.add(parent)
                todo.append(parent)
    return [
        PlacedMessage("B", number, k, start, end)
        for number in sorted(reached, reverse=True)
        for k, (source, wants) in enumerate(by_number[number].sources)
        if wants
        for start, end in backward_routes(source, by_number[number].ranks)
    ]


def play(messages: dict[int, Sequence[PlacedMessage]]) -> list[PlacedMessage]:
    """Let each rank go through its own messages, where every send waits for its receive.

    messages: of each rank, in its order. Returns all in the order in which they went.

    Raises:
        ScheduleError: no rank can go on; the text lists what each one waits for.
    """
    at = dict.fromkeys(messages, 0)
    done: list[PlacedMessage] = []
    while True:
        heads = {r: messages[r][i] for r, i in at.items() if i < len(messages[r])}
        if not heads:
            return done
        met = [m for r, m in heads.items() if r == m.start and heads.get(m.end) == m]
        if not met:
            waits = ", ".join(f"rank {r}: {m}" for r, m in sorted(heads.items()))
            raise ScheduleError(
                f"placed program: no rank can go on after {len(done)} messages; {waits}; all "
                f"ranks must call the same operations in the same order"
            )
        for message in met:
            at[message.start] += 1
            at[message.end] += 1
        done += met

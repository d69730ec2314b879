"""What a call leaves behind: its handle, and its place in what each rank did.

One rule: whoever waits for a handle lets other ranks run until the call is done, and everything
that is issued or waited for is written down, in order, for the check that comes after
(replay.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

from torch import Tensor

from torchdistpackage.harness.lint.matcher import (
    START,
    LintGroup,
    OpSignature,
    P2POp,
    PendingOp,
    Where,
)
from torchdistpackage.harness.lint.own_backend import OwnWork
from torchdistpackage.harness.lint.stacks import stack_here
from torchdistpackage.harness.lint.threads import Threads


@dataclass
class LintContext:
    """What the groups of one lint share.

    world: where all ranks meet to split it. queued: whether it stands for NCCL.
    label: for the ranks of a group what people call it. made: for torch's name and the ranks of a
    group where its members meet to make it, and where afterwards.
    """

    threads: Threads
    world: LintGroup
    queued: bool
    label: Callable[[tuple[int, ...]], str]
    made: dict[tuple[str, tuple[int, ...]], tuple[LintGroup, LintGroup]] = field(
        default_factory=dict
    )
    calls: list[list[tuple[LintGroup, OpSignature, int | None]]] = field(default_factory=list)
    """Each rank's calls in order: group, call, and for a message its peer."""
    traces: list[list[tuple[PendingOp, bool]]] = field(default_factory=list)
    """The same for replay.py."""
    setup: list[list[tuple[PendingOp, bool]]] | None = None
    """What the ranks did before the step, once all of them are there."""
    stacks: dict[Where, Where] = field(default_factory=dict)
    """One of each, for a step makes most of its calls in few places."""

    def note(self, entry: PendingOp, *, waits: bool = False) -> None:
        self.traces[entry.rank].append((entry, waits))

    def start(self, rank: int) -> None:
        """All ranks have their groups: what comes now is the step, and is counted from 1."""
        entry = PendingOp(rank, self.world, START)
        self.threads.act(rank, partial(self.threads.board.issue, entry))
        self.threads.wait(rank, entry)
        if self.setup is None:
            self.setup, self.traces = self.traces, [[] for _ in self.traces]
            self.calls = [[] for _ in self.calls]
            for _, group in self.made.values():
                group.count_anew()

    def stop(self, entry: PendingOp) -> None:
        """Issue a call that holds the rank up until it is done."""
        self.threads.act(entry.rank, partial(self.threads.board.issue, entry))
        self.note(entry)
        self.threads.wait(entry.rank, entry)
        self.note(entry, waits=True)

    def stack(self) -> tuple[Where, object]:
        where, batch = stack_here()
        return self.stacks.setdefault(where, where), batch


class ThreadWork(OwnWork):
    """Handle of a call: `wait` lets other ranks run until it is done."""

    def __init__(
        self,
        wire: LintContext,
        entry: PendingOp,
        result: list[Tensor],
        message: P2POp | None = None,
    ):
        super().__init__(result)
        self._wire, self._entry, self._message = wire, entry, message

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._wire.threads.wait(self._entry.rank, self._entry)
        self._wire.note(self._entry, waits=True)
        return True

    def is_completed(self) -> bool:
        if not self._entry.done:
            self._wire.threads.pause(self._entry.rank)
        if self._entry.done:
            self._wire.note(self._entry, waits=True)
        return self._entry.done

    def is_success(self) -> bool:
        return self._entry.done

    def _source_rank(self) -> int:
        source = None if self._message is None else self._message.source
        return -1 if source is None else self._entry.group.ranks.index(source)

    source_rank = _source_rank

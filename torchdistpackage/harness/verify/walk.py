"""One rank's way through all checks, in a thread that may get stuck in any of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchdistpackage.harness.coded import compare
from torchdistpackage.harness.comm_test_report import RankReport, StuckAt
from torchdistpackage.harness.guarded import GuardedThread, first_line
from torchdistpackage.harness.verify.checks import Check, GroupMember

_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class GroupClass:
    """Groups that are busy at the same time: those of some modes, which have the same ranks.

    which: what one of them is called. seat: this rank's part in it.
    steps: what this rank does in turn, as many as any other rank.
    """

    modes: tuple[str, ...]
    which: str
    seat: GroupMember
    num_groups: int
    steps: tuple[tuple[Check, GroupMember], ...]


@dataclass(frozen=True, slots=True)
class _CheckPosition:
    number: int
    what: str
    ranks: tuple[int, ...]
    since_s: float


class CheckRunner:
    """The steps of `kinds`, begun at once.

    is_alarmed: whether another rank has waited in vain; never waits itself.
    patience_s: for one step. settle_s: for a step under way when the alarm is heard.
    """

    def __init__(
        self,
        kinds: Sequence[GroupClass],
        is_alarmed: Callable[[], bool],
        *,
        patience_s: float,
        settle_s: float,
    ) -> None:
        self._kinds, self._is_alarmed = kinds, is_alarmed
        self._patience_s, self._settle_s = patience_s, settle_s
        self._host = socket.gethostname()
        self._wrong: list[str] = []
        self._times_s: list[float] = []
        self._place = _CheckPosition(0, "the start", (), time.monotonic())
        self._left_behind = False
        self._thread = GuardedThread(self._go, kinds[0].seat.group, "test_comm")

    def report(self) -> RankReport:
        """When all steps are done, or one has failed, or takes too long."""
        alarm_s: float | None = None
        while not self._thread.ended.wait(_LOOK_S):
            now_s = time.monotonic()
            if alarm_s is None and self._is_alarmed():
                alarm_s = now_s
            if now_s - self._place.since_s > self._patience_s:
                break
            if alarm_s is not None and now_s - alarm_s > self._settle_s:
                break
        self._left_behind = True
        stop, at = None, self._place
        failure = self._thread.failure
        if failure is not None or not self._thread.ended.is_set():
            stop = StuckAt(at.number, at.what, at.ranks, first_line(failure))
        return RankReport(tuple(self._wrong), stop, tuple(self._times_s))

    def _go(self) -> None:
        with torch.no_grad():
            for kind in self._kinds:
                self._through(kind)

    def _through(self, kind: GroupClass) -> None:
        begin_s = time.monotonic()
        for check, seat in kind.steps:
            if self._left_behind:
                return
            what = f"{check.name} over the {kind.which} of ranks {list(seat.ranks)}"
            self._place = _CheckPosition(self._place.number + 1, what, seat.ranks, time.monotonic())
            for got, expected, source in check.run(seat):
                if problem := compare(got, expected):
                    here = f"rank {seat.rank} on {self._host}"
                    self._wrong.append(f"{what}{source}: {here} {problem}")
        self._times_s.append(time.monotonic() - begin_s)

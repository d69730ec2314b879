"""When each computation of a run, and each wait for a message, began and ended."""

from collections.abc import Sequence

import torch

from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.moments import Moment, clock_of, seconds
from torchdistpackage.parallel.pipeline.program import BEGINS, Step
from torchdistpackage.schedule.actions import Action
from torchdistpackage.schedule.timeline import Span


class Recording:
    """Runs a program with a reading of the clock, on CUDA an event, before and after."""

    def __init__(self, device: torch.device):
        self._now = clock_of(device)
        self._began = self._now()
        self._marks: list[tuple[Action, Moment, Moment]] = []

    def run(self, program: Sequence[Step]) -> None:
        """All steps, in order."""
        now = self._now
        for do, m, action, what in program:
            recorder.action = action
            if what != BEGINS:
                since = now()
                do(m)
                self._marks.append((action, since, now()))
            else:
                do(m)

    def spans(self) -> list[Span]:
        """Seconds from the start of the run. On CUDA this waits for the end of it."""
        began = self._began
        return [
            Span(a, seconds(began, start), seconds(began, end)) for a, start, end in self._marks
        ]

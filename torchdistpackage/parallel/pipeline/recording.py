"""When each computation of a run, and each wait for a message, began and ended."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from torchdistpackage.comm.record import calls
from torchdistpackage.parallel.pipeline.clock import mark
from torchdistpackage.parallel.pipeline.steps import BEGINS, Step
from torchdistpackage.schedule.actions import Action
from torchdistpackage.schedule.simulate import Span


class Recording:
    """Runs a program with a reading of the clock, on CUDA an event, before and after."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._began = mark() if self._cuda else time.perf_counter()
        self._marks: list[tuple[Action, Any, Any]] = []

    def run(self, program: Sequence[Step]) -> None:
        """All steps, in order."""
        now = mark if self._cuda else time.perf_counter
        for do, m, action, what in program:
            calls.action = action
            if what != BEGINS:
                since = now()
                do(m)
                self._marks.append((action, since, now()))
            else:
                do(m)

    def spans(self) -> list[Span]:
        """Seconds from the start of the run. On CUDA this waits for the end of it."""
        if not self._cuda:
            return [
                Span(a, start - self._began, end - self._began) for a, start, end in self._marks
            ]
        torch.cuda.current_stream().synchronize()
        since = self._began.elapsed_time
        return [Span(a, since(start) / 1000, since(end) / 1000) for a, start, end in self._marks]

"""`train.profile`: what every rank does in some steps, gathered into one trace in the run folder.

A rank records clock readings, and on CUDA events: the actions of its schedule, its phases, and the
calls of its groups from their issue until the host no longer waits for them. Other steps pay
nothing. A barrier before the first of the steps aligns the hosts' clocks, so slices of two hosts
may be off by the duration of a barrier; those of one host are exact.
"""

import platform
import time
from bisect import bisect_right
from typing import cast

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.flight_recorder import ACTION as CALL_ACTION
from torchdistpackage.comm.flight_recorder import (
    BEGAN_S,
    DTYPE,
    GROUP,
    OPERATION,
    PEER,
    SHAPE,
    Call,
    dtype_name,
    recorder,
)
from torchdistpackage.comm.moments import Moment, clock_of, seconds
from torchdistpackage.parallel.pipeline.executor import Recording
from torchdistpackage.schedule.engine import Span
from torchdistpackage.train.loop import Callback, Loop
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.step_stats import PendingStep, StepResult
from torchdistpackage.train.trace_file import TRACE, CallSlice, RankTrace, write_trace


class StepTrace(Callback):
    """Records `steps` of a run whose next step is `next_step`; rank 0 writes trace.json."""

    def __init__(self, trainer: Trainer, steps: range, next_step: int):
        self._trainer, self._steps = trainer, steps
        self._held: list[tuple[int, list[Recording]]] = []
        self._phases: list[tuple[str, float]] = []
        self._calls: list[tuple[Call, float, float]] = []
        self._base: tuple[Moment, float] = (0.0, 0.0)
        self._is_on = False
        self._took: list[tuple[int, float, float]] = []
        if next_step in steps:
            self._begin()

    def records(self, step: int) -> bool:
        return step in self._steps

    def on_issued(self, loop: Loop, step: int) -> None:
        if self._is_on:
            self._held.append((step, self._trainer.recordings))
            self._took.append((step, self._trainer.phases.began_s, time.monotonic()))
            if step == self._steps[-1]:
                self._stop()
        elif step + 1 == self._steps[0]:
            with loop.heartbeat.allow_slow():
                self._begin()

    def on_step(self, loop: Loop, result: StepResult, issued: PendingStep) -> None:
        if result.step == self._steps[-1] and self._held:
            self._write(loop)

    def on_end(self, loop: Loop) -> None:
        """Write the recording if the run ends during the traced steps."""
        if self._held:
            self._stop()
            self._write(loop)

    def _begin(self) -> None:
        device = self._trainer.device
        if device.type == "cuda":
            # kernels of the step before must not run into the first traced one
            torch.cuda.synchronize(device)
        # all ranks leave it at about one moment, which is time 0 of all of them
        primitives.barrier()
        self._base = clock_of(device)(), time.monotonic()
        self._is_on = True
        self._trainer.phases.changes, recorder.ended = self._phases, self._calls

    def _stop(self) -> None:
        self._is_on = False
        self._trainer.phases.changes = recorder.ended = None

    def _write(self, loop: Loop) -> None:
        """Collect the traces of all ranks, and write them on rank 0. All ranks call it."""
        local_trace = self._mine()
        self._held, self._phases, self._calls = [], [], []
        with loop.heartbeat.allow_slow():
            traces = primitives.collect_objects(local_trace)
        if traces is not None:
            schedule = self._trainer.plan.schedule.name
            write_trace(
                loop.folder / TRACE, cast(list[RankTrace], traces), self._trainer.name, schedule
            )
            loop.artifacts += (TRACE,)

    def _mine(self) -> RankTrace:
        """Return the events that this rank recorded, in seconds of its host's clock."""
        mark, base_s = self._base
        spans = [
            [
                Span(action, began_s + start, began_s + end)
                for action, start, end in recording.spans()
            ]
            for _, recordings in self._held
            for recording in recordings
            for began_s in [base_s + seconds(mark, recording.began)]
        ]
        names, at = [name for name, _ in self._phases], [t for _, t in self._phases]
        begins = [begin_s for _, begin_s, _ in self._took]

        def in_step(at_s: float) -> bool:
            """Return whether a time is within a step, and not in a validation or a save between
            two.
            """
            number = bisect_right(begins, at_s)
            return number > 0 and at_s <= self._took[number - 1][2]

        phases = [
            (name, start, end)
            for name, start, end in zip(names, at, at[1:], strict=False)
            if name and in_step(start)
        ]
        coord = self._trainer.plan.topology.dense.coord(self._trainer.rank)
        calls = [_call_slice(*ended) for ended in self._calls if in_step(ended[0][BEGAN_S])]
        return RankTrace(
            self._trainer.rank, coord, platform.node(), base_s, self._took, spans, phases, calls
        )


def _call_slice(call: Call, end_s: float, waited_s: float) -> CallSlice:
    state, peer = call[GROUP], call[PEER]
    to = "" if peer is None else f" {'to' if call[OPERATION] == 'send' else 'from'} {peer}"
    shape = () if call[SHAPE] is None else tuple(call[SHAPE])
    dtype = "" if call[DTYPE] is None else dtype_name(call[DTYPE])
    action = "" if call[CALL_ACTION] is None else str(call[CALL_ACTION])
    group = state.axis or f"ranks {', '.join(map(str, state.ranks))}"
    return CallSlice(
        group, f"{call[OPERATION]}{to}", call[BEGAN_S], end_s, waited_s, shape, dtype, action
    )

"""Runs one rank's program of a checked schedule over real messages.

The program is the one that was checked, made once into a list of bound functions. Messages are
begun where it says and waited for only where their content is needed, which is never earlier than
the check assumed, so the run cannot deadlock. Where a posted receive holds up nothing (gloo),
receives are posted ahead of their place.

In its first run the executor sends a description ahead of each message; later runs send tensors
alone, and a stage whose output then differs is refused before anything is sent. `dynamic_shapes`
sends the description every time.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import torch
from torch import nn

from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.groups import refuse_interrupted, step_over
from torchdistpackage.comm.moments import ComputeClock, Moment, clock_of, seconds
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.grad_sync import LastBackwardNotifier
from torchdistpackage.parallel.pipeline.program import ProgramStep, RankProgram, StepKind, within
from torchdistpackage.parallel.pipeline.stage_runner import (
    Backward,
    Forward,
    Keep,
    Weight,
    autograd,
)
from torchdistpackage.schedule.actions import Action, ActionKind, Schedule
from torchdistpackage.schedule.engine import Span

__all__ = ["Backward", "Executor", "Forward", "Recording", "autograd"]


class Executor:
    """One rank's side of a schedule. Reusable step after step.

    schedule: a checked one, with as many programs as the group has ranks.
    group: the pipe group; its order is that of the schedule's pipe indices.
    device: where messages arrive. timeout_s: how long one may take (gloo; NCCL's watchdog has its
    own limit). dynamic_shapes: messages may change their form in every microbatch and run.

    Raises:
        ScheduleError: the schedule is for another number of ranks.
    """

    def __init__(
        self,
        schedule: Schedule,
        group: Group,
        *,
        device: torch.device,
        timeout_s: float | None = None,
        dynamic_shapes: bool = False,
    ):
        if len(schedule.programs) != group.size():
            raise ScheduleError(
                f"{schedule.name} is for {len(schedule.programs)} pipe ranks, but the group has "
                f"{group.size()}: {ranks_of(group)}; build it for as many"
            )
        self.schedule, self.group, self.clock = schedule, group, ComputeClock(device)
        self._trains = schedule.has_backward
        self._steps = RankProgram(schedule, group, device, timeout_s, dynamic_shapes, self.clock)
        self.stages = tuple(self._steps.stages)
        self.recording: Recording | None = None
        """The record of the last run, None if it was not recorded; `run` alone sets it."""

    def is_first_stage(self, stage: int) -> bool:
        return stage == 0

    def is_last_stage(self, stage: int) -> bool:
        return stage == self.schedule.num_stages - 1

    @property
    def spans(self) -> list[Span]:
        """The spans of the last run in order of their start, if it was recorded."""
        return [] if self.recording is None else self.recording.spans()

    @property
    def timeout_s(self) -> float | None:
        return self._steps.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float | None) -> None:
        self._steps.limit(seconds)

    def run(
        self,
        forward: Forward,
        backward: Backward | None = None,
        *,
        parameters: Mapping[int, Sequence[nn.Parameter]] | None = None,
        reducer: Reducer | Sequence[Reducer] | None = None,
        keep: Keep | None = None,
        weights: Sequence[Weight] | None = None,
        around: Callable[[ActionKind], AbstractContextManager[object]] | None = None,
        record: bool = False,
    ) -> None:
        """One pass over all microbatches. Without a backward in the schedule no graph is kept.

        forward, backward: see the types. backward None is autograd's, which can be split; a
            caller's own is not.
        parameters: of each stage here; says which parameters several stages share. Without it a
            reducer sums in the last backward of this rank only, or in `finish()`.
        reducer: one or several, which reduce in the last backward of each parameter only; the
            caller calls `finish()` before the next run. To accumulate over runs give it to the last
            one only: a sum, unlike a mean, would count the others again. Without one, wrap the run
            in the reducer's `no_sync()` where modules have hooks.
        weights: of the loss of each microbatch in the sum whose gradient is wanted; default 1.
        keep: called with each output of a stage here.
        around: a context for each computation, by its kind.
        record: `spans` says afterwards when each computation and each wait for a message began and
            ended, in seconds from the start of the run; on CUDA in the time of the stream.

        Raises:
            CommError: a peer did not answer in time, a message changed its form with
                `dynamic_shapes` off, or an exception ended an earlier step over the group, after
                which messages between ranks are out of step.
        """
        refuse_interrupted(self.group)
        steps = self._steps
        for stage in steps.stages.values():
            stage.begin(forward, backward, keep, weights)
        program = steps.begin()
        if around is not None:
            program = [
                within(partial(around, step.action.kind), step)
                if step.kind is StepKind.COMPUTES
                else step
                for step in program
            ]
        reducers = [reducer] if isinstance(reducer, Reducer) else reducer or ()
        recording = Recording(self.clock.device) if record else None
        try:
            with step_over(self.group):
                self.clock.restart()
                with ExitStack() as reducing, torch.set_grad_enabled(self._trains):
                    if reducers and self._trains:
                        ready = [reducing.enter_context(r.scheduled()) for r in reducers]
                        every = [p for r in reducers for p in r.parameters]
                        given = parameters or dict.fromkeys(steps.stages, every)
                        program = LastBackwardNotifier(ready, steps.stages, given).within(program)
                    (recording.run if recording else run)(program)
                steps.end()
                self.clock.stop()
        finally:
            recorder.action = None
            steps.reset()
        self.recording = recording


def run(program: Sequence[ProgramStep]) -> None:
    """Run all steps in order. Besides computing and messages a step costs what this loop does."""
    for step in program:
        recorder.action = step.action
        step.call(step.number)


class Recording:
    """Runs a program, with a reading of the clock (on CUDA an event) before and after each
    computation and each wait for a message."""

    def __init__(self, device: torch.device):
        self._now = clock_of(device)
        self.began = self._now()
        self._marks: list[tuple[Action, Moment, Moment]] = []

    def run(self, program: Sequence[ProgramStep]) -> None:
        """All steps, in order."""
        now = self._now
        for step in program:
            recorder.action = step.action
            if step.kind is StepKind.BEGINS:
                step.call(step.number)
            else:
                since = now()
                step.call(step.number)
                self._marks.append((step.action, since, now()))

    def spans(self) -> list[Span]:
        """Seconds from the start of the run. On CUDA this waits for the end of it."""
        began = self.began
        return [
            Span(a, seconds(began, start), seconds(began, end)) for a, start, end in self._marks
        ]

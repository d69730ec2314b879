"""The executor, which runs one rank's program of a checked schedule with real messages.

It turns the checked program once into a list of bound functions. It starts messages where the
program says, and waits for a message only when its content is needed. That is never earlier than
the check assumed, so a run cannot deadlock. On transports where a posted receive blocks nothing
(gloo), it posts receives ahead of their place.

In its first run the executor sends a description before each message. Later runs send only tensors,
and refuse a stage whose output has changed before anything is sent. `dynamic_shapes` sends the
description every time.
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
    """An executor of one rank's program, reusable step after step.

    schedule: a checked schedule, with as many programs as the group has ranks.
    group: the pipe group, in the order of the schedule's pipe indices.
    device: device that messages arrive on.
    timeout_s: limit for one message on gloo; NCCL's watchdog has its own.
    dynamic_shapes: allow messages to change their shapes in every micro-batch and run.

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
        """Run all micro-batches once. Without a backward in the schedule no graph is kept.

        forward, backward: see the types. `backward` None: autograd's backward, which can be split;
            a caller's own cannot.
        parameters: parameters of each stage on this rank, which show what several stages share.
            Without them a reducer sums only in this rank's last backward, or in `finish()`.
        reducer: one or several, which reduce each parameter in its last backward only; the caller
            calls `finish()` before the next run. To accumulate over runs, pass it only to the last
            run: a sum, unlike a mean, would count earlier runs again. Without a reducer, wrap the
            run in its `no_sync()` if modules have hooks.
        weights: weight of each micro-batch's loss in the sum to differentiate; default 1.
        keep: called with each output of a stage on this rank.
        around: returns a context for each computation, by its kind.
        record: let `spans` return when each computation and each wait for a message began and
            ended, in seconds from the start of the run; on CUDA in the time of the stream.

        Raises:
            CommError: a peer did not answer in time, a message changed its shape without
                `dynamic_shapes`, or an exception ended an earlier step over the group, after which
                messages between ranks no longer match.
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
                        all_parameters = [p for r in reducers for p in r.parameters]
                        stage_parameters = parameters or dict.fromkeys(steps.stages, all_parameters)
                        # Wrapped last, so that the notifications include the caller's contexts and
                        # come before the recording's second clock reading.
                        program = LastBackwardNotifier(
                            ready, steps.stages, stage_parameters
                        ).within(program)
                    (recording.run if recording else run)(program)
                steps.end()
                self.clock.stop()
        finally:
            recorder.action = None
            steps.reset()
        self.recording = recording


def run(program: Sequence[ProgramStep]) -> None:
    """Run all steps in order. This loop is all that a step costs beside computing and messages."""
    for step in program:
        recorder.action = step.action
        step.call(step.number)


class Recording:
    """A record of a program's run: clock times (CUDA events) around computations and waits."""

    def __init__(self, device: torch.device):
        self._now = clock_of(device)
        self.began = self._now()
        self._marks: list[tuple[Action, Moment, Moment]] = []

    def run(self, program: Sequence[ProgramStep]) -> None:
        """Run all steps in order, and note the times."""
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
        """Return the spans in seconds from the start of the run; on CUDA this waits for its end."""
        began = self.began
        return [
            Span(a, seconds(began, start), seconds(began, end)) for a, start, end in self._marks
        ]

"""Reduction of a rank's gradients over replicas: which reducers run, and in which backward.

Before a stage's last I or B none of its gradients is final. After it, only deferred Ws can add to
them, and each W knows its parameters. A parameter of several stages on this rank is final when it
is final in all of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.ready import ScheduledReady
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.parallel.pipeline.program import ProgramStep, StepKind
from torchdistpackage.parallel.pipeline.stage_runner import StageRunner
from torchdistpackage.parallel.pipeline.stages import Stage
from torchdistpackage.schedule.actions import ActionKind


class LastBackwardNotifier:
    """A notifier that tells reducers which backward of a run is the last for which parameters.

    reducers: replicas run one program, so all launch buckets of different reducers in one order.
    parameters: for each stage on this rank, the parameters that may get gradients.
    """

    def __init__(
        self,
        reducers: Sequence[ScheduledReady],
        stages: Mapping[int, StageRunner],
        parameters: Mapping[int, Sequence[nn.Parameter]],
    ):
        self._reducers, self._stages = reducers, stages
        self._parameters = {s: {id(p): p for p in parameters.get(s, ())} for s in stages}
        self._unfinished = set(stages)  # stages with an I or B still to run

    def within(self, program: Sequence[ProgramStep]) -> list[ProgramStep]:
        """Return the program with its last backwards wrapped so that they notify the reducers."""
        last: dict[int, int] = {}
        for index, step in enumerate(program):
            if step.kind is StepKind.COMPUTES and step.action.kind.gives_gradient:
                last[step.action.stage] = index
        return [
            replace(step, call=partial(self._run, step.call, step.action.stage))
            if step.kind is StepKind.COMPUTES
            and step.action.kind is not ActionKind.F
            and index >= last[step.action.stage]
            else step
            for index, step in enumerate(program)
        ]

    def _run(self, backward: Callable[[int], object], stage: int, m: int) -> None:
        """Run one of a stage's last backwards: its last I or B, or a W after that."""
        self._unfinished.discard(stage)
        stage_parameters = self._parameters[stage]
        others = (self._may_come(other) for other in self._stages if other != stage)
        elsewhere = {i for ids in others for i in ids if i in stage_parameters}
        still_pending = self._may_come(stage, besides=m) | elsewhere
        with ExitStack() as stack:
            for reducer in self._reducers:
                stack.enter_context(reducer.last_backward(still_pending))
            backward(m)
        pending = self._may_come(stage) | elsewhere
        complete = [p for i, p in stage_parameters.items() if i not in pending]
        for reducer in self._reducers:
            reducer.complete(complete)

    def _may_come(self, stage: int, besides: int | None = None) -> set[int]:
        """Return ids of parameters that later backwards of `stage` may add to.

        besides: a micro-batch to leave out.
        """
        if stage in self._unfinished:
            return set(self._parameters[stage])
        pending: set[int] = set()
        for m, deferred in enumerate(self._stages[stage].deferred):
            if deferred is not None and m != besides:
                ids = deferred.parameters
                pending.update(self._parameters[stage] if ids is None else ids)
        return pending


class HasReducer(Protocol):
    """An object with a reducer: a NaiveDDP or a `ShardedOptimizer`."""

    @property
    def reducer(self) -> Reducer: ...


class StageReducers:
    """The reducers of some stages, and the wrappers that broadcast the first replica's buffers."""

    def __init__(self, reducer_or_owner: Reducer | HasReducer | None, stages: Iterable[Stage]):
        self._wrappers = [stage for stage in stages if isinstance(stage, NaiveDDP)]
        if isinstance(reducer_or_owner, NaiveDDP) and reducer_or_owner not in self._wrappers:
            self._wrappers.append(reducer_or_owner)
        self.reducers: list[Reducer] = [ddp.reducer for ddp in self._wrappers]
        if reducer_or_owner is not None:
            self.reducers = [
                reducer_or_owner
                if isinstance(reducer_or_owner, Reducer)
                else reducer_or_owner.reducer
            ]

    @property
    def holders(self) -> list[Tensor]:
        """The tensors other than parameters that hold reduced gradients."""
        return [x for reducer in self.reducers for x in reducer.holders]

    def follow_buffers(self) -> None:
        """Broadcast buffers once for a step that reduces, as the wrapper's own forward does."""
        for ddp in self._wrappers:
            if ddp.broadcast_buffers and ddp.training:
                ddp.follow_buffers()


@contextmanager
def reducing(reducers: Sequence[Reducer], now: bool) -> Iterator[Sequence[Reducer]]:
    """Surround forwards and backwards, and yield the reducers that reduce in them.

    now: False only accumulates gradients, for a later pass to reduce.
    """
    with ExitStack() as stack:
        if not now:
            # without this, the hooks of NaiveDDP and ZeroOptimizer would reduce in every backward
            for reducer in reducers:
                stack.enter_context(reducer.no_sync())
        yield reducers if now else ()

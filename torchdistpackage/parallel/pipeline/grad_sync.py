"""The reduction of a rank's gradients over replicas: by which reducers, in which backward.

After a stage's last I or B, all that can still give it gradients are the W that wait, and each says
of which parameters. Before, nothing is final. A parameter of several stages here is final when it
is so in all of them.
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
    """Notifies reducers which backward of one run is the last of which parameters.

    reducers: replicas run one program, so buckets of different ones leave in one order on all of
    them. parameters: that stages here may give gradients to.
    """

    def __init__(
        self,
        reducers: Sequence[ScheduledReady],
        stages: Mapping[int, StageRunner],
        parameters: Mapping[int, Sequence[nn.Parameter]],
    ):
        self._reducers, self._stages = reducers, stages
        self._parameters = {s: {id(p): p for p in parameters.get(s, ())} for s in stages}
        self._unfinished = set(stages)  # those with an I or B to come

    def within(self, program: Sequence[ProgramStep]) -> list[ProgramStep]:
        """The same program, whose last backwards notify the reducer."""
        last: dict[int, int] = {}
        for at, step in enumerate(program):
            if step.kind is StepKind.COMPUTES and step.action.kind.gives_gradient:
                last[step.action.stage] = at
        return [
            replace(step, call=partial(self._run, step.call, step.action.stage))
            if step.kind is StepKind.COMPUTES
            and step.action.kind is not ActionKind.F
            and at >= last[step.action.stage]
            else step
            for at, step in enumerate(program)
        ]

    def _run(self, backward: Callable[[int], object], stage: int, m: int) -> None:
        """One of the last backwards of a stage: its last I or B, or a W after that."""
        self._unfinished.discard(stage)
        mine = self._parameters[stage]
        others = (self._may_come(other) for other in self._stages if other != stage)
        elsewhere = {i for ids in others for i in ids if i in mine}
        still_pending = self._may_come(stage, besides=m) | elsewhere
        with ExitStack() as stack:
            for reducer in self._reducers:
                stack.enter_context(reducer.last_backward(still_pending))
            backward(m)
        pending = self._may_come(stage) | elsewhere
        complete = [p for i, p in mine.items() if i not in pending]
        for reducer in self._reducers:
            reducer.complete(complete)

    def _may_come(self, stage: int, besides: int | None = None) -> set[int]:
        """Ids of parameters to which backwards of `stage` may still add, but for microbatch
        `besides`."""
        if stage in self._unfinished:
            return set(self._parameters[stage])
        found: set[int] = set()
        for m, deferred in enumerate(self._stages[stage].deferred):
            if deferred is not None and m != besides:
                ids = deferred.parameters
                found.update(self._parameters[stage] if ids is None else ids)
        return found


class HasReducer(Protocol):
    """A NaiveDDP, or a `ShardedOptimizer`."""

    @property
    def reducer(self) -> Reducer: ...


class StageReducers:
    """The reducers of some stages, and the wrappers whose buffers follow the first replica's."""

    def __init__(self, given: Reducer | HasReducer | None, stages: Iterable[Stage]):
        self._wrappers = [stage for stage in stages if isinstance(stage, NaiveDDP)]
        if isinstance(given, NaiveDDP) and given not in self._wrappers:
            self._wrappers.append(given)
        self.reducers: list[Reducer] = [ddp.reducer for ddp in self._wrappers]
        if given is not None:
            self.reducers = [given if isinstance(given, Reducer) else given.reducer]

    @property
    def holders(self) -> list[Tensor]:
        """The tensors that hold reduced gradients besides the parameters."""
        return [x for reducer in self.reducers for x in reducer.holders]

    def follow_buffers(self) -> None:
        """Let buffers follow, once a step that reduces, as the wrapper's own forward does."""
        for ddp in self._wrappers:
            if ddp.broadcast_buffers and ddp.training:
                ddp.follow_buffers()


@contextmanager
def reducing(reducers: Sequence[Reducer], now: bool) -> Iterator[Sequence[Reducer]]:
    """Forwards and backwards stand inside; gives the reducers that reduce in them.

    now: False lets gradients only add up, for a later pass to reduce.
    """
    with ExitStack() as stack:
        if not now:
            # NaiveDDP and ZeroOptimizer have hooks of their own: every backward would reduce
            for reducer in reducers:
                stack.enter_context(reducer.no_sync())
        yield reducers if now else ()

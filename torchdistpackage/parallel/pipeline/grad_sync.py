"""The sum of a rank's gradients over replicas: which reducers make it, and which backward is last.

One rule: after a stage's last I or B, all that can still give it gradients are the W that wait, and
each says of which parameters. Before, nothing is final. A parameter of several stages here is
final when it is so in all of them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Protocol, cast

from torch import Tensor, nn

from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.ready import ScheduledReady
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.zero.grad_buffer import ReduceScatterBucket
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import CommError
from torchdistpackage.parallel.pipeline.program import COMPUTES, Step
from torchdistpackage.parallel.pipeline.stage_runner import StageRunner
from torchdistpackage.parallel.pipeline.stages import Stage
from torchdistpackage.schedule.actions import ActionKind


class LastBackwardNotifier:
    """Says to the reducer which backward of one run is the last of which parameters.

    parameters: of each stage here, or None where that is not known: then any of `all_parameters`
    may be any stage's.
    """

    def __init__(
        self,
        scheduled: ScheduledReady,
        stages: Mapping[int, StageRunner],
        parameters: Mapping[int, Sequence[nn.Parameter]] | None,
        all_parameters: Sequence[nn.Parameter],
    ):
        self._scheduled, self._stages = scheduled, stages
        held = parameters or dict.fromkeys(stages, all_parameters)
        self._parameters = {s: {id(p): p for p in held.get(s, ())} for s in stages}
        self._unfinished = set(stages)  # those with an I or B to come

    def within(self, program: Sequence[Step]) -> list[Step]:
        """The same program, whose last backwards say so."""
        last: dict[int, int] = {}
        for at, (_, _, action, what) in enumerate(program):
            if what == COMPUTES and action.kind.gives_gradient:
                last[action.stage] = at
        saying = list(program)
        for at, (do, m, action, what) in enumerate(program):
            if what == COMPUTES and action.kind is not ActionKind.F and at >= last[action.stage]:
                saying[at] = partial(self._run, do, action.stage), m, action, what
        return saying

    def _run(self, do, stage: int, m: int) -> None:
        """One of the last backwards of a stage: its last I or B, or a W after that."""
        self._unfinished.discard(stage)
        mine = self._parameters[stage]
        elsewhere = {
            i
            for other in self._stages
            if other != stage
            for i in self._may_come(other)
            if i in mine
        }
        with self._scheduled.last_backward(self._may_come(stage, besides=m) | elsewhere):
            do(m)
        pending = self._may_come(stage) | elsewhere
        self._scheduled.complete(p for i, p in mine.items() if i not in pending)

    def _may_come(self, stage: int, besides: int | None = None) -> set[int]:
        """Ids of parameters to which other backwards of `stage` may add, apart from that of a
        microbatch."""
        if stage in self._unfinished:
            return set(self._parameters[stage])
        found: set[int] = set()
        for m, deferred in enumerate(self._stages[stage].deferred):
            if deferred is not None and m != besides:
                ids = deferred.parameters
                found.update(self._parameters[stage] if ids is None else ids)
        return found


# -- reducers of the stages ----------------------------------------------------------------------


class HasReducer(Protocol):
    """NaiveDDP, ZeroOptimizer."""

    @property
    def reducer(self) -> Reducer: ...


class StageReducers:
    """The reducer of some stages, and the wrappers whose buffers follow the first replica's."""

    def __init__(self, given: Reducer | HasReducer | None, stages: Iterable[Stage]):
        self._given = given
        self._wrappers = [stage for stage in stages if isinstance(stage, NaiveDDP)]
        if isinstance(given, NaiveDDP) and given not in self._wrappers:
            self._wrappers.append(given)
        self.reducer: Reducer | None = None
        if given is not None:
            self.reducer = given if isinstance(given, Reducer) else given.reducer
        elif len(self._wrappers) == 1:
            self.reducer = self._wrappers[0].reducer
        elif self._wrappers:
            self.reducer = cast(Reducer, _CombinedReducer([ddp.reducer for ddp in self._wrappers]))

    @property
    def holders(self) -> list[Tensor]:
        """Where sums are that are in no parameter's own gradient, as far as known."""
        if isinstance(self._given, ZeroOptimizer):
            return [shard.tensor for shard in self._given.shards]
        return []

    def check_holders(self) -> None:
        """Raises CommError: a ZeroOptimizer has sums, of which only the reducer was given."""
        if isinstance(self._given, Reducer) and scatters(self._given):
            raise CommError(
                "the loss is (sum, count), and reducer= is that of a ZeroOptimizer, which holds "
                "gradients that are to be divided by the count; give the ZeroOptimizer itself"
            )

    def follow_buffers(self) -> None:
        """Once a step that reduces, as the wrapper's own forward does."""
        for ddp in self._wrappers:
            if ddp.broadcast_buffers and ddp.training:
                ddp.follow_buffers()


def scatters(reducer: Reducer) -> bool:
    """Whether sums go to a ZeroOptimizer."""
    return any(
        isinstance(carrier, ReduceScatterBucket) for carrier in reducer.grad_buckets.carriers
    )


class _CombinedReducer:
    """Reducers of wrappers around each stage as one. Replicas run one program, so the order in
    which buckets of different reducers leave is the same on all of them."""

    def __init__(self, reducers: Sequence[Reducer]):
        self._reducers = reducers

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(p for reducer in self._reducers for p in reducer.parameters)

    @property
    def shared(self) -> list[ParamSpec]:
        return [shared for reducer in self._reducers for shared in reducer.shared]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for reducer in self._reducers:
                stack.enter_context(reducer.no_sync())
            yield

    @contextmanager
    def scheduled(self) -> Iterator["_CombinedReady"]:
        with ExitStack() as stack:
            yield _CombinedReady([stack.enter_context(r.scheduled()) for r in self._reducers])

    def finish(self) -> None:
        for reducer in self._reducers:
            reducer.finish()


class _CombinedReady:
    def __init__(self, parts: Sequence[ScheduledReady]):
        self._parts = parts

    @contextmanager
    def last_backward(self, still_pending: Collection[int] = ()) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.last_backward(still_pending))
            yield

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        for part in self._parts:
            part.complete(parameters)

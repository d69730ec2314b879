"""What sums the gradients of a rank's stages over their replicas."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol, cast

from torch import Tensor, nn

from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.ready import ScheduledReady
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.zero.grad_buffer import ReduceScatterBucket
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import CommError
from torchdistpackage.parallel.pipeline.stages import Stage


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
    def __init__(self, told: Sequence[ScheduledReady]):
        self._told = told

    @contextmanager
    def last_backward(self, still_pending: Collection[int] = ()) -> Iterator[None]:
        with ExitStack() as stack:
            for steered in self._told:
                stack.enter_context(steered.last_backward(still_pending))
            yield

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        for steered in self._told:
            steered.complete(parameters)

"""The hook on a forward's outputs, through which a backward finds its reducer.

It holds the reducer weakly, so that a dropped reducer takes its hooks off the parameters at once.
It keeps the reducer's state until a backward has run. If the reducer is gone by then, a new one
takes over that state for as long as this backward runs: `NaiveDDP(model)(x).sum().backward()`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from torchdistpackage.ddp.ready import ARMING
from torchdistpackage.errors import CommError


class WatchingReducer(Protocol):
    """The part of a `Reducer` that this file uses. `me` is a weak reference in its state."""

    me: ReferenceType

    def hook_parameters(self) -> None: ...
    def reached(self, made_in: int, wait: bool) -> bool: ...


def output_hook(
    reducer: WatchingReducer, made_in: int, wait: bool, survives: bool
) -> Callable[[Tensor], None]:
    """Return a hook for the outputs of one forward that tells `reducer` of a backward.

    made_in, wait: as in `Reducer.reached`.
    survives: allow a backward after the reducer was dropped. Otherwise it is refused, and always
        under torch.compile, whose graph would keep a copy of the state.
    """
    state = KeptState(reducer) if survives and not torch.compiler.is_compiling() else None
    return partial(_reached, ref(reducer), state, made_in, wait)


class KeptState:
    """The state of `reducer`, kept alive until `let_go`, whichever reducer uses it."""

    __slots__ = ("_kind", "_me", "_state")

    def __init__(self, reducer: WatchingReducer):
        self._me, self._kind = reducer.me, type(reducer)
        self._state: dict[str, Any] | None = vars(reducer)

    def find(self) -> WatchingReducer | None:
        """Return the reducer that has the state now, creating one if the first was dropped."""
        reducer = self._me()
        if reducer is None and self._state is not None:
            # under the lock, so that two threads of autograd do not create two reducers
            with ARMING:
                reducer = self._state["me"]()
                if reducer is None:
                    reducer = self._kind.__new__(self._kind)
                    reducer.__dict__ = self._state
                    reducer.hook_parameters()
            self._me = ref(reducer)
        return reducer

    def let_go(self) -> None:
        """Drop the state after a backward: a graph may live on, but need not keep the buckets."""
        self._state = None


def _reached(
    reducer_ref: "ReferenceType[WatchingReducer]",
    state: KeptState | None,
    made_in: int,
    wait: bool,
    grad: Tensor,
) -> None:
    """Tell the reducer that a backward has reached an output, or raise if it is gone."""
    reducer = reducer_ref() if state is None else state.find()
    if reducer is None:
        raise CommError(
            "a backward reached outputs of a NaiveDDP or ZeroOptimizer that no longer exists, so "
            "their gradients would not be reduced; keep that object until the last backward "
            "through its outputs is over"
        )
    if reducer.reached(made_in, wait) and state is not None:
        state.let_go()

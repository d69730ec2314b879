"""The hook of what a forward returned: a backward that comes to it finds its reducer there.

It holds the reducer weakly, so that one that is dropped takes its hooks off the parameters at once.
It keeps the reducer's state until a backward has come. If the reducer is gone by then, another one
takes over that state, for as long as this backward runs: `NaiveDDP(model)(x).sum().backward()`.
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
    """The part of a `Reducer` that this uses; `me`, which refers to it, is part of its state."""

    me: ReferenceType

    def hook_parameters(self) -> None: ...
    def reached(self, made_in: int, wait: bool) -> bool: ...


def output_hook(
    reducer: WatchingReducer, made_in: int, wait: bool, survives: bool
) -> Callable[[Tensor], None]:
    """Leads a backward from the outputs of one forward to `reducer`.

    made_in, wait: as `Reducer.reached` has them. survives: whether a backward may come after the
    reducer was dropped; else it is refused, as it is where torch.compile traces the forward, which
    would keep a copy of the state.
    """
    kept = KeptState(reducer) if survives and not torch.compiler.is_compiling() else None
    return partial(_reached, ref(reducer), kept, made_in, wait)


class KeptState:
    """The state of `reducer`, whoever has it, until `let_go`."""

    __slots__ = ("_kind", "_me", "_state")

    def __init__(self, reducer: WatchingReducer):
        self._me, self._kind = reducer.me, type(reducer)
        self._state: dict[str, Any] | None = vars(reducer)

    def find(self) -> WatchingReducer | None:
        """The reducer, or who has its state now."""
        found = self._me()
        if found is None and self._state is not None:
            with ARMING:
                found = self._state["me"]()
                if found is None:
                    found = self._kind.__new__(self._kind)
                    found.__dict__ = self._state
                    found.hook_parameters()
            self._me = ref(found)
        return found

    def let_go(self) -> None:
        """A graph may outlive its backward, and the buckets need not."""
        self._state = None


def _reached(
    me: "ReferenceType[WatchingReducer]",
    kept: KeptState | None,
    made_in: int,
    wait: bool,
    grad: Tensor,
) -> None:
    reducer = me() if kept is None else kept.find()
    if reducer is None:
        raise CommError(
            "a backward came to what a NaiveDDP or ZeroOptimizer returned that was dropped since, "
            "so that its gradients would not be reduced; keep it until the last backward through "
            "its outputs is over"
        )
    if reducer.reached(made_in, wait) and kept is not None:
        kept.let_go()

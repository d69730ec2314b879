"""Hooks on parameters, which tell their listener of gradients and do not keep it alive.

One rule: torch keeps the hooks of a parameter where the garbage collector does not look. One that
held its listener, and so the model, would keep both for ever; these hold it weakly, and go with it.
"""

import gc
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol
from weakref import WeakSet, finalize, ref

from torch import nn

from torchdistpackage.ddp.shared import Shared
from torchdistpackage.ddp.streams import Heard, on_one_stream
from torchdistpackage.errors import CommError


class Removable(Protocol):
    def remove(self) -> None: ...


class Told:
    """Hooks on `parameters` until `remove`, or the end of this.

    heard: called when a gradient is there, with a weak reference to `listener`, the number of the
    parameter, and it. alone: whether the listener must stay the only one. also: removed with them.
    """

    def __init__(
        self,
        heard: Heard,
        listener: object,
        parameters: Sequence[nn.Parameter],
        alone: bool = False,
        also: Iterable[Removable] = (),
    ):
        me, self.alone = ref(listener), alone
        self._ids = frozenset(map(id, parameters))
        heard = on_one_stream(heard, parameters)
        handles: list[Removable] = [
            p.register_post_accumulate_grad_hook(partial(heard, me, i))
            for i, p in enumerate(parameters)
        ]
        handles += also
        self._end = finalize(self, take_off, handles)
        self._end.atexit = False
        _all.add(self)

    def remove(self) -> None:
        self._end()
        _all.discard(self)

    def has(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._ids


_all: WeakSet[Told] = WeakSet()


def already_told(parameters: Iterable[nn.Parameter], *, alone: bool = False) -> list[nn.Parameter]:
    """Those whose gradients somebody hears of who is still in use.

    alone: somebody who must stay the only one.
    """
    parameters = list(parameters)
    found = _heard_of(parameters, alone)
    if found:
        gc.collect()  # somebody who was dropped may only wait for this
        found = _heard_of(parameters, alone)
    return found


def refuse_sharded(shared: Sequence[Shared]) -> None:
    """None may belong to a ZeroOptimizer.

    Raises:
        CommError: some does.
    """
    found = set(map(id, already_told((s.parameter for s in shared), alone=True)))
    if found:
        names = [s.name for s in shared if id(s.parameter) in found]
        raise CommError(
            f"{len(names)} of {len(shared)} parameters belong to a ZeroOptimizer, which reduces "
            f"their gradients itself: {', '.join(names[:3])}; train the module without NaiveDDP, "
            f"or call the remove() of that optimizer first"
        )


def _heard_of(parameters: Sequence[nn.Parameter], alone: bool) -> list[nn.Parameter]:
    told = [t for t in _all if t.alone or not alone]
    return [p for p in parameters if any(t.has(p) for t in told)]


def take_off(handles: Iterable[Removable]) -> None:
    """Remove these hooks."""
    for handle in handles:
        handle.remove()

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

from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.streams import OnGradReady, on_one_stream
from torchdistpackage.errors import CommError


class Removable(Protocol):
    def remove(self) -> None: ...


class GradHooks:
    """Hooks on `parameters` until `remove`, or the end of this.

    on_grad_ready: called when a gradient is there, with a weak reference to `owner`, the number of
    the parameter, and it. exclusive: whether the listener must stay the only one. also: removed
    with them.
    """

    def __init__(
        self,
        on_grad_ready: OnGradReady,
        owner: object,
        parameters: Sequence[nn.Parameter],
        exclusive: bool = False,
        also: Iterable[Removable] = (),
    ):
        me, self.exclusive = ref(owner), exclusive
        self._ids = frozenset(map(id, parameters))
        on_grad_ready = on_one_stream(on_grad_ready, parameters)
        handles: list[Removable] = [
            p.register_post_accumulate_grad_hook(partial(on_grad_ready, me, i))
            for i, p in enumerate(parameters)
        ]
        handles += also
        self._end = finalize(self, remove_hooks, handles)
        self._end.atexit = False
        _all.add(self)

    def remove(self) -> None:
        self._end()
        _all.discard(self)

    def has(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._ids


_all: WeakSet[GradHooks] = WeakSet()


def already_hooked(
    parameters: Iterable[nn.Parameter], *, exclusive: bool = False
) -> list[nn.Parameter]:
    """Those whose gradients somebody hears of who is still in use.

    exclusive: somebody who must stay the only one.
    """
    parameters = list(parameters)
    found = _hooked_by(parameters, exclusive)
    if found:
        gc.collect()  # somebody who was dropped may only wait for this
        found = _hooked_by(parameters, exclusive)
    return found


def refuse_sharded(shared: Sequence[ParamSpec]) -> None:
    """None may belong to a ZeroOptimizer.

    Raises:
        CommError: some does.
    """
    found = set(map(id, already_hooked((s.parameter for s in shared), exclusive=True)))
    if found:
        names = [s.name for s in shared if id(s.parameter) in found]
        raise CommError(
            f"{len(names)} of {len(shared)} parameters belong to a ZeroOptimizer, which reduces "
            f"their gradients itself: {', '.join(names[:3])}; train the module without NaiveDDP, "
            f"or call the remove() of that optimizer first"
        )


def _hooked_by(parameters: Sequence[nn.Parameter], exclusive: bool) -> list[nn.Parameter]:
    told = [t for t in _all if t.exclusive or not exclusive]
    return [p for p in parameters if any(t.has(p) for t in told)]


def remove_hooks(handles: Iterable[Removable]) -> None:
    """Remove these hooks."""
    for handle in handles:
        handle.remove()

"""Operations on tensors in flight, named at the line that runs them.

One rule: this only looks. What no operation shows, such as NumPy's views of a tensor, is found by
its bits when the call is delivered (guard.py).
"""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchdistpackage.errors import RaceError
from torchdistpackage.harness.late.call import LateCall, issued_at
from torchdistpackage.harness.late.guard import CHANGED, READ, WRITTEN, Guard, span

_METADATA = {
    "as_strided_", "detach_", "empty_like", "full_like", "is_pinned", "is_same_size", "new_empty",
    "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones_like", "rand_like",
    "randint_like", "randn_like", "record_stream", "resize_", "set_", "squeeze_", "swapdims_",
    "t_", "transpose_", "unsqueeze_", "zeros_like",
}  # fmt: skip


class InFlightGuard(TorchDispatchMode):
    """Inside, an operation that reads what a call writes, or writes what it uses, raises.

    calls: those in flight.

    Raises:
        RaceError: at the operation.
    """

    def __init__(self, calls: Callable[[], list[LateCall]]):
        super().__init__()
        self._calls = calls

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (calls := self._calls()) and (written := written_arguments(func)) is not None:
            for at, x in tensors_of(args, kwargs):
                _look(calls, func, x, at in written)
        return func(*args, **kwargs)


def _look(calls: list[LateCall], func, x: Tensor, writes: bool) -> None:
    if x.layout is not torch.strided or x.is_meta or not x.numel():
        return
    first, after = span(x)
    for call in calls:
        for guard in call.guards:
            one, other = guard.span
            if one < after and first < other and (writes or guard.written):
                _raise(call, guard, func, writes)


def _raise(call: LateCall, guard: Guard, func, writes: bool) -> None:
    found = READ
    if writes:
        found = WRITTEN if guard.written else CHANGED
    raise RaceError(
        f"{call.name}, tensor of shape {guard.shape}: {found}, by {func}{issued_at()}\n"
        f"the call was issued{call.where}"
    )


@cache
def written_arguments(func) -> frozenset[int | str] | None:
    """Which arguments an operation writes, by place and name; None: it touches no elements."""
    arguments = func._schema.arguments
    aliases = [a.alias_info for a in arguments]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    if is_view or func._schema.name.rpartition(":")[2] in _METADATA:
        return None
    places = [i for i, alias in enumerate(aliases) if alias is not None]
    return frozenset([*places, *(arguments[i].name for i in places)])


def tensors_of(args, kwargs) -> Iterator[tuple[int | str, Tensor]]:
    for at, value in (*enumerate(args), *kwargs.items()):
        for x in value if isinstance(value, list | tuple) else (value,):
            if isinstance(x, Tensor):
                yield at, x

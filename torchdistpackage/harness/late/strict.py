"""Strictness of the late transport: what NCCL would refuse of a call's tensors, on CPUs.

One rule: where memory is follows from what made it (marks.py), so both of torch's modes watch: one
sees each function with the device that was asked for, the other each operation, those of backwards
too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from torchdistpackage.comm import backends
from torchdistpackage.comm.flight_recorder import dtype_name
from torchdistpackage.errors import RaceError
from torchdistpackage.harness.late.call import issued_at
from torchdistpackage.harness.late.marks import DEVICE, DeviceMemory, caller, is_users
from torchdistpackage.harness.late.orders import LATE, Order
from torchdistpackage.harness.late.world import world

_DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
}
"""What torch hands to NCCL."""
_HOST = torch.device("cpu")
_device_of = torch.Tensor.device.__get__


class Strict:
    """Looks at the tensors of calls; see `strictness`."""

    def __init__(self) -> None:
        self.marks = DeviceMemory()

    def check(self, name: str, operation: str, tensors: Sequence[Tensor]) -> None:
        """Refuse what NCCL would.

        Raises:
            RaceError: a tensor is in host memory, or of a dtype that NCCL does not know.
        """
        if operation == "barrier":  # its token is the transport's own
            return
        for x in tensors:
            what = f"{name}: a tensor of shape {tuple(x.shape)} and dtype {dtype_name(x.dtype)}"
            if x not in self.marks:
                raise RaceError(
                    f"{what}{self.marks.made_at(x)} is in host memory, but NCCL moves what is on "
                    f"the device; make it with device=device_of(group){issued_at()}"
                )
            if x.dtype not in _DTYPES:
                raise RaceError(f"{what} is none that NCCL knows; move its bytes{issued_at()}")


@contextmanager
def strictness(token: str) -> Iterator[None]:
    """Inside, tensors of this thread are on the device or not, if `token` (orders.py) asks."""
    if not Order(token).strict:
        yield
        return
    found = Strict()
    world.strict, run_backward = found, torch.autograd._engine_run_backward
    usual = backends._transports[LATE]
    backends.register_transport(replace(usual, device_type=str(DEVICE)))
    try:
        with _Functions(found.marks) as functions, _DeviceMarkMode(found.marks):
            # torch calls a function without the mode that saw it, hooks of a backward included
            torch.autograd._engine_run_backward = partial(_within, functions, run_backward)
            yield
    finally:
        torch.autograd._engine_run_backward = run_backward
        backends.register_transport(usual)
        world.strict = None


def _within(mode: TorchFunctionMode, function: Callable[..., Any], *args, **kwargs) -> object:
    if mode in _get_current_function_mode_stack():
        return function(*args, **kwargs)
    with mode:
        return function(*args, **kwargs)


class _Functions(TorchFunctionMode):
    """Sees which device a function is asked for."""

    def __init__(self, marks: DeviceMemory):
        super().__init__()
        self._marks = marks
        self._special: dict[object, Callable[..., Any]] = {
            _device_of: self._device,
            Tensor.to: self._to,
            Tensor.cpu: self._cpu,
            Tensor.numpy: self._numpy,
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        special = self._special.get(func)
        if special is not None:
            return special(func, args, kwargs)
        result = func(*args, **kwargs)
        if func in _factories():
            asked = kwargs.get("device")
            frame = caller()
            if frame is None:
                return result
            if _is_device(asked) or is_users(frame):
                self._marks.add(result)
            else:
                self._marks.note(result, frame)
        elif kwargs.get("device") == _HOST and isinstance(result, Tensor):
            self._marks.remove(result)
        return result

    def _device(self, func, args, kwargs) -> torch.device:
        found = func(*args, **kwargs)
        return DEVICE if args[0] in self._marks and found == _HOST else found

    def _to(self, func, args, kwargs) -> Tensor:
        """A copy where the device is another one, as between host and GPU."""
        x, places = args[0], [*args[1:], *kwargs.values()]
        devices = [torch.device(y) if isinstance(y, str) else y for y in places
                   if isinstance(y, str | torch.device)]  # fmt: skip
        devices += [_device_of(y) if y not in self._marks else DEVICE for y in places
                    if isinstance(y, Tensor)]  # fmt: skip
        if not devices or devices[0].type != "cpu":
            return func(*args, **kwargs)
        there = _is_device(devices[0])
        plain = [_HOST if isinstance(y, torch.device | str) else y for y in args[1:]]
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _HOST}
        result = func(x, *plain, **kwargs)
        return result if there is (x in self._marks) else self._moved(x, result, there)

    def _cpu(self, func, args, kwargs) -> Tensor:
        result = func(*args, **kwargs)
        return self._moved(args[0], result, False) if args[0] in self._marks else result

    def _moved(self, x: Tensor, result: Tensor, there: bool) -> Tensor:
        if result.untyped_storage()._cdata == x.untyped_storage()._cdata:
            result = result.clone()
        (self._marks.add if there else self._marks.remove)(result)
        return result

    def _numpy(self, func, args, kwargs) -> object:
        frame = caller()
        if args[0] in self._marks and frame is not None and not is_users(frame):
            raise RaceError(f"numpy() of a tensor on the device; copy it to the host{issued_at()}")
        return func(*args, **kwargs)


class _DeviceMarkMode(TorchDispatchMode):
    """Marks what is computed from marked tensors."""

    def __init__(self, marks: DeviceMemory):
        super().__init__()
        self._marks = marks

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        frame = caller()
        if frame is None:
            return func(*args, **kwargs)
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        written = _written(func)
        on_device = _is_device(kwargs.get("device")) or any(x in self._marks for x in given)
        if func is torch.ops.aten.lift_fresh.default:
            on_device = on_device or is_users(frame)
        old = {x.untyped_storage()._cdata for x in given if x.layout is torch.strided}
        result = func(*args, **kwargs)
        if not on_device:
            return result
        for x in tree_iter(result):
            # a view of what was given is where that is
            is_new = isinstance(x, Tensor) and x.layout is torch.strided
            if is_new and x.untyped_storage()._cdata not in old:
                self._marks.add(x)
        for place, word in written if func not in _COPIES else ():
            for x in tree_iter(args[place] if place < len(args) else kwargs.get(word)):
                if isinstance(x, Tensor):
                    self._marks.add(x)
        return result


_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default}
"""They write where their target is, whatever they read."""


def _is_device(asked: object) -> bool:
    if isinstance(asked, str):
        asked = torch.device(asked)
    return isinstance(asked, torch.device) and asked == DEVICE


@cache
def _factories() -> set[object]:
    return set(_device_constructors())


@cache
def _written(func) -> tuple[tuple[int, str], ...]:
    """The arguments that an operation writes."""
    infos = [(i, a.name, a.alias_info) for i, a in enumerate(func._schema.arguments)]
    return tuple((i, name) for i, name, info in infos if info is not None and info.is_write)

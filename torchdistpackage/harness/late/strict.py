"""Refuse on CPUs the tensors of a call that NCCL would refuse.

Where memory is follows from what made it, so both of torch's modes watch: one sees each function
with the device that was asked for, the other each operation, those of backwards too. A mark belongs
to a storage, so views share it. On the device is what a user's code makes (a test's body, a layer's
weights, arguments), what the package makes with `DEVICE`, and what is computed from such tensors;
all else that the package makes is in host memory.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from torchdistpackage.comm import backends
from torchdistpackage.comm.flight_recorder import dtype_name
from torchdistpackage.errors import RaceError
from torchdistpackage.harness.late.call import issued_at
from torchdistpackage.harness.late.orders import LATE, Order
from torchdistpackage.harness.late.world import (
    COPIES,
    made_in,
    storages_of,
    tensors_of,
    world,
    written_arguments,
)
from torchdistpackage.thread_ranks.own_backend import HERE

DEVICE = torch.device("cpu", 0)
"""Device of the tensors of a group of the strict transport: torch takes it for the CPU, but says
whether an index was requested."""

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parents[2])
_ARGUMENTS = str(Path(_PACKAGE, "launch"))
"""Code that unpacks a user's arguments."""
_LAYERS = str(Path(_PACKAGE, "models")), str(Path(_PACKAGE, "parallel"))
"""Packages whose modules are made where a user makes them, and moved entirely."""
_KEPT = 4096
_DTYPES = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
}
"""Dtypes that torch passes to NCCL."""
_HOST = torch.device("cpu")
_device_of = torch.Tensor.device.__get__


class DeviceMemory:
    """The storages on the device."""

    def __init__(self) -> None:
        # a weak reference keeps the address, so that no later storage is taken for this one
        self._storages: dict[int, StorageWeakRef] = {}
        self._made: dict[int, tuple[StorageWeakRef, str]] = {}
        self._limit = _KEPT

    def add(self, x: Tensor) -> None:
        if x.layout is not torch.strided:
            return
        storage = x.untyped_storage()
        self._storages[storage._cdata] = StorageWeakRef(storage)
        if len(self._storages) > self._limit:
            alive = {key: ref for key, ref in self._storages.items() if not ref.expired()}
            self._storages, self._limit = alive, max(_KEPT, 2 * len(alive))

    def note(self, x: Tensor, frame: FrameType) -> None:
        """Remember where the package made a tensor in host memory."""
        if x.layout is torch.strided:
            storage, code = x.untyped_storage(), frame.f_code
            line = f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
            self._made[storage._cdata] = StorageWeakRef(storage), line
            if len(self._made) > _KEPT:
                self._made.clear()

    def remove(self, x: Tensor) -> None:
        if x.layout is torch.strided:
            self._storages.pop(x.untyped_storage()._cdata, None)

    def __contains__(self, x: Tensor) -> bool:
        return x.layout is not torch.strided or x.untyped_storage()._cdata in self._storages

    def check(self, name: str, operation: str, tensors: Sequence[Tensor]) -> None:
        """Raise RaceError if a tensor is in host memory, or of a dtype that NCCL does not know."""
        if operation == "barrier":  # its token is the transport's own
            return
        for x in tensors:
            described = (
                f"{name}: a tensor of shape {tuple(x.shape)} and dtype {dtype_name(x.dtype)}"
            )
            if x not in self:
                _, line = self._made.get(x.untyped_storage()._cdata, (None, ""))
                origin = f", made at {line}," if line else ""
                raise RaceError(
                    f"{described}{origin} is in host memory, but NCCL moves what is on the device; "
                    f"make it with device=device_of(group){issued_at()}"
                )
            if x.dtype not in _DTYPES:
                raise RaceError(
                    f"{described}, which NCCL does not know; send its bytes instead{issued_at()}"
                )


@contextmanager
def strictness(token: str) -> Iterator[None]:
    """Treat tensors that this thread makes inside the block as on the device or not, if `token`
    (orders.py) asks for it.
    """
    if not Order(token).strict:
        yield
        return
    marks = DeviceMemory()
    world.check, run_backward = marks.check, torch.autograd._engine_run_backward
    usual = backends._transports[LATE]
    backends.register_transport(replace(usual, device_type=str(DEVICE)))
    try:
        with _Functions(marks) as functions, _DeviceMarkMode(marks):
            # torch calls a function without the mode that saw it, hooks of a backward included
            torch.autograd._engine_run_backward = partial(_within, functions, run_backward)
            yield
    finally:
        torch.autograd._engine_run_backward = run_backward
        backends.register_transport(usual)
        world.check = None


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
        if func in _device_constructors():
            frame = caller()
            if frame is not None and (_is_device(kwargs.get("device")) or is_users(frame)):
                self._marks.add(result)
            elif frame is not None:
                self._marks.note(result, frame)
        elif kwargs.get("device") == _HOST and isinstance(result, Tensor):
            self._marks.remove(result)
        return result

    def _device(self, func, args, kwargs) -> torch.device:
        device = func(*args, **kwargs)
        return DEVICE if args[0] in self._marks and device == _HOST else device

    def _to(self, func, args, kwargs) -> Tensor:
        """Return a copy if the device differs, as between host and GPU."""
        x, places = args[0], [*args[1:], *kwargs.values()]
        devices = [torch.device(y) if isinstance(y, str) else y for y in places
                   if isinstance(y, str | torch.device)]  # fmt: skip
        devices += [_device_of(y) if y not in self._marks else DEVICE for y in places
                    if isinstance(y, Tensor)]  # fmt: skip
        if not devices or devices[0].type != "cpu":
            return func(*args, **kwargs)
        to_device = _is_device(devices[0])
        plain = [_HOST if isinstance(y, torch.device | str) else y for y in args[1:]]
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _HOST}
        result = func(x, *plain, **kwargs)
        return result if to_device is (x in self._marks) else self._moved(x, result, to_device)

    def _cpu(self, func, args, kwargs) -> Tensor:
        result = func(*args, **kwargs)
        return self._moved(args[0], result, False) if args[0] in self._marks else result

    def _moved(self, x: Tensor, result: Tensor, to_device: bool) -> Tensor:
        if result.untyped_storage()._cdata == x.untyped_storage()._cdata:
            result = result.clone()
        (self._marks.add if to_device else self._marks.remove)(result)
        return result

    def _numpy(self, func, args, kwargs) -> object:
        frame = caller()
        if args[0] in self._marks and frame is not None and not is_users(frame):
            raise RaceError(f"numpy() of a tensor on the device; copy it to the host{issued_at()}")
        return func(*args, **kwargs)


class _DeviceMarkMode(TorchDispatchMode):
    """Marks tensors that are computed from marked tensors."""

    def __init__(self, marks: DeviceMemory):
        super().__init__()
        self._marks = marks

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        frame = caller()
        if frame is None:
            return func(*args, **kwargs)
        inputs = list(tensors_of(args, kwargs))
        on_device = _is_device(kwargs.get("device")) or any(x in self._marks for _, x in inputs)
        if func is torch.ops.aten.lift_fresh.default:
            on_device = on_device or is_users(frame)
        old = storages_of(inputs)
        result = func(*args, **kwargs)
        if not on_device:
            return result
        for x in made_in(result, old):
            self._marks.add(x)
        if func not in COPIES:  # these write where their target is, whatever they read
            places = written_arguments(func) or ()
            for x in (x for at, x in inputs if at in places):
                self._marks.add(x)
        return result


def _is_device(device: object) -> bool:
    if isinstance(device, str):
        device = torch.device(device)
    return isinstance(device, torch.device) and device == DEVICE


# -- who makes a tensor ----------------------------------------------------------------------


def caller() -> FrameType | None:
    """Return the innermost frame that is neither torch's nor ours; None inside the late
    transport.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith(_TORCH):
            return None if file.startswith((_HERE, HERE)) else frame
        frame = frame.f_back
    return None


def is_users(frame: FrameType) -> bool:
    """Return whether a tensor made in this frame is the user's, or belongs to a layer."""
    if _is_users_own(frame.f_code.co_filename):
        return True
    layer: FrameType | None = frame
    while layer is not None and not _is_users_own(layer.f_code.co_filename):
        instance = layer.f_locals.get("self") if layer.f_code.co_name == "__init__" else None
        if isinstance(instance, nn.Module) and layer.f_code.co_filename.startswith(_LAYERS):
            return True
        layer = layer.f_back
    return False


def _is_users_own(file: str) -> bool:
    return not file.startswith((_PACKAGE, _TORCH)) or file.startswith(_ARGUMENTS)

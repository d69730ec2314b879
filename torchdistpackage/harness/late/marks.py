"""Which memory is taken to be on a device, where all of it is in the host.

One rule: a mark belongs to a storage, so views share it. On the device is what a user's code makes
(a test's body, a layer's weights, arguments), what the package makes with `DEVICE`, and
what is computed from such tensors; all else that the package makes is in host memory.
"""

import sys
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

DEVICE = torch.device("cpu", 0)
"""Where a group of the strict transport has its tensors: torch takes it for the CPU, but says
whether an index was asked for."""

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parents[2])
_ARGUMENTS = str(Path(_PACKAGE, "launch"))
"""Unpacks a user's arguments."""
_LAYERS = str(Path(_PACKAGE, "models")), str(Path(_PACKAGE, "parallel"))
"""Their modules are made where a user makes them, and moved as a whole."""
_OURS = __file__, str(Path(_HERE, "strict.py"))
_KEPT = 4096


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

    def made_at(self, x: Tensor) -> str:
        _, line = self._made.get(x.untyped_storage()._cdata, (None, ""))
        return f", made at {line}," if line else ""

    def remove(self, x: Tensor) -> None:
        if x.layout is torch.strided:
            self._storages.pop(x.untyped_storage()._cdata, None)

    def __contains__(self, x: Tensor) -> bool:
        return x.layout is not torch.strided or x.untyped_storage()._cdata in self._storages


def caller() -> FrameType | None:
    """The innermost frame that is neither torch's nor ours; None inside the late transport."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in _OURS and not file.startswith(_TORCH):
            return None if file.startswith(_HERE) else frame
        frame = frame.f_back
    return None


def is_users(frame: FrameType) -> bool:
    """Whether what is made in this frame is a user's, or part of a layer of the package."""
    if file_is_users(frame):
        return True
    layer: FrameType | None = frame
    while layer is not None and not (file_is_users(layer) and not _is_torchs(layer)):
        own = layer.f_locals.get("self") if layer.f_code.co_name == "__init__" else None
        if isinstance(own, nn.Module) and layer.f_code.co_filename.startswith(_LAYERS):
            return True
        layer = layer.f_back
    return False


def file_is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith(_PACKAGE) or file.startswith(_ARGUMENTS)


def _is_torchs(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_TORCH)

"""easy-model-parallel's functor and what it makes: ours, under its names and with its arguments.

What it had and could not do works: keyword arguments, several outputs, integers, a backward where
nothing moved. `launch` returns what the ranks returned.
"""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from torchdistpackage.compat.emp.log import default_level
from torchdistpackage.compat.emp.transfer import EmptyModule
from torchdistpackage.parallel.placed import functor, launcher, managed
from torchdistpackage.parallel.placed.place import Devices, Place
from torchdistpackage.parallel.placed.program import Program

GRADIENTS = "torchdistpackage.parallel.placed.mail"
"""The logger that DEBUG_BACKWARD opens."""


class Device(Place):
    """A device of one rank."""

    def __init__(self, _device: str | torch.device, rank: int):
        super().__init__(torch.device(_device), (rank,))

    @property
    def _device(self) -> str:
        return str(self.device)


class DeviceManagedTensor(managed.ManagedTensor):
    """A tensor on a device. to_device_counter: what numbers the operations of all ranks."""

    def __init__(
        self,
        tensor: Tensor,
        data_device: Place,
        to_device_counter: Program,
        is_leaf: bool = True,
    ):
        super().__init__(tensor, data_device, to_device_counter, is_leaf)

    @property
    def to_device_counter(self) -> Program:
        """What numbers the operations of all ranks."""
        return self._program


class DeviceManagedModule(managed.ManagedModule):
    """A module on a device; on other ranks an `EmptyModule`."""

    tensor_class = DeviceManagedTensor

    def __init__(self, module: Module, data_device: Place, to_device_counter: Program):
        self.to_device_counter = to_device_counter
        if to_device_counter.is_on(data_device):
            module = module.to(data_device.device)
        else:
            module = EmptyModule()
        super().__init__(module, data_device, to_device_counter)


class DeviceManagedCallable(managed.ManagedOperation):
    """A function that runs on a device."""

    tensor_class = DeviceManagedTensor

    def __init__(self, fn: Callable[..., Any], data_device: Place, to_device_counter: Program):
        self.to_device_counter = to_device_counter
        super().__init__(fn, data_device, to_device_counter)


DeviceManagedOperation = DeviceManagedCallable
"""What its page calls a DeviceManagedCallable."""


class EmpFunctor(functor.DeviceFunctor):
    """Makes tensors, modules and functions belong to a device; see `parallel.placed`.

    _devices: one for each rank, or a list of devices for each.
    """

    tensor_class = DeviceManagedTensor
    module_class = DeviceManagedModule
    operation_class = DeviceManagedCallable

    def __init__(self, _devices: Devices):
        super().__init__(_devices)

    @property
    def to_device_counter(self) -> Program:
        """What numbers the operations of all ranks."""
        return self.program

    @property
    def context_device(self) -> Place | None:
        """The device that it is under."""
        return self._under[-1] if self._under else None

    def make_place(self, devices: Sequence[torch.device], ranks: Sequence[int]) -> Place:
        """A `Device`, or a place of several ranks."""
        if len(ranks) == 1:
            return Device(devices[0], ranks[0])
        return super().make_place(devices, ranks)


DeviceFunctor = EmpFunctor


def launch(
    target: Callable[..., object],
    devices: Devices,
    seed: int = 42,
    backend: str | None = "gloo",
    master_addr: str = "localhost",
    master_port: str = "12355",
    **options: Any,
) -> list[object]:
    """Run `target(devices)` with a rank for each device; what they returned, by rank.

    master_addr, master_port: not needed: the ranks meet at a file. options: of `placed.launch`.
    DEBUG_BACKWARD in the environment writes a line for each gradient that moves, EMP_LOG_LEVEL is
    the level of what is logged to the console.

    Raises:
        PlacementError: `target` does not take one argument, or a device is not there.
        RankError: a rank failed; the text ends with its traceback.
    """
    options = {"backend": backend, "prepare": prepare_logging, **options}
    return launcher.launch(target, devices, seed, **options)


def prepare_logging(rank: int) -> None:
    """What DEBUG_BACKWARD and EMP_LOG_LEVEL ask for, on this rank."""
    debug = os.environ.get("DEBUG_BACKWARD", "") not in ("", "0")
    if not debug and "EMP_LOG_LEVEL" not in os.environ:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"Rank {rank} %(levelname)s %(name)s - %(message)s"))
    log = logging.getLogger("torchdistpackage.parallel.placed")
    log.addHandler(handler)
    log.setLevel(default_level())
    if debug:
        logging.getLogger(GRADIENTS).setLevel(logging.DEBUG)

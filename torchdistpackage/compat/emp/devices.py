"""easy-model-parallel's functor and its classes: `compat.placed` with that library's names and
arguments.

Some things work here that failed there: keyword arguments, several outputs, integers, a backward in
which nothing moves. `launch` returns the results of the ranks.

All ranks call `to_rank_fn`, and all run the backward through it. A placed program (`compat.placed`)
has one order of transfers on all ranks; here autograd decides the order.

A message is a tensor with its shape and dtype: any dtype, any strides, from a CPU or a GPU; it
arrives on the CPU. A tag tells messages apart.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Module

from torchdistpackage.comm.creation import is_joined, world
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.tensor_channel import TensorChannel
from torchdistpackage.comm.tensor_meta import describe
from torchdistpackage.compat.emp.environment import default_level
from torchdistpackage.compat.placed import functor, launcher, managed
from torchdistpackage.compat.placed.place import Devices, Place
from torchdistpackage.compat.placed.program import Program
from torchdistpackage.errors import PlacementError

log = logging.getLogger(__name__)


class EmptyFunction(Function):
    """A zero in place of another rank's result; its gradients are zeros."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in inputs]
        return torch.zeros([])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return tuple(torch.zeros(s, dtype=dtype, device=at) for s, dtype, at in ctx.like)


def empty_fn(*args: Any) -> Tensor:
    """Return a zero with these tensors in its graph."""
    return EmptyFunction.apply(*args)  # type: ignore[return-value]


class EmptyModule(Module):
    """A placeholder for a module on ranks that do not hold it."""

    def get_grad_tensors(self, args: Any) -> list[Tensor]:
        """Return the tensors in nested arguments that require a gradient."""
        return list(self._iter_grad_tensors(args))

    def _iter_grad_tensors(self, x: Any) -> Iterator[Tensor]:
        if isinstance(x, Tensor):
            if x.requires_grad:
                yield x
        elif isinstance(x, list | tuple | dict):
            for part in x.values() if isinstance(x, dict) else x:
                yield from self._iter_grad_tensors(part)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return a zero with the arguments in its graph."""
        return empty_fn(*self.get_grad_tensors((args, kwargs)))


class ToRankFunction(Function):
    """The autograd function of `to_rank_fn`."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, src_rank: int, dst_rank: int, tag: int, dummy: Tensor
    ) -> Tensor:
        rank = world().rank() if is_joined() else 0
        ctx.like = (input.shape, input.dtype, input.device)
        ctx.source = src_rank
        ctx.target = dst_rank
        ctx.tag = tag
        ctx.rank = rank
        if src_rank == dst_rank:
            return input.clone()
        if rank == src_rank:
            send_tensor(input, dst_rank, tag=tag)
        elif rank == dst_rank:
            return receive_tensor(src_rank, tag=tag)
        return torch.zeros([])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (gradient,) = grad_outputs
        shape, dtype, device = ctx.like
        if ctx.source == ctx.target:
            return gradient, None, None, None, None
        returned = torch.zeros(shape, dtype=dtype, device=device)
        if ctx.rank == ctx.source:
            log.debug("receiving a gradient %s from rank %d", tuple(shape), ctx.target)
            returned = receive_tensor(ctx.target, tag=ctx.tag).to(device)
        elif ctx.rank == ctx.target:
            log.debug("sending a gradient %s to rank %d", tuple(gradient.shape), ctx.source)
            send_tensor(gradient, ctx.source, tag=ctx.tag)
        return returned, None, None, None, None


def to_rank_fn(input: Tensor, src_rank: int, tgt_rank: int, tag: int = 0) -> Tensor:
    """Send `input` of rank `src_rank` to rank `tgt_rank`; other ranks get a zero.

    All ranks call it. The backward sends the gradient back, for dtypes that have one.

    Raises:
        PlacementError: on all ranks: `src_rank` or `tgt_rank` is not a rank of the world.
    """
    for rank in (src_rank, tgt_rank):
        check_rank("to_rank_fn", rank)
    dummy = torch.empty([], requires_grad=input.is_floating_point() or input.is_complex())
    return ToRankFunction.apply(input, src_rank, tgt_rank, tag, dummy)  # type: ignore[return-value]


DTYPE_MAP = {
    torch.float32: 0,
    torch.float64: 1,
    torch.int32: 2,
    torch.int64: 3,
    torch.int16: 4,
    torch.int8: 5,
    torch.uint8: 6,
    torch.bool: 7,
    torch.bfloat16: 8,
    # it had no numbers for the ones below
    torch.float16: 9,
    torch.complex64: 10,
    torch.complex128: 11,
    torch.float8_e4m3fn: 12,
    torch.float8_e5m2: 13,
    torch.uint16: 14,
    torch.uint32: 15,
    torch.uint64: 16,
}
"""Numbers of dtypes in its messages; ours carry their names, so other dtypes travel too."""
REV_DTYPE_MAP = {number: dtype for dtype, number in DTYPE_MAP.items()}

_FIRST_TAG = 0x10000
_NUM_TAGS = 0x40000000
_CPU = torch.device("cpu")


def send_tensor(tensor: Tensor, dst: int, tag: int = 0, debug: bool = False) -> None:
    """Send `tensor` to rank `dst`, which calls `receive_tensor` with the same tag, and wait.

    Raises:
        PlacementError: it is not a dense tensor with memory, or `dst` is not another rank.
    """
    _check_peer("send_tensor", dst)
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        raise PlacementError(
            f"send_tensor: only dense tensors with memory can be sent, not a "
            f"{type(tensor).__name__}"
            + (f" ({tensor.layout}, {tensor.device})" if isinstance(tensor, Tensor) else "")
        )
    sent = tensor.detach().cpu()
    channel = _channel(tag)
    spec = channel.send_header(describe(sent), dst)
    channel.send(spec, [sent], dst)
    channel.settle()
    if debug:
        log.warning("sent %s to rank %d", spec.description, dst)


def receive_tensor(src: int, tag: int = 0, debug: bool = False) -> Tensor:
    """Receive the tensor that rank `src` sends with this tag.

    Raises:
        PlacementError: `src` is not another rank.
    """
    _check_peer("receive_tensor", src)
    channel = _channel(tag)
    spec = channel.receive_header(src)
    # the caller gets a tensor and no handle, so the message must have arrived
    (received,) = channel.receive(spec, src).wait()
    assert received is not None
    if debug:
        log.warning("received %s from rank %d", spec.description, src)
    return received


def check_rank(used_by: str, rank: object) -> None:
    """Check that `rank` is a rank of the world; raises PlacementError."""
    size = world().size() if is_joined() else 1
    if not isinstance(rank, int) or not 0 <= rank < size:
        raise PlacementError(
            f"{used_by}: rank {rank!r} is not one of the {size} ranks; use 0 to {size - 1}"
        )


def _check_peer(used_by: str, rank: int) -> None:
    check_rank(used_by, rank)
    if not is_joined() or rank == world().rank():
        raise PlacementError(f"{used_by}: rank {rank} is this rank itself; name another one")


def _channel(tag: int) -> TensorChannel:
    return TensorChannel(on_cpu(world()), _CPU, tag=_FIRST_TAG + tag % _NUM_TAGS)


GRADIENTS = "torchdistpackage.compat.placed.mail"
"""The logger that DEBUG_BACKWARD sets to DEBUG."""


class Device(Place):
    """A device of one rank."""

    def __init__(self, _device: str | torch.device, rank: int):
        super().__init__(torch.device(_device), (rank,))

    @property
    def _device(self) -> str:
        return str(self.device)


class DeviceManagedTensor(managed.ManagedTensor):
    """A tensor on a device. to_device_counter: numbers the operations of all ranks."""

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
        """The program, which numbers the operations of all ranks."""
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
"""The name of DeviceManagedCallable on its page."""


class EmpFunctor(functor.DeviceFunctor):
    """Makes tensors, modules and functions belong to a device; see `compat.placed`.

    _devices: one device for each rank, or a list of devices for each.
    """

    tensor_class = DeviceManagedTensor
    module_class = DeviceManagedModule
    operation_class = DeviceManagedCallable

    def __init__(self, _devices: Devices):
        super().__init__(_devices)

    @property
    def to_device_counter(self) -> Program:
        """The program, which numbers the operations of all ranks."""
        return self.program

    def in_context(self) -> bool:
        """Return whether the functor is under a device."""
        return bool(self._under)

    @property
    def context_device(self) -> Place | None:
        """The device that the functor is under, or None."""
        return self._under[-1] if self._under else None

    def make_place(self, devices: Sequence[torch.device], ranks: Sequence[int]) -> Place:
        """Return a `Device`, or a place of several ranks."""
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
    """Run `target(devices)` with a rank for each device; returns the results by rank.

    master_addr, master_port: ignored, as the ranks meet at a file. options: of `placed.launch`.
    Two environment variables: DEBUG_BACKWARD logs a line for each gradient that moves, and
    EMP_LOG_LEVEL is the log level of the console.

    Raises:
        PlacementError: `target` does not take one argument, or a device is missing.
        RankError: a rank failed; the text ends with its traceback.
    """
    options = {"backend": backend, "prepare": prepare_logging, **options}
    return launcher.launch(target, devices, seed, **options)


def prepare_logging(rank: int) -> None:
    """Set up this rank's logs as DEBUG_BACKWARD and EMP_LOG_LEVEL say."""
    debug = os.environ.get("DEBUG_BACKWARD", "") not in ("", "0")
    if not debug and "EMP_LOG_LEVEL" not in os.environ:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"Rank {rank} %(levelname)s %(name)s - %(message)s"))
    log = logging.getLogger("torchdistpackage.compat.placed")
    log.addHandler(handler)
    log.setLevel(default_level())
    if debug:
        logging.getLogger(GRADIENTS).setLevel(logging.DEBUG)

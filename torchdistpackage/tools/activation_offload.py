"""Offload of activations: the tensors that a module saves for its backward wait in host memory.

A module's forward saves tensors through autograd's hooks (`torch.autograd.graph`). When it ends,
their storages are copied to pinned memory while the next module computes; when that one ends, the
device's memory is free. The first tensor that a backward asks for brings back all tensors of its
module, and meanwhile starts to bring back those of the module before it. A restored tensor has the
storage, offset and strides of the saved one, so kernels compute the same bits.

Copies run on a stream of their own, beside the kernels. Each direction first waits for the stream
that computes, and memory is given back only after the copy out of it has ended.

Weights stay where they are, as do arguments without a gradient (masks, tables of positions), which
the caller keeps for all modules anyway. On a CPU the copies run in order and save no memory.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torchdistpackage.comm.nested import leaves_of
from torchdistpackage.comm.streams import CudaStreams, Stream, streams_of

MIN_BYTES = 1024
"""Smaller storages stay on the device: a copy costs more than they take."""
_MOST_NODES = 4
"""Most operations between a weight and the tensor that a matmul saves of it: a cast and views."""

Forward = Callable[..., Any]


class ActivationOffload:
    """Copies of the tensors that modules of one device save, to the host and back.

    streams: the streams to copy on; default: those of a CUDA device. On a CPU copies run in order.
    """

    def __init__(self, device: torch.device, streams: CudaStreams | None = None):
        self.device = torch.empty(0, device=device).device  # "cuda" is the current device's
        self.streams = streams or streams_of(self.device)
        self.copies: Stream = None if self.streams is None else self.streams.stream()
        """One stream for both directions: the host's memory is written before it is read."""
        self._last: ReferenceType[_ModuleStorages] | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "ActivationOffload":
        return self  # copies of a module share the stream

    def run(self, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Return `forward(*args, **kwargs)`, a forward of `module`, and offload what it saves."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        previous = None if self._last is None else self._last()
        saved = _ModuleStorages(self, previous, _stay(module, args, kwargs))
        with saved_tensors_hooks(saved.pack, _unpack):
            output = forward(*args, **kwargs)
        saved.copy_to_host()
        if previous is not None:
            previous.free()
        self._last = ref(saved)
        return output


class OffloadedForward:
    """A forward of `module` that offloads the tensors it saves."""

    def __init__(self, module: nn.Module, offload: ActivationOffload):
        self.module, self.offload = module, offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.module).forward
        return self.offload.run(self.module, forward, self.module, *args, **kwargs)


def offload_modules(model: nn.Module, names: Iterable[str], offload: ActivationOffload) -> None:
    """Offload what the modules called `names` save, in place; none may be inside another."""
    for name in names:
        module = model.get_submodule(name)
        module.forward = OffloadedForward(module, offload)


class _StorageCopy:
    """A storage that a module saved.

    source: a tensor on this storage, until the host has its bytes. version: the version counter of
    `source` when it was saved. host, device: the bytes in that memory, or None.
    """

    __slots__ = ("__weakref__", "device", "host", "module", "source", "version")

    def __init__(self, source: Tensor, module: "_ModuleStorages"):
        self.source: Tensor | None = source
        self.version, self.module = source._version, module
        self.host: Tensor | None = None
        self.device: Tensor | None = None

    def __del__(self) -> None:
        # the allocator may hand this memory out again at once, so the copies must end before
        self.module.wait_for_copies()


class _TensorInStorage:
    """A tensor's position in its storage; autograd holds this instead of the tensor."""

    __slots__ = ("dtype", "offset", "shape", "storage", "stride")

    def __init__(self, x: Tensor, storage: _StorageCopy):
        self.storage = storage
        self.dtype, self.offset = x.dtype, x.storage_offset()
        self.shape, self.stride = x.shape, x.stride()

    def restore(self) -> Tensor:
        with torch.no_grad():
            of = self.storage.module.bytes_of(self.storage)
            item = of.as_strided((self.dtype.itemsize,), (1,), 0)
            return item.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


class _ModuleStorages:
    """The storages that one forward of a module saved. Only autograd keeps them alive.

    previous: the storages of the forward before; its backward probably comes next. stay: storages
    that are not offloaded.
    """

    def __init__(
        self, offload: ActivationOffload, previous: "_ModuleStorages | None", stay: set[int]
    ) -> None:
        self._offload, self._stay = offload, stay
        self._before = None if previous is None else ref(previous)
        self._by_key: dict[tuple[int, int], _StorageCopy] = {}
        """Tensors by storage and version, while the forward runs."""
        self._storages: Sequence[ReferenceType[_StorageCopy]] = ()
        self._copied: Any = None
        self._loaded: Any = None

    # -- forward ---------------------------------------------------------------------------------

    def pack(self, x: Tensor) -> "Tensor | _TensorInStorage":
        """Return the object that autograd keeps for `x`: its position, or `x` if it stays."""
        if not self._is_offloaded(x):
            # a result that held its own node would be a cycle
            return x if x.is_leaf else x.detach()
        key = x.untyped_storage().data_ptr(), x._version
        if key not in self._by_key:
            self._by_key[key] = _StorageCopy(x.detach(), self)
        return _TensorInStorage(x, self._by_key[key])

    def _is_offloaded(self, x: Tensor) -> bool:
        if type(x) is not Tensor or x.device != self._offload.device:
            return False
        if x.layout is not torch.strided or x.is_conj() or x.is_neg():
            return False
        storage = x.untyped_storage()
        if storage.nbytes() < MIN_BYTES or storage.data_ptr() in self._stay:
            return False
        is_input = x.is_leaf and x.requires_grad  # its owner waits for its gradient
        return not is_input and not _comes_of_weight(x)

    def copy_to_host(self) -> None:
        """Start to copy all storages to the host, after the work queued on the current stream.

        Raises:
            RuntimeError: a tensor was changed in place after it was saved.
        """
        streams, copies = self._offload.streams, self._offload.copies
        if streams is not None and self._by_key:
            # the copies may read only what the forward has computed by now
            copies.wait_event(streams.current().record_event())
        for storage in self._by_key.values():
            assert storage.source is not None
            source = storage.source
            if source._version != storage.version:
                # autograd compares only the versions of tensors that it holds itself
                raise RuntimeError(
                    f"a tensor of shape {tuple(source.shape)} that the backward needs was changed "
                    f"in place: it is at version {source._version}, and was saved at version "
                    f"{storage.version}; use an operation that makes a new tensor"
                )
            of = _bytes_of(source)
            if streams is None:
                storage.host = of.clone()
            else:
                storage.host = streams.pinned(len(of))
                streams.copy(copies, storage.host, of, keeps=False)
        if streams is not None and self._by_key:
            self._copied = copies.record_event()
        self._storages = [ref(storage) for storage in self._by_key.values()]
        self._by_key = {}

    def free(self) -> None:
        """Free the device's memory; later work on the current stream waits for the copies."""
        self._wait(self._copied)
        self._copied = None
        for storage in self._alive():
            storage.source = None

    # -- backward --------------------------------------------------------------------------------

    def bytes_of(self, storage: _StorageCopy) -> Tensor:
        """Return the bytes of a storage on the device, and start to load the module before it."""
        self.load()
        if (previous := None if self._before is None else self._before()) is not None:
            previous.load()
        if storage.source is not None:
            return _bytes_of(storage.source)
        self._wait(self._loaded)
        assert storage.device is not None
        return storage.device

    def load(self) -> None:
        """Start to copy the storages to the device that are not there."""
        storages = [x for x in self._alive() if x.source is None and x.device is None]
        streams, copies = self._offload.streams, self._offload.copies
        if not storages:
            return
        for storage in storages:
            assert storage.host is not None
            # allocated on the current stream, because that frees it; the copies below wait for
            # that stream, so they cannot overwrite what used this memory before
            num_bytes, device = len(storage.host), self._offload.device
            storage.device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if streams is not None:
            # the current stream may still use the memory that the allocator has just handed out
            copies.wait_event(streams.current().record_event())
        for storage in storages:
            assert storage.host is not None and storage.device is not None
            if streams is None:
                storage.device.copy_(storage.host)
            else:
                streams.copy(copies, storage.device, storage.host, keeps=False)
        if streams is not None:
            self._loaded = copies.record_event()

    def wait_for_copies(self) -> None:
        """Make later work on the current stream wait for all copies."""
        self._wait(self._copied)
        self._wait(self._loaded)

    def _alive(self) -> list[_StorageCopy]:
        return [x for reference in self._storages if (x := reference()) is not None]

    def _wait(self, event: Any) -> None:
        streams = self._offload.streams
        if event is not None and streams is not None:
            # the stream waits for the copy, and the host goes on to queue kernels
            streams.current().wait_event(event)


def _unpack(packed: Tensor | _TensorInStorage) -> Tensor:
    return packed.restore() if isinstance(packed, _TensorInStorage) else packed


def _bytes_of(x: Tensor) -> Tensor:
    """Return all of the storage of `x`, as bytes."""
    item = x.as_strided((1,), (1,), 0).view(torch.uint8)
    return item.as_strided((x.untyped_storage().nbytes(),), (1,))


def _stay(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """Return the storages of weights, buffers and arguments without a gradient."""
    arguments = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
    inputs = [x for x in arguments if not x.requires_grad]
    everything = [*module.parameters(), *module.buffers(), *inputs]
    return {x.untyped_storage().data_ptr() for x in everything if x.layout is torch.strided}


def _comes_of_weight(x: Tensor) -> bool:
    """Return whether `x` is a weight that was cast or viewed: its owner holds it anyway."""
    node: Any = x.grad_fn
    for _ in range(_MOST_NODES):
        if node is None or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
    return False

"""Streams of a simulated device: record what runs on which stream, and refuse races.

All runs at once, in the order of the program, so numbers are right whatever the streams.
What a device could run in another order is a mistake because nothing orders it (accesses.py), not
because it did.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchdistpackage.harness.late.accesses import HOST, Access, History
from torchdistpackage.harness.late.call import LateCall, own_operations
from torchdistpackage.harness.late.world import (
    COPIES,
    Observer,
    Queue,
    made_in,
    storages_of,
    tensors_of,
    world,
    written_arguments,
)
from torchdistpackage.thread_ranks.own_backend import Tensors


class _Now(threading.local):
    """The current stream of each thread."""

    stream = 0


_now = _Now()
_histories: list[History] = []


class StreamDouble:
    """A replacement of `torch.cuda.Stream`; `stream_id` names an existing one."""

    device_index, device_type = 0, 1

    def __init__(self, device: object = None, priority: int = 0, *, stream_id=None, **_: object):
        self.stream_id = _histories[-1].stream() if stream_id is None else stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StreamDouble) and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def record_event(self, event: "EventDouble | None" = None) -> "EventDouble":
        event = event or EventDouble()
        event.record(self)
        return event

    def wait_event(self, event: "EventDouble") -> None:
        event.wait(self)

    def wait_stream(self, stream: "StreamDouble") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        _histories[-1].host_waits_for(self.stream_id)

    def query(self) -> bool:
        return True


class EventDouble:
    """A replacement of `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, **_: object):
        self._number: int | None = None

    def record(self, stream: StreamDouble | None = None) -> None:
        history = _histories[-1]
        self._number = history.event() if self._number is None else self._number
        history.record(self._number, (stream or _current()).stream_id)

    def wait(self, stream: StreamDouble | None = None) -> None:
        if self._number is not None:
            _histories[-1].wait((stream or _current()).stream_id, self._number)

    def synchronize(self) -> None:
        if self._number is not None:
            _histories[-1].host_waits_for_event(self._number)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "EventDouble") -> float:
        return 0.0


def _current(device: object = None) -> StreamDouble:
    return StreamDouble(stream_id=_now.stream)


def _set(stream: StreamDouble) -> None:
    _now.stream = stream.stream_id


@contextmanager
def _on(stream: StreamDouble | None) -> Iterator[None]:
    previous = _now.stream
    _now.stream = previous if stream is None else stream.stream_id
    try:
        yield
    finally:
        _now.stream = previous


class _StreamsDouble:
    """A replacement of `CudaStreams`.

    All tensors are in host memory here, so those that would be pinned are marked.
    """

    def __init__(self, device: torch.device):
        self.stream, self.current, self.on = StreamDouble, _current, _on

    def copy(self, stream: StreamDouble, to: Tensor, source: Tensor, *, keeps: bool = True) -> None:
        history = _histories[-1]
        with own_operations():
            to.copy_(source)
        history.run(stream.stream_id, "copy", [source], [to])
        for x in (to, source) if keeps else ():
            history.memory(x, stream.stream_id).kept_for.add(stream.stream_id)

    def keep(self, x: Tensor) -> None:
        x.record_stream(self.current())  # type: ignore[arg-type]

    def pinned(self, num_bytes: int) -> Tensor:
        x = torch.empty(num_bytes, dtype=torch.uint8)
        _histories[-1].memory(x, HOST).on_host = True
        return x


class _AccessMode(TorchDispatchMode):
    """Records what each operation reads and writes."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, history = kwargs or {}, _histories[-1]
        with torch._C.DisableTorchFunctionSubclass():
            inputs = [(at, x) for at, x in tensors_of(args, kwargs) if x.layout is torch.strided]
            places = [history.is_on_host(x) for _, x in inputs]
            old = storages_of(inputs)
            result = func(*args, **kwargs)
            created = made_in(result, old)
            stream = HOST if any(places) else _now.stream
            crosses = func in COPIES and any(places) and not all(places)
            for x in created:
                history.memory(x, _now.stream).on_host = stream == HOST
            reads, writes = [], []
            if (written := written_arguments(func)) is not None:
                reads = [x for at, x in inputs if at not in written]
                writes = [x for at, x in inputs if at in written]
            if not func._schema.name.startswith(("aten::empty", "aten::new_empty")):
                writes += created
            if not reads and not writes:
                return result
            history.run(_now.stream if crosses else stream, str(func), reads, writes)
            if crosses or (stream != HOST and func in _READ_BY_HOST):
                history.host_waits_for(_now.stream)
        return result


_READ_BY_HOST = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}


class _Calls(Observer):
    """Runs collectives and messages; asynchronous ones run on a stream of their group."""

    def __init__(self) -> None:
        self._streams: dict[Queue, int] = {}
        self._ends: dict[LateCall, tuple[int, list[Access]]] = {}

    def called(
        self, queue: Queue, name: str, reads: Tensors, writes: Tensors, call: LateCall | None
    ) -> None:
        history = _histories[-1]
        for x in (*reads, *writes):
            history.memory(x, _now.stream)
        if call is None:
            history.run(_now.stream, name, reads, writes)
            return
        if queue not in self._streams:
            self._streams[queue] = history.stream(f"the stream of{name.partition(' over')[2]}")
        stream, begin, end = self._streams[queue], history.event(), history.event()
        history.record(begin, _now.stream)
        # as NCCL does: its own stream begins after what the caller has queued so far
        history.wait(stream, begin)
        accesses = history.run(stream, name, reads, writes)
        for access in accesses:
            access.in_flight = True
        history.record(end, stream)
        self._ends[call] = end, accesses

    def waited(self, call: LateCall) -> None:
        if call in self._ends:
            end, accesses = self._ends[call]
            # as a wait for an NCCL call: it holds up the caller's stream, not the host
            _histories[-1].wait(_now.stream, end)
            for access in accesses:
                access.in_flight = False


_OF_A_DEVICE: dict[tuple[str, str], object] = {
    ("ddp.grad_hooks", "device_index"): lambda parameter: 0,
    ("ddp.grad_hooks", "current_stream"): lambda place: (_now.stream, 0, 1),
    ("ddp.zero.offload", "streams_of"): _StreamsDouble,
    ("ddp.zero.param_buffer", "streams_of"): _StreamsDouble,
    ("parallel.expert.dispatch", "streams_of"): _StreamsDouble,
    ("checkpoint.snapshot", "streams_of"): _StreamsDouble,
    ("tools.activation_offload", "streams_of"): _StreamsDouble,
}
"""Names in modules that query the device, in the form that replaces them."""


@contextmanager
def ordered_streams() -> Iterator[History]:
    """Replace `torch.cuda`'s streams and events by doubles inside the block, and refuse work that
    they do not order; with `mirror`, calls of its groups too.

    Raises:
        RaceError: two accesses of the same bytes, of which one writes, are not ordered.
        ConfigError: this torch has other clocks.
    """
    history = History()
    changes: list[tuple[object, str, object]] = [
        (torch.cuda, "Stream", StreamDouble),
        (torch.cuda, "Event", EventDouble),
        (torch.cuda, "current_stream", _current),
        (torch.cuda, "stream", _on),
        (torch.cuda, "set_stream", _set),
        (Tensor, "record_stream", _record_stream),
        (torch.UntypedStorage, "resize_", _resizing(torch.UntypedStorage.resize_)),
        *((Tensor, name, _read(getattr(Tensor, name))) for name in ("tolist", "numpy", "cpu")),
        *((import_module(f"torchdistpackage.{module}"), name, value)
          for (module, name), value in _OF_A_DEVICE.items()),
    ]  # fmt: skip
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(patch.object(world, "observer", _Calls()))
        _histories.append(history)
        stack.callback(_histories.pop)
        previous, _now.stream = _now.stream, 0
        stack.callback(setattr, _now, "stream", previous)
        stack.enter_context(_AccessMode())
        yield history
        history.see_frees()


def _record_stream(x: Tensor, stream: StreamDouble) -> None:
    _histories[-1].memory(x, _now.stream).kept_for.add(stream.stream_id)


def _read(method: Callable[..., object]) -> Callable[..., object]:
    """Note that the host reads `x`."""

    def function(x: Tensor, *args, **kwargs) -> object:
        history = _histories[-1]
        on_host = history.is_on_host(x)
        history.run(HOST if on_host else _now.stream, method.__name__, [x], [])
        if not on_host:
            history.host_waits_for(_now.stream)
        return method(x, *args, **kwargs)

    return function


def _resizing(resize: Callable[..., object]) -> Callable[..., object]:
    def function(storage: torch.UntypedStorage, size: int) -> object:
        if size != storage.nbytes():
            _histories[-1].resized(storage, _now.stream, f"resize_({size})")
        return resize(storage, size)

    return function

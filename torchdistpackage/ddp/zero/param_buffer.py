"""A bucket's parameters: the own slice is stepped, all are gathered, and reads wait for that.

Parameters are views of one flat tensor, of which this rank owns a slice. Where the optimizer may
work on that slice itself it does; else it works on `master`, a copy of the slice that is wider, or
elsewhere, or there while the rest is freed, and each gather begins with writing it back.

While its elements travel a parameter is an `UngatheredParameter`, and whatever reads its elements
first makes its buffer `wait_gathered`. So no hook has to know which module uses which parameter.

Masters, sums of gradients and what the optimizer steps are copies of slices in a `MasterStore`: on
the slices' own device here; offload.py has another store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group, Work, broadcast
from torchdistpackage.comm.transport.sharded_flat import prepost_all_gather_v
from torchdistpackage.ddp.zero.options import ZeroOptions
from torchdistpackage.ddp.zero.param_shard import FlatLayout

Need = WeakMethod[Callable[["ParamBuffer"], None]]
"""Called when a freed parameter is read, to `fetch` it or raise why not."""


class ParamBuffer:
    """Takes over the parameters of `layout`; afterwards they are views of `flat`.

    layout: which parameter lies where, and which rank owns what.
    options: of the optimizer; this reads them where it does what they ask for.
    replicas: ranks with a copy of this rank's slice.
    store: where the copy is that the optimizer works on, if it is elsewhere.
    on_read: called where parameters are freed; its owner is kept while they are.

    Others may read these; methods of this class alone change them:

    flat: all parameters side by side; without memory while `is_free`.
    slice: the part of `flat` that this rank owns.
    master: the copy that is stepped, or None.
    is_free: the memory of `flat` was given back, until `fetch` (stage 3).
    """

    def __init__(
        self,
        layout: FlatLayout,
        options: ZeroOptions,
        replicas: Group | None = None,
        store: MasterStore | None = None,
        on_read: Need | None = None,
    ):
        first = layout.members[0]
        self.layout, self._wire_dtype = layout, options.param_dtype(first)
        self._on_read = on_read if options.gathers(first) else None
        # While freed: keeps the optimizer that can fetch, even where its user has dropped it, since
        # the module's parameters are of no use without it.
        self._keeps_owner: Callable[[ParamBuffer], None] | None = None
        self._store = store or MasterStore()
        self._parameters = [spec.parameter for spec in layout.members]
        self._kinds = [type(parameter) for parameter in self._parameters]  # classes to give back
        self.flat = self._parameters[0].detach().new_zeros(layout.num_elements)
        with torch.no_grad():
            for parameter, view in zip(self._parameters, layout.views(self.flat), strict=True):
                view.copy_(parameter)
                parameter.data = view
            broadcast(self.flat, layout.group)
            if replicas is not None:
                broadcast(self.flat, replicas)
        self.slice = layout.mine(self.flat)
        is_copy = options.is_rounded(first) or options.gathers(first) or store is not None
        master_dtype = options.shard_dtype(first)
        self.master = self._store.allocate(self.slice, master_dtype) if is_copy else None
        # rounded for the wire straight from there: mine is overwritten by what all others have
        self._sends_master = store is None and self._wire_dtype is not None
        self.refresh()
        self._num_bytes = self.flat.untyped_storage().nbytes()
        self._start_gather: Callable[[], Work] | None = None  # of the gather that is expected
        self._work: Work | None = None  # the gather under way
        self._streams = streams_of(self.flat.device)
        self._began_on: Stream | None = None  # the stream on which the gather was begun
        self.is_free = False

    @property
    def values(self) -> Tensor:
        """The elements that I own, on which the optimizer works."""
        return self.slice if self.master is None else self.master

    def refresh(self) -> None:
        """Masters become what the parameters are."""
        if self.master is not None:
            self._store.offload(self.master, self.slice)
            self.wait()

    def wait(self) -> None:
        """Wait until the host may write to what the optimizer works on."""
        if self.master is not None:
            self._store.wait(self.master)

    def expect(self) -> None:
        """Be ready for what others send; the parameters are not read from here until `arrive`."""
        self.arrive()
        layout, mine = self.layout, self.master if self._sends_master else None
        self._start_gather = prepost_all_gather_v(
            self.flat, layout.bounds, layout.group, wire_dtype=self._wire_dtype, mine=mine
        )

    def send(self) -> None:
        """The optimizer has stepped: begin the gather. Parameters are absent until `arrive`."""
        self.changed()
        self._begin_gather()
        if self.layout.group.size() > 1:
            self._mark_ungathered()

    def arrive(self) -> None:
        """Wait for the gather, if there is one."""
        if self._work is not None:
            self._wait_on_streams() if self._streams is not None else self._work.wait()
            self._work = None
            for parameter, kind in zip(self._parameters, self._kinds, strict=True):
                mark_gathered(parameter, kind)

    def free(self) -> None:
        """Give back the memory of all but my master. Parameters are absent until `fetch`."""
        if not self.is_free:
            self.arrive()
            self._mark_ungathered()
            self.is_free = True
            if self._on_read is not None:
                self._keeps_owner = self._on_read()
            if self._streams is not None:
                # a forward may read them on another stream than that on which they were made
                self._streams.keep(self.flat)
            # views that autograd keeps are of this storage, so it is the same that comes back
            self.flat.untyped_storage().resize_(0)

    def fetch(self) -> None:
        """Begin to gather what was freed; all ranks of the group call it."""
        if self.is_free:
            self.flat.untyped_storage().resize_(self._num_bytes)
            self.is_free, self._keeps_owner = False, None
            self._begin_gather()

    def wait_gathered(self, parameter: nn.Parameter) -> None:
        """Return when it is gathered, or raise and say what the caller should do."""
        if self._on_read is not None and (need := self._on_read()) is not None:
            need(self)
        self.arrive()

    def changed(self) -> None:
        """A graph of before this step that is still alive must see that its weights changed."""
        torch.autograd.graph.increment_version(self._parameters)

    def _wait_on_streams(self) -> None:
        """Also on the stream that began the gather, after which others are ordered."""
        assert self._work is not None and self._streams is not None
        reader, began_on = self._streams.current(), self._began_on
        assert began_on is not None
        with self._streams.on(began_on):
            self._work.wait()
        if reader != began_on:
            reader.wait_event(began_on.record_event())

    def _mark_ungathered(self) -> None:
        for parameter in self._parameters:
            mark_ungathered(parameter, self)

    def _begin_gather(self) -> None:
        if self._start_gather is None:
            self.expect()
        if self.master is not None and not self._sends_master:
            self._store.to_device(self.master, self.slice)
        assert self._start_gather is not None
        if self._streams is not None:
            self._began_on = self._streams.current()
        self._work, self._start_gather = self._start_gather(), None


class UngatheredParameter(nn.Parameter):
    """A parameter whose elements are elsewhere for now: its buffer can `wait_gathered` them."""

    source: ParamBuffer

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func not in _PASSIVE:
            for parameter in [*_ungathered_in(args), *_ungathered_in((kwargs or {}).values())]:
                wait_gathered(parameter)  # unless it came together with one before it
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    # both note the class before they read the elements, so they begin anew once it is right

    def __deepcopy__(self, memo):
        self.source.wait_gathered(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol):
        self.source.wait_gathered(self)
        return self.__reduce_ex__(protocol)


def wait_gathered(parameter: Tensor) -> None:
    """Return when its elements are there."""
    if type(parameter) is UngatheredParameter:
        parameter.source.wait_gathered(parameter)


def mark_ungathered(parameter: nn.Parameter, source: ParamBuffer) -> None:
    """Note that the elements of `parameter` are elsewhere from now on."""
    parameter.__class__ = UngatheredParameter
    parameter.source = source


def mark_gathered(parameter: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Its elements are there; `kind` is the class it had."""
    if type(parameter) is UngatheredParameter:
        parameter.__class__ = kind
        del parameter.source


def _ungathered_in(values) -> Iterator[UngatheredParameter]:
    for value in values:
        if type(value) is UngatheredParameter:
            yield value
        elif isinstance(value, tuple | list):
            yield from _ungathered_in(value)
        elif isinstance(value, dict):
            yield from _ungathered_in(value.values())


_METHODS = (
    *("dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point"),
    *("nelement", "numel", "register_hook", "register_post_accumulate_grad_hook"),
    *("requires_grad_", "size", "stride", "__hash__", "__len__"),
)
_ATTRIBUTES = (
    *("device", "dtype", "grad", "grad_dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf"),
    *("is_sparse", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape"),
)
_PASSIVE = {
    *(getattr(Tensor, name) for name in _METHODS),
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(getattr(Tensor, name).__set__ for name in ("grad", "grad_dtype", "requires_grad")),
    Tensor.grad.__delete__,
}
"""Functions of torch that read no element."""


Stream = Any  # torch.cuda's, or a test's double of it


class MasterStore:
    """Copies of slices on their own device, in order on the current stream.

    `host` is memory from `allocate`, `device` a slice of a bucket. ahead: buckets whose sums land
    before one is stepped, so that copies have begun meanwhile.
    """

    ahead = 0

    def allocate(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """An empty tensor of the shape of `like`."""
        return torch.empty_like(like, dtype=dtype)

    def offload(self, host: Tensor, device: Tensor) -> None:
        """Begin to copy; `device` may go at once, and be overwritten after `free(host)`."""
        if host is not device:
            host.copy_(device)

    def to_device(self, host: Tensor, device: Tensor) -> None:
        """Copy and cast on the current stream; `host` must stay as it is until `wait(host)`."""
        device.copy_(host)

    def here(self, host: Tensor) -> Tensor:
        """`host`, or a copy of it, where slices are, to be added to on the current stream."""
        return host

    def free(self, host: Tensor) -> None:
        """Let kernels that follow on the current stream overwrite what was copied to `host`."""

    def wait(self, *hosts: Tensor) -> None:
        """The host waits until it may read and write these, by default all; the device goes on."""

    def stepping(self) -> AbstractContextManager[object]:
        """Around a step of what is kept here."""
        return nullcontext()


class CudaStreams:
    """The streams of one device."""

    def __init__(self, device: torch.device):
        self._device = device

    def current(self) -> Stream:
        """The one that computes, as the caller's thread has it."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Inside, it is the current one."""
        return torch.cuda.stream(stream)

    def keep(self, x: Tensor) -> None:
        """The memory of `x` is not given away before the current stream is done with it."""
        x.record_stream(self.current())


def streams_of(device: torch.device) -> CudaStreams | None:
    """None where there are none: the host does all, in order."""
    return CudaStreams(device) if device.type == "cuda" else None

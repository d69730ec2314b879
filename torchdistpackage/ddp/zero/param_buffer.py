"""A bucket's parameters: the optimizer steps this rank's slice, and reads wait for the gather.

Parameters are views of one flat tensor, of which this rank owns a slice. The optimizer works on
that slice if it can. Otherwise it works on `master`, a copy of the slice: in a wider dtype, in
other memory, or kept while the rest is freed. Each gather then begins by writing the master back.

While its elements are in flight a parameter is an `UngatheredParameter`, and an operation that
reads its elements first makes its buffer `wait_gathered`. So no hook needs to know which module
uses which parameter.

Masters and summed gradients are copies of slices in a `MasterStore`: here on the slices' own
device; offload.py has another store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group, Work, broadcast
from torchdistpackage.comm.streams import Stream, streams_of
from torchdistpackage.comm.transport.sharded_flat import prepost_all_gather_v
from torchdistpackage.ddp.zero.options import ZeroOptions
from torchdistpackage.ddp.zero.param_shard import FlatLayout

Need = WeakMethod[Callable[["ParamBuffer"], None]]
"""A method called when a freed parameter is read; it must `fetch` it or raise."""


class ParamBuffer:
    """The flat memory of one bucket's parameters, which become views of it.

    layout: the place of each parameter, and the elements that each rank owns.
    options: the options of the optimizer.
    replicas: ranks with a copy of this rank's slice.
    store: the place of the copy that the optimizer works on, if it is elsewhere.
    on_read: called when a freed parameter is read; its owner is kept alive while they are freed.

    Other files may read these attributes; only methods of this class change them:

    flat: all parameters side by side; it has no memory while `is_free`.
    slice: the part of `flat` that this rank owns.
    master: the copy that the optimizer steps, or None.
    is_free: the memory of `flat` is freed until `fetch` (stage 3).
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
        # While parameters are freed, keep the optimizer alive that can fetch them, even if its user
        # has dropped it: without it the module is unusable.
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
        # Round for the wire directly from the master. The gather overwrites this rank's slice too,
        # so that all ranks end with the same rounded parameters.
        self._sends_master = store is None and self._wire_dtype is not None
        self.refresh()
        self._num_bytes = self.flat.untyped_storage().nbytes()
        self._start_gather: Callable[[], Work] | None = None  # of the gather that is expected
        self._work: Work | None = None  # the gather in flight
        self._streams = streams_of(self.flat.device)
        self._began_on: Stream | None = None  # the stream that started the gather
        self.is_free = False

    @property
    def values(self) -> Tensor:
        """The elements that this rank owns and the optimizer steps."""
        return self.slice if self.master is None else self.master

    def refresh(self) -> None:
        """Set the master to the parameters."""
        if self.master is not None:
            # an offloaded master is stepped on the host, so the copy must end before this returns
            self._store.offload(self.master, self.slice)
            self.wait()

    def wait(self) -> None:
        """Wait until the host may write to the elements that the optimizer steps."""
        if self.master is not None:
            self._store.wait(self.master)

    def expect(self) -> None:
        """Post the receives of a gather; nothing may read the parameters until `arrive`."""
        self.arrive()
        layout, own_slice = self.layout, self.master if self._sends_master else None
        self._start_gather = prepost_all_gather_v(
            self.flat, layout.bounds, layout.group, wire_dtype=self._wire_dtype, own_shard=own_slice
        )

    def send(self) -> None:
        """Start the gather after a step; the parameters are absent until `arrive`."""
        self.changed()
        self._begin_gather()
        if self.layout.group.size() > 1:
            self._mark_ungathered()

    def arrive(self) -> None:
        """Wait for the gather in flight, if there is one."""
        if self._work is not None:
            # what comes next reads the gathered parameters
            self._wait_on_streams() if self._streams is not None else self._work.wait()
            self._work = None
            for parameter, kind in zip(self._parameters, self._kinds, strict=True):
                mark_gathered(parameter, kind)

    def free(self) -> None:
        """Free the memory of all but this rank's master; parameters are absent until `fetch`."""
        if not self.is_free:
            self.arrive()
            self._mark_ungathered()
            self.is_free = True
            if self._on_read is not None:
                self._keeps_owner = self._on_read()
            if self._streams is not None:
                # the allocator only knows the stream that allocated the memory, but a forward may
                # still read it on this one
                self._streams.keep(self.flat)
            # resize the storage instead of replacing it: views that autograd saved use it
            self.flat.untyped_storage().resize_(0)

    def fetch(self) -> None:
        """Start to gather freed parameters; all ranks of the group call it."""
        if self.is_free:
            self.flat.untyped_storage().resize_(self._num_bytes)
            self.is_free, self._keeps_owner = False, None
            self._begin_gather()

    def wait_gathered(self, parameter: nn.Parameter) -> None:
        """Wait until a parameter is gathered, or raise an error that says what to do."""
        if self._on_read is not None and (need := self._on_read()) is not None:
            need(self)
        self.arrive()

    def changed(self) -> None:
        """Raise the version counters, so that an older graph notices that its weights changed."""
        torch.autograd.graph.increment_version(self._parameters)

    def _wait_on_streams(self) -> None:
        """Wait for the gather on the stream that started it, and on the current stream."""
        assert self._work is not None and self._streams is not None
        reader, began_on = self._streams.current(), self._began_on
        assert began_on is not None
        # wait on the stream that started the gather too: work ordered after it relies on that
        with self._streams.on(began_on):
            self._work.wait()
        if reader != began_on:
            # the stream that reads the parameters may be another than the one that started
            reader.wait_event(began_on.record_event())

    def _mark_ungathered(self) -> None:
        for parameter in self._parameters:
            mark_ungathered(parameter, self)

    def _begin_gather(self) -> None:
        """Write the master back and start the gather."""
        if self._start_gather is None:
            self.expect()
        if self.master is not None and not self._sends_master:
            self._store.to_device(self.master, self.slice)
        assert self._start_gather is not None
        if self._streams is not None:
            self._began_on = self._streams.current()
        self._work, self._start_gather = self._start_gather(), None


class UngatheredParameter(nn.Parameter):
    """A parameter whose elements are currently absent; its buffer can `wait_gathered` them."""

    source: ParamBuffer

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func not in _PASSIVE:
            for parameter in [*_ungathered_in(args), *_ungathered_in((kwargs or {}).values())]:
                wait_gathered(parameter)  # no wait if an earlier one of its bucket brought it
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    # Both calls would copy or pickle this class, so they wait, which gives the parameter its own
    # class back, and start again.

    def __deepcopy__(self, memo):
        self.source.wait_gathered(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol):
        self.source.wait_gathered(self)
        return self.__reduce_ex__(protocol)


def wait_gathered(parameter: Tensor) -> None:
    """Wait until the elements of a parameter are present."""
    if type(parameter) is UngatheredParameter:
        parameter.source.wait_gathered(parameter)


def mark_ungathered(parameter: nn.Parameter, source: ParamBuffer) -> None:
    """Mark the elements of `parameter` as absent."""
    parameter.__class__ = UngatheredParameter
    parameter.source = source


def mark_gathered(parameter: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Mark the elements of `parameter` as present, giving it back its class `kind`."""
    if type(parameter) is UngatheredParameter:
        parameter.__class__ = kind
        del parameter.source


def _ungathered_in(values) -> Iterator[UngatheredParameter]:
    """Yield all ungathered parameters in nested arguments."""
    for value in values:
        if type(value) is UngatheredParameter:
            yield value
        elif isinstance(value, tuple | list):
            yield from _ungathered_in(value)
        elif isinstance(value, dict):
            yield from _ungathered_in(value.values())


_METHODS = [
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "nelement",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "size",
    "stride",
    "__hash__",
    "__len__",
]
_ATTRIBUTES = [
    "device",
    "dtype",
    "grad",
    "grad_dtype",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_sparse",
    "itemsize",
    "layout",
    "nbytes",
    "ndim",
    "requires_grad",
    "shape",
]
_PASSIVE = {
    *(getattr(Tensor, name) for name in _METHODS),
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(getattr(Tensor, name).__set__ for name in ("grad", "grad_dtype", "requires_grad")),
    Tensor.grad.__delete__,
}
"""Functions of torch that read no element, so they need not wait."""


class MasterStore:
    """A store of copies of slices on their own device, in order on the current stream.

    In its methods, `host` is memory from `allocate`, and `device` a slice of a bucket.

    ahead: number of further buckets whose sums are awaited before one is stepped, so that their
        copies have started.
    """

    ahead = 0

    def allocate(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor of the shape of `like`."""
        return torch.empty_like(like, dtype=dtype)

    def offload(self, host: Tensor, device: Tensor) -> None:
        """Start to copy `device` to `host`; `device` may be overwritten after `free(host)`."""
        if host is not device:
            host.copy_(device)

    def to_device(self, host: Tensor, device: Tensor) -> None:
        """Copy and cast `host` to `device` on the current stream; keep `host` until
        `wait(host)`.
        """
        device.copy_(host)

    def here(self, host: Tensor) -> Tensor:
        """Return `host`, or a copy of it on the slices' device, to add to on the current stream."""
        return host

    def free(self, host: Tensor) -> None:
        """Let later kernels on the current stream overwrite the slice that was copied to `host`."""

    def wait(self, *hosts: Tensor) -> None:
        """Let the host wait until it may read and write these copies, by default all of them."""

    def stepping(self) -> AbstractContextManager[object]:
        """Surround a step of the copies in this store."""
        return nullcontext()

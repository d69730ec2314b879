"""Hooks on parameters, for gradients that have come, and on outputs, for backwards that begin.

torch keeps the hooks of a parameter where the garbage collector does not look. A hook that held its
owner, and so the model, would keep both for ever; these hold it weakly, and go with it.

Gradients may come on several streams of a device, while a collective waits only for the stream that
launches it. So all that is done with the gradients of one backward is done on one stream of each
device, that of its first gradient, which waits for the rest.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol
from weakref import ReferenceType, WeakSet, finalize, ref

import torch
from torch import Tensor, nn

from torchdistpackage.comm.nested import map_tensors
from torchdistpackage.ddp.param_spec import ParamSpec

OnGradReady = Callable[[ReferenceType, int, Tensor], None]
"""Takes a weak reference to the hooks' owner, the number of a parameter, and the parameter."""
StreamId = tuple[int, int, int]
"""A stream, as torch has it: its id, and the index and kind of its device."""


class Removable(Protocol):
    def remove(self) -> None: ...


class GradHooks:
    """Hooks on `parameters` until `remove`, or the end of `owner`. also: removed with them.

    on_grad_ready: called when a gradient is there. exclusive: no other may hook these parameters,
    nor `claims`, which have no hooks.
    """

    def __init__(
        self,
        on_grad_ready: OnGradReady,
        owner: object,
        parameters: Sequence[nn.Parameter],
        exclusive: bool = False,
        also: Iterable[Removable] = (),
        claims: Iterable[nn.Parameter] = (),
    ):
        me, self.exclusive = ref(owner), exclusive
        self.ids = frozenset(map(id, (*parameters, *claims)))
        on_grad_ready = on_one_stream(on_grad_ready, parameters)
        handles: list[Removable] = [
            p.register_post_accumulate_grad_hook(partial(on_grad_ready, me, i))
            for i, p in enumerate(parameters)
        ]
        handles += also
        self._end = finalize(owner, remove_hooks, handles)
        self._end.atexit = False
        _all.add(self)

    @property
    def are_on(self) -> bool:
        return self._end.alive

    def remove(self) -> None:
        self._end()


_all: WeakSet[GradHooks] = WeakSet()


def hooked_names(specs: Sequence[ParamSpec], *, exclusive: bool = False) -> list[str]:
    """Names of the parameters that hooks of an owner in use lie on.

    exclusive: only hooks that must stay the only ones.
    """

    def find() -> list[str]:
        hooks = [h for h in _all if h.are_on and (h.exclusive or not exclusive)]
        return [s.name for s in specs if any(id(s.parameter) in h.ids for h in hooks)]

    if not find():
        return []
    gc.collect()  # an owner that was dropped may only wait for this
    return find()


def remove_hooks(handles: Iterable[Removable]) -> None:
    """Remove these hooks."""
    for handle in handles:
        handle.remove()


def on_one_stream(on_grad_ready: OnGradReady, parameters: Iterable[Tensor]) -> OnGradReady:
    """`on_grad_ready`, which then runs on one stream of each device in a backward."""
    if all(device_index(parameter) is None for parameter in parameters):
        return on_grad_ready
    mains: dict[int, tuple[int, StreamId]] = {}

    def on_main(me: ReferenceType, index: int, parameter: Tensor) -> None:
        device, task = device_index(parameter), torch._C._current_graph_task_id()
        if device is None:  # of a model that is on a device in part
            return on_grad_ready(me, index, parameter)
        here = current_stream(device)
        main = mains.get(device)
        if main is None or main[0] != task:
            if main is not None and main[1] != here:  # of a backward that is nested in this one,
                # or around it, as checkpoints have them: its gradients lie in the same buckets
                stream_of(here).wait_stream(stream_of(main[1]))
            main = mains[device] = task, here
        if main[1] == here:  # the usual way: no stream has become an object
            return on_grad_ready(me, index, parameter)
        stream = stream_of(main[1])
        stream.wait_stream(stream_of(here))
        if parameter.grad is not None:
            parameter.grad.record_stream(stream)  # its memory may go once it is copied there
        with torch.cuda.stream(stream):
            return on_grad_ready(me, index, parameter)

    return on_main


def device_index(parameter: Tensor) -> int | None:
    """The index of its device; None on a CPU."""
    return parameter.get_device() if parameter.is_cuda else None


def current_stream(device: int) -> StreamId:
    """The stream on which this thread gives work to `device`."""
    return torch._C._cuda_getCurrentStream(device)


def stream_of(numbers: StreamId) -> torch.cuda.Stream:
    """The stream that has these numbers."""
    stream_id, device, kind = numbers
    return torch.cuda.Stream(stream_id=stream_id, device_index=device, device_type=kind)


# -- outputs of a forward --------------------------------------------------------------------


def on_backward_start(outputs: object, hook: Callable[[Tensor], None]) -> object:
    """The same outputs; `hook(gradient)` runs when a backward comes to one of their tensors.

    outputs: as `map_tensors` has them. Where no tensor requires a gradient, each is replaced by
    one that does, though nothing behind it gets any; otherwise those stay as they are.
    """
    if isinstance(outputs, Tensor):
        return (_hooked if outputs.requires_grad else _anchored)(hook, outputs)
    attach = _hooked if any(x.requires_grad for x in tensors_in(outputs)) else _anchored
    return map_tensors(outputs, partial(attach, hook))


def tensors_in(outputs: object) -> list[Tensor]:
    """All that `map_tensors` finds."""
    found: list[Tensor] = []
    map_tensors(outputs, lambda x: found.append(x) or x)
    return found


def _hooked(hook: Callable[[Tensor], None], output: Tensor) -> Tensor:
    if output.requires_grad:
        # a parameter that is returned is there in the next forward too, its hooks would add up
        output = output.view_as(output) if output.is_leaf else output
        output.register_hook(hook)
    return output


def _anchored(hook: Callable[[Tensor], None], output: Tensor) -> Tensor:
    if output.is_floating_point() or output.is_complex():
        output = _GraphAnchor.apply(output, torch.empty(0, requires_grad=True))
        output.register_hook(hook)
    return output


class _GraphAnchor(torch.autograd.Function):
    """Identity that puts a tensor into the graph though nothing in it wants a gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, anchor: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, None

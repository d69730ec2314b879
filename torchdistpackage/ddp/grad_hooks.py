"""Hooks on parameters, called when gradients are computed, and on outputs, when backwards begin.

torch keeps a parameter's hooks where the garbage collector does not look. A hook that held its
owner, and so the model, would keep both alive for ever. These hooks hold the owner weakly and are
removed with it.

Autograd may compute gradients on several streams of a device, but a collective waits only for the
stream that launches it. So all work on the gradients of one backward runs on one stream of each
device, the stream of its first gradient, which waits for the others.
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
"""A function of a weak reference to the hooks' owner, the number of a parameter, and the
parameter.
"""
StreamId = tuple[int, int, int]
"""torch's numbers for a stream: its id, and the index and type of its device."""


class Removable(Protocol):
    def remove(self) -> None: ...


class GradHooks:
    """Hooks on `parameters` that last until `remove`, or until `owner` is collected.

    on_grad_ready: called when a gradient is computed.
    exclusive: no other owner may hook these parameters, nor `claims`, which have no hooks.
    also: other hooks to remove with these.
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
        owner_ref = ref(owner)  # weak: torch's list of hooks would keep the owner alive
        self.exclusive = exclusive
        self.ids = frozenset(map(id, (*parameters, *claims)))
        on_grad_ready = on_one_stream(on_grad_ready, parameters)
        handles: list[Removable] = [
            p.register_post_accumulate_grad_hook(partial(on_grad_ready, owner_ref, i))
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
    """Return the names of parameters that have hooks of a living owner.

    exclusive: count only hooks that must be the only ones.
    """

    def find() -> list[str]:
        hooks = [h for h in _all if h.are_on and (h.exclusive or not exclusive)]
        return [s.name for s in specs if any(id(s.parameter) in h.ids for h in hooks)]

    if not find():
        return []
    gc.collect()  # a dropped owner may be alive only until the next collection
    return find()


def remove_hooks(handles: Iterable[Removable]) -> None:
    """Remove these hooks."""
    for handle in handles:
        handle.remove()


def on_one_stream(on_grad_ready: OnGradReady, parameters: Iterable[Tensor]) -> OnGradReady:
    """Wrap `on_grad_ready` so that in a backward it runs on one stream of each device."""
    if all(device_index(parameter) is None for parameter in parameters):
        return on_grad_ready
    chosen_streams: dict[int, tuple[int, StreamId]] = {}

    def on_main(owner_ref: ReferenceType, index: int, parameter: Tensor) -> None:
        device, task = device_index(parameter), torch._C._current_graph_task_id()
        if device is None:  # a parameter on the CPU of a model that is partly on a device
            return on_grad_ready(owner_ref, index, parameter)
        current = current_stream(device)
        chosen = chosen_streams.get(device)
        if chosen is None or chosen[0] != task:
            if chosen is not None and chosen[1] != current:
                # The last stream belongs to a backward around or inside this one, as activation
                # checkpointing nests them. Its gradients are in the same buckets, so wait for it.
                stream_of(current).wait_stream(stream_of(chosen[1]))
            chosen = chosen_streams[device] = task, current
        if chosen[1] == current:  # the usual case, without creating stream objects
            return on_grad_ready(owner_ref, index, parameter)
        stream = stream_of(chosen[1])
        # this gradient is computed on the current stream, and used on the chosen one
        stream.wait_stream(stream_of(current))
        if parameter.grad is not None:
            # keep the allocator from reusing the gradient's memory before the copy there ends
            parameter.grad.record_stream(stream)
        with torch.cuda.stream(stream):
            return on_grad_ready(owner_ref, index, parameter)

    return on_main


def device_index(parameter: Tensor) -> int | None:
    """Return the index of a parameter's CUDA device; None on a CPU."""
    return parameter.get_device() if parameter.is_cuda else None


def current_stream(device: int) -> StreamId:
    """Return the stream on which this thread gives work to `device`."""
    return torch._C._cuda_getCurrentStream(device)


def stream_of(numbers: StreamId) -> torch.cuda.Stream:
    """Return the stream with these numbers."""
    stream_id, device, kind = numbers
    return torch.cuda.Stream(stream_id=stream_id, device_index=device, device_type=kind)


# -- outputs of a forward --------------------------------------------------------------------


def on_backward_start(outputs: object, hook: Callable[[Tensor], None]) -> object:
    """Return the outputs with a hook: `hook(gradient)` runs when a backward reaches a tensor.

    If no tensor requires a gradient, each is replaced by one that does, through which no gradient
    passes. Otherwise tensors without a gradient stay as they are.

    outputs: a tensor, or a structure that `map_tensors` can walk.
    """
    if isinstance(outputs, Tensor):
        return (_hooked if outputs.requires_grad else _anchored)(hook, outputs)
    attach = _hooked if any(x.requires_grad for x in tensors_in(outputs)) else _anchored
    return map_tensors(outputs, partial(attach, hook))


def tensors_in(outputs: object) -> list[Tensor]:
    """Return all tensors that `map_tensors` finds."""
    tensors: list[Tensor] = []
    map_tensors(outputs, lambda x: tensors.append(x) or x)
    return tensors


def _hooked(hook: Callable[[Tensor], None], output: Tensor) -> Tensor:
    """Register the hook on an output that requires a gradient."""
    if output.requires_grad:
        # hook a view of a returned parameter: on the parameter itself hooks would pile up
        output = output.view_as(output) if output.is_leaf else output
        output.register_hook(hook)
    return output


def _anchored(hook: Callable[[Tensor], None], output: Tensor) -> Tensor:
    """Make an output require a gradient, and register the hook on it."""
    if output.is_floating_point() or output.is_complex():
        output = _GraphAnchor.apply(output, torch.empty(0, requires_grad=True))
        output.register_hook(hook)
    return output


class _GraphAnchor(torch.autograd.Function):
    """Identity that makes a tensor part of the graph and passes no gradient on."""

    @staticmethod
    def forward(ctx, x: Tensor, anchor: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, None

"""Gradients that come on several streams of a device, as where a user's forward has several.

One rule: a collective waits for the stream that launches it, and for no other. So all that is done
with the gradients of one backward is done on one stream of each device, that of its first gradient,
which waits for what the others bring. On a CPU there is nothing to do.
"""

from collections.abc import Callable, Iterable
from weakref import ReferenceType

import torch
from torch import Tensor

OnGradReady = Callable[[ReferenceType, int, Tensor], None]
"""What a hook of parameters calls (grad_hooks.py)."""

Numbers = tuple[int, int, int]
"""A stream, as torch has it: its id, and the index and kind of its device."""


def on_one_stream(on_grad_ready: OnGradReady, parameters: Iterable[Tensor]) -> OnGradReady:
    """`on_grad_ready`, which then runs on one stream of each device in a backward."""
    if all(place_of(parameter) is None for parameter in parameters):
        return on_grad_ready
    mains: dict[int, tuple[int, Numbers]] = {}

    def on_main(me: ReferenceType, index: int, parameter: Tensor) -> None:
        place, task = place_of(parameter), torch._C._current_graph_task_id()
        if place is None:  # of a model that is on a device in part
            on_grad_ready(me, index, parameter)
            return
        here = current(place)
        main = mains.get(place)
        if main is None or main[0] != task:
            if main is not None and main[1] != here:  # of a backward that this one is nested in,
                # or nested in it, as checkpoints have them: its gradients lie in the same buckets
                stream_of(here).wait_stream(stream_of(main[1]))
            main = mains[place] = task, here
        if main[1] == here:  # the usual way: no stream has become an object
            on_grad_ready(me, index, parameter)
            return
        stream = stream_of(main[1])
        stream.wait_stream(stream_of(here))
        if parameter.grad is not None:
            parameter.grad.record_stream(stream)  # its memory may go once it is copied there
        with torch.cuda.stream(stream):
            on_grad_ready(me, index, parameter)

    return on_main


def place_of(parameter: Tensor) -> int | None:
    """The index of its device; None on a CPU."""
    return parameter.get_device() if parameter.is_cuda else None


def current(place: int) -> Numbers:
    """The stream on which this thread gives work to device `place`."""
    return torch._C._cuda_getCurrentStream(place)


def stream_of(numbers: Numbers) -> torch.cuda.Stream:
    """The stream that has these numbers."""
    stream_id, place, kind = numbers
    return torch.cuda.Stream(stream_id=stream_id, device_index=place, device_type=kind)

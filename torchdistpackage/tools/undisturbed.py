"""Runs of a model that leave no trace.

A measurement, validation or trial must not change the run around it: afterwards the same random
numbers follow, and running statistics, gradients and modes are as before.

    keep_random_states      random states of the CPU and of GPUs
    in_eval                 the modes of modules
    undisturbed             random states, buffers, and gradients of parameters
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def keep_random_states(*devices: torch.device) -> Iterator[None]:
    """Restore the random states of the CPU and of those `devices` that are GPUs after the block.

    A GPU without an index is the current one.
    """
    gpus = (x for x in devices if x.type == "cuda")
    indices = {torch.cuda.current_device() if x.index is None else x.index for x in gpus}
    with torch.random.fork_rng(devices=sorted(indices)):
        yield


@contextmanager
def in_eval(*modules: nn.Module) -> Iterator[None]:
    """Put these modules in `eval()` inside the block; restore the mode of each afterwards."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def undisturbed(*modules: nn.Module, gradients_of: Iterable[Tensor] = ()) -> Iterator[None]:
    """Restore random states and the buffers of `modules` after the block.

    Each buffer is the same tensor with the same values again, even if a forward replaced it.

    gradients_of: parameters to give back the same `.grad` object. It does not restore values of
        gradients, so set `.grad` to None inside the block.
    """
    gradients = [(p, p.grad) for p in gradients_of]
    buffers = [
        (owner, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in modules
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
    ]
    devices = {x.device for module in modules for x in (*module.parameters(), *module.buffers())}
    devices |= {p.device for p, _ in gradients}
    if torch.cuda.is_initialized():  # a forward may draw there even if the module is elsewhere
        devices.add(torch.device("cuda", torch.cuda.current_device()))
    try:
        with keep_random_states(*devices):
            yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        with torch.no_grad():
            for owner, name, buffer, values in buffers:
                if buffer is not None:
                    buffer.copy_(values)
                owner._buffers[name] = buffer

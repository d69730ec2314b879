"""One thread for each shard, in the state of the thread that calls, until the first failure."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import nn

from torchdistpackage.compat.tensor_parallel.rendezvous import Aborted, ThreadRun, current_run


class CallerState:
    """The caller's thread-local state of torch, for other threads to enter."""

    def __init__(self, devices: Sequence[torch.device]):
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.cache = torch.is_autocast_cache_enabled()
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in sorted({"cpu", *(device.type for device in devices)})
            if torch.is_autocast_enabled(kind)
        ]
        self.dtype = torch.get_default_dtype()

    def enter(self, stack: ExitStack, device: torch.device) -> None:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.inference_mode(self.inference))
        if not self.inference:
            stack.enter_context(torch.set_grad_enabled(self.grad))
        for kind, dtype in self.autocast:
            cache = self.cache
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cache))


def run_threads(
    modules: Sequence[nn.Module],
    inputs: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    devices: Sequence[torch.device],
    contexts: Sequence[Any] | None = None,
) -> list[Any]:
    """Return the outputs of all modules, each called in a thread of its own.

    contexts: context managers, one for each thread to be in.

    Raises:
        The exception of the first shard that fails, with a note that names the shard.
    """
    state, run = CallerState(devices), ThreadRun(len(modules))
    outputs: list[Any] = [None] * len(modules)
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        current_run.set(run)
        args, kwargs = inputs[rank]
        try:
            with ExitStack() as stack:
                state.enter(stack, devices[rank])
                stack.enter_context(nullcontext() if contexts is None else contexts[rank])
                outputs[rank] = modules[rank](*args, **kwargs)
        except BaseException as error:
            errors[rank] = error
            run.fail(f"{type(error).__name__}: {error}")
        finally:
            run.leave(rank)

    threads = [
        threading.Thread(target=work, args=(rank,), daemon=True, name=f"tdp-shard-{rank}")
        for rank in range(len(modules))
    ]
    for thread in threads:
        thread.start()
    # the outputs are there once all shards are done; one that fails ends the others through `run`
    for thread in threads:
        thread.join()
    if errors:
        rank, error = min(errors.items(), key=lambda item: (isinstance(item[1], Aborted), item[0]))
        error.add_note(f"in shard {rank} of {len(modules)}, on {devices[rank]}")
        raise error
    return outputs

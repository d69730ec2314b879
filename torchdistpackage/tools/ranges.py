"""Named ranges for profilers, and a profiler that the program starts and stops.

A range is one of `torch.profiler` everywhere; with CUDA it is an NVTX range too, which Nsight
Systems shows. On the CPU `cu_prof_start` records with `torch.profiler`.
"""

import functools
import inspect
import time
from collections.abc import Callable, Generator
from contextlib import ContextDecorator, contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from torchdistpackage.tools.printing import emit

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def _named_range(name: str) -> Generator[None]:
    """Run the block inside a named range."""
    with record_function(name):
        if not torch.cuda.is_available():
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


def nvtx_decorator(func: Callable[P, R]) -> Callable[P, R]:
    """Wrap `func` so that each call is a range of its qualified name, even if the call raises.

    A coroutine function's range lasts from its first step to its end.

    Raises:
        TypeError: `func` cannot be called.
    """
    if not callable(func):
        raise TypeError(f"nvtx_decorator: {func!r} is a {type(func).__name__}; pass a function")
    name = getattr(func, "__qualname__", None) or type(func).__qualname__

    if inspect.iscoroutinefunction(func):

        @functools.wraps(func)
        async def awaited(*args: P.args, **kwargs: P.kwargs):
            with _named_range(name):
                return await func(*args, **kwargs)

        return awaited  # pyright: ignore[reportReturnType]

    @functools.wraps(func)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with _named_range(name):
            return func(*args, **kwargs)

    return wrapped


class NVTXContext(ContextDecorator):
    """A named range around a block or a decorated function.

    record_time: also print how many seconds the block took; it waits for CUDA at both ends.
    start_time, exit_time: when the last block began and ended, in seconds since 1970; None before
        the first, or without record_time. One object may be entered again inside itself.

    Raises:
        TypeError: `context_name` is not text.
    """

    def __init__(self, context_name: str, record_time: bool = False):
        if not isinstance(context_name, str):
            kind = type(context_name).__name__
            raise TypeError(f"NVTXContext: the name is a {kind}; pass a str")
        self.context_name, self.record_time = context_name, record_time
        self.start_time: float | None = None
        self.exit_time: float | None = None
        self._open: list[tuple[object, float]] = []

    def __enter__(self) -> "NVTXContext":
        entered = _named_range(self.context_name)
        entered.__enter__()
        if self.record_time:
            self.start_time = _now()
        self._open.append((entered, self.start_time or 0.0))
        return self

    def __exit__(self, *raised: object) -> None:
        entered, since = self._open.pop()
        if self.record_time:
            self.start_time, self.exit_time = since, _now()
            emit(f"{self.context_name} duration is {self.exit_time - since}")
        entered.__exit__(*raised)  # pyright: ignore[reportAttributeAccessIssue]


def _now() -> float:
    """Return the time, after the device has finished its work."""
    if torch.cuda.is_available():
        # kernels are asynchronous: without it only their launch would be measured
        torch.cuda.synchronize()
    return time.time()


_host_profile: list[profile] = []
"""The running profile of `cu_prof_start`, if any."""


def cu_prof_start() -> None:
    """Start CUDA's profiler, for Nsight Systems; on the CPU, `torch.profiler`.

    Raises:
        RuntimeError: CUDA refused, or a profile of the CPU is running already.
    """
    if torch.cuda.is_available():
        _checked("cudaProfilerStart", torch.cuda.cudart().cudaProfilerStart())
        return
    if _host_profile:
        raise RuntimeError("cu_prof_start: a profile is running; call cu_prof_stop() first")
    _host_profile.append(profile(activities=[ProfilerActivity.CPU]))
    _host_profile[0].start()


def cu_prof_stop() -> profile | None:
    """Stop the profiler; on the CPU return the profile, which `export_chrome_trace(path)` writes.

    The program goes on.

    Raises:
        RuntimeError: CUDA refused, or no profile of the CPU is running.
    """
    if torch.cuda.is_available():
        _checked("cudaProfilerStop", torch.cuda.cudart().cudaProfilerStop())
        return None
    if not _host_profile:
        raise RuntimeError("cu_prof_stop: no profile is running; call cu_prof_start() before")
    running = _host_profile.pop()
    running.stop()
    return running


def _checked(call: str, code: object) -> None:
    """Raise RuntimeError if a CUDA call failed."""
    if int(code) != 0:  # pyright: ignore[reportArgumentType]  # an int, or an enum of it
        raise RuntimeError(
            f"{call}() failed with code {code}, so there is no profile; check "
            "the GPU with tdp doctor"
        )

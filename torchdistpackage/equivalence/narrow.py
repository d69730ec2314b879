"""Find numbers that code rounds to 16 or 8 bits, whatever the precision of the run.

A comparison of layouts in float64 does not see a cast that all layouts make. In a float64 copy of a
run no cast to a narrow type is asked for, so each is one that the code makes by itself, as of
rotary tables or of a router's scores.
"""

import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchdistpackage.comm.nested import leaves_of

WIDE = (torch.float32, torch.float64)
# float64_within changes what torch calls float32
_SINGLE, _DOUBLE = WIDE


class _CastMode(TorchDispatchMode):
    """Records the module in which a floating-point tensor becomes one of fewer than 32 bits."""

    def __init__(self, running: Sequence[str], casts: dict[str, str], singles: list[str]):
        super().__init__()
        self._running, self._casts, self._singles = running, casts, singles

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(_is(x, _SINGLE) for x in leaves_of(result)):
            inputs = [*leaves_of((args, kwargs))]
            if any(_is(x, _DOUBLE) for x in inputs):
                self._singles[:] = self._singles or [self._running[-1] if self._running else ""]
        narrow = [x.dtype for x in leaves_of(result) if _is_narrow(x)]
        if narrow:
            inputs = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
            if any(x.dtype in WIDE for x in inputs) and not any(map(_is_narrow, inputs)):
                where = self._running[-1] if self._running else function_here()
                self._casts.setdefault(where, str(narrow[0]).removeprefix("torch."))
        return result


def function_here() -> str:
    """Return the name of the function that the innermost forward has called; outside of forwards,
    as in a hook, that of the innermost function that is not torch's.
    """
    called = ""
    frame = inspect.currentframe()
    frame = frame.f_back if frame is not None else None  # the caller, which is the mode
    while frame is not None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name == "forward":
            break
        if f"{os.sep}torch{os.sep}" not in file and name != "__torch_dispatch__":
            called = name if called == "" or _is_below_forward(frame) else called
        frame = frame.f_back
    return called


def _is_below_forward(frame: FrameType) -> bool:
    caller = frame.f_back
    return caller is not None and caller.f_code.co_name == "forward"


def _is(x: object, dtype: torch.dtype) -> bool:
    return isinstance(x, Tensor) and x.dtype == dtype and x.dim() > 0


def _is_narrow(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype.is_floating_point and x.dtype.itemsize < 4


def _eager() -> Any:
    """Run what is compiled as it was written: a graph cannot be compiled under a mode."""
    is_there = "torch._dynamo" in sys.modules  # loading it takes seconds
    return torch.compiler.set_stance("force_eager") if is_there else nullcontext()


@contextmanager
def noting_casts(
    modules: Mapping[str, nn.Module], casts: dict[str, str], singles: list[str]
) -> Iterator[None]:
    """Note the casts inside the block: module -> type; without a running module, as in a sum of
    gradients, the function's name stands for it. singles: gets the first module that goes on in
    float32.
    """
    running: list[str] = []

    def enter(name: str, *_: object) -> None:
        running.append(name)

    def leave(*_: object) -> None:
        running.pop()

    hooks = []
    for name, module in modules.items():
        hooks.append(module.register_forward_pre_hook(partial(enter, name)))
        hooks.append(module.register_forward_hook(leave))
    try:
        with _eager(), _CastMode(running, casts, singles):
            yield
    finally:
        for hook in hooks:
            hook.remove()

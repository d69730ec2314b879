"""Detection of the first NaN or Inf by hooks on every module: rank, module, tensor and step.

Backward hooks are on the tensors that a module takes and returns, not on the module. A backward
hook on the module would wrap its outputs, and in-place operations refuse wrapped outputs.
"""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.comm.creation import is_joined, world
from torchdistpackage.errors import NonFiniteError
from torchdistpackage.tools.nested import as_module, tensors_in

ACTIONS = ("raise", "log")
_log = logging.getLogger(__name__)


def check_tensor_inf_nan(inp: Tensor) -> bool:
    """Return True if every element of a tensor is finite.

    Integers are, and so are tensors without elements or data.

    Raises:
        TypeError: `inp` is not a tensor.
    """
    if not isinstance(inp, Tensor):
        raise TypeError(f"check_tensor_inf_nan got a {type(inp).__name__}; give it a tensor")
    x = inp.detach()
    if x.is_meta or not (x.is_floating_point() or x.is_complex()):
        return True
    if x.layout is not torch.strided:
        x = x.coalesce().values() if x.layout is torch.sparse_coo else x.values()
    if x.itemsize == 1:  # float8 has no isfinite of its own
        x = x.float()
    return bool(torch.isfinite(x).all())


def _has_inf_or_nan(x: Tensor, j: object = None) -> bool:
    """Return True if an element of `x` is NaN or infinite; its sum may overflow.

    j: unused.
    """
    return not check_tensor_inf_nan(x)


def check_tensors(inputs: object) -> bool:
    """Return True if all tensors in `inputs` are finite; see `tensors_in` for where they are
    found.
    """
    return all(check_tensor_inf_nan(x) for _, x in tensors_in(inputs))


def check_model_params(model: nn.Module) -> bool:
    """Return True if all parameters are finite, and log the name of each one that is not.

    Raises:
        TypeError: `model` is not a module.
    """
    bad = _bad_parameters(as_module(model, "check_model_params"))
    for name in bad:
        _log.warning("rank %d: model param: %s contains nan/inf!", _rank(), name)
    return not bad


def fwd_hook_wrapper(module_name: str = "") -> Callable[..., None]:
    """Return a forward hook that logs inputs and outputs that are not finite by the module's name.

    The hook raises NonFiniteError on an output that is not finite.
    """

    def check_value(module: nn.Module, args: object, output: object) -> None:
        name = module_name or type(module).__name__
        _report(name, "input", args, raises=False)
        _report(name, "output", output, raises=True)

    return check_value


def bwd_hook_wrapper(module_name: str = "") -> Callable[..., None]:
    """Return a hook for `register_full_backward_hook` that logs gradients that are not finite.

    It raises NonFiniteError if one of them is a `grad_input`.
    """

    def check_value(module: nn.Module, grad_input: object, grad_output: object) -> None:
        name = module_name or type(module).__name__
        _report(name, "grad_output", grad_output, raises=False)
        _report(name, "grad_input", grad_input, raises=True)

    return check_value


@dataclass(frozen=True, slots=True)
class NonFiniteOrigin:
    """The place of one tensor that is not finite.

    step: number of the forward of the watched model, from 1; its backward has the same number.
    what: `output`, `grad_output`, `parameter` or `gradient`. path: inside a nested value, or ''.
    inputs_finite: whether all that went into the module was finite; True for parameters.
    """

    rank: int
    step: int
    module: str
    kind: str
    what: str
    path: str = ""
    inputs_finite: bool = True

    def __str__(self) -> str:
        inputs_note = "" if self.inputs_finite else "; its inputs were not finite already"
        name = f"{self.module} ({self.kind})" if self.kind else self.module
        return (
            f"rank {self.rank}, step {self.step}: {self.what}{self.path} of {name} contains "
            f"nan/inf{inputs_note}"
        )


class NonFiniteWatch:
    """The record of `watch_nonfinite`.

    step: number of forwards of the model so far. first: the first tensor that was not finite."""

    def __init__(self, model: nn.Module, on_nonfinite: str):
        self.step = 0
        self.first: NonFiniteOrigin | None = None
        self._model, self._on_nonfinite = model, on_nonfinite
        self._handles: list[Any] = []
        self._rank = _rank()

    def check_parameters(self) -> bool:
        """Return True if all parameters and their gradients are finite; call it after a step."""
        bad = [(name, "parameter") for name in _bad_parameters(self._model)]
        grads = ((n, p.grad) for n, p in self._model.named_parameters() if p.grad is not None)
        bad += [(name, "gradient") for name, grad in grads if not check_tensor_inf_nan(grad)]
        for name, kind in bad:
            self._found(NonFiniteOrigin(self._rank, self.step, name, "", kind))
        return not bad

    def register(self) -> None:
        """Add hooks to every module."""
        for name, module in self._model.named_modules():
            name = name or "root"
            self._handles.append(module.register_forward_pre_hook(self._begin(name)))
            self._handles.append(module.register_forward_hook(self._end(name), with_kwargs=True))

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, name: str) -> Callable[..., None]:
        """Return a hook that counts the model's forwards."""

        def begin(module: nn.Module, args: object) -> None:
            self.step += module is self._model

        return begin

    def _end(self, name: str) -> Callable[..., None]:
        """Return a hook that checks a module's outputs, and their gradients later."""

        def end(module: nn.Module, args: object, kwargs: object, output: object) -> None:
            kind, step = type(module).__name__, self.step
            for path, x in tensors_in(output):
                if not check_tensor_inf_nan(x):
                    clean = check_tensors((args, kwargs))
                    self._found(
                        NonFiniteOrigin(self._rank, step, name, kind, "output", path, clean)
                    )
                if x.requires_grad:
                    x.register_hook(self._of_gradient(step, name, kind, path))

        return end

    def _of_gradient(self, step: int, name: str, kind: str, path: str) -> Callable[..., None]:
        """Return a hook that checks a gradient."""

        def look(grad: Tensor) -> None:
            if self._handles and not check_tensor_inf_nan(grad):
                self._found(NonFiniteOrigin(self._rank, step, name, kind, "grad_output", path))

        return look

    def _found(self, origin: NonFiniteOrigin) -> None:
        """Note an origin, and raise NonFiniteError if `on_nonfinite` is `raise`."""
        self.first = self.first or origin
        _log.warning("%s", origin)
        if self._on_nonfinite == "raise":
            raise NonFiniteError(
                f"{origin}; look at this module first, or go on with on_nonfinite='log'"
            )


@contextmanager
def watch_nonfinite(model: nn.Module, on_nonfinite: str = "raise") -> Generator[NonFiniteWatch]:
    """Check every module's outputs and their gradients inside the block.

    on_nonfinite: `raise` NonFiniteError at the first, or `log` all of them. The module that a
    gradient is named by is the one that returned the tensor: the gradient came from its users.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `on_nonfinite` is neither.
        NonFiniteError: in the block; names rank, step, module and tensor.
    """
    if on_nonfinite not in ACTIONS:
        raise ValueError(f"on_nonfinite is {on_nonfinite!r}; use one of {', '.join(ACTIONS)}")
    watch = NonFiniteWatch(as_module(model, "watch_nonfinite"), on_nonfinite)
    watch.register()
    try:
        yield watch
    finally:
        watch.remove()


def _bad_parameters(model: nn.Module) -> list[str]:
    """Return the names of parameters that are not finite."""
    return [name for name, x in model.named_parameters() if not check_tensor_inf_nan(x)]


def _report(module_name: str, kind: str, value: object, *, raises: bool) -> None:
    """Log a value that is not finite, and raise if `raises`."""
    if check_tensors(value):
        return
    text = f"rank {_rank()}: {module_name} {kind} contains nan/inf!"
    _log.warning("%s", text)
    if raises:
        raise NonFiniteError(f"{text} Look at this module, whose {kind} is the first so far")


def _rank() -> int:
    """Return this process's rank, 0 without a group."""
    return world().rank() if is_joined() else 0

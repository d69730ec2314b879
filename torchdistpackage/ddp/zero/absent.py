"""A parameter whose elements are elsewhere for now, and what happens to those who touch it.

One rule: nobody reads old or missing numbers. While its elements travel a parameter is of class
`UngatheredParameter`; whatever reads it, wherever, is told to `wait_gathered` them first. So no
hook has to know which module uses which parameter. What does not read elements (shape, dtype, grad)
passes.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn


class ParamSource(Protocol):
    """Where the elements of absent parameters are."""

    def wait_gathered(self, parameter: nn.Parameter) -> None:
        """Return when it is `mark_gathered` again, or raise and say what the caller should do."""
        ...


class UngatheredParameter(nn.Parameter):
    """The class of a parameter for the time of its absence."""

    source: ParamSource

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func not in _PASSIVE:
            for parameter in [*_ungathered_in(args), *_ungathered_in((kwargs or {}).values())]:
                if (
                    type(parameter) is UngatheredParameter
                ):  # not yet brought together with one before it
                    parameter.source.wait_gathered(parameter)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    # both note the class before they read the elements, so they begin anew once it is right

    def __deepcopy__(self, memo):
        self.source.wait_gathered(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol):
        self.source.wait_gathered(self)
        return self.__reduce_ex__(protocol)


def mark_ungathered(parameter: nn.Parameter, source: ParamSource) -> None:
    """From now on `parameter` is absent."""
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
_PASSIVE = frozenset(
    {
        *(getattr(Tensor, name) for name in _METHODS),
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
        *(getattr(Tensor, name).__set__ for name in ("grad", "grad_dtype", "requires_grad")),
        Tensor.grad.__delete__,
    }
)
"""What reads no element."""

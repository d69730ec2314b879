"""Operators of Python and methods of tensors, for placeholders of tensors on other ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_ONE_SIDED = ("neg", "abs", "lt", "le", "gt", "ge")
_METHODS = (
    "abs", "add", "argmax", "argmin", "bfloat16", "bmm", "bool", "chunk", "clamp", "clone",
    "contiguous", "cumsum", "div", "double", "eq", "exp", "expand", "flatten", "float", "gather",
    "half", "index_select", "int", "log", "log_softmax", "long", "masked_fill", "matmul", "max",
    "mean", "min", "mm", "mul", "ne", "norm", "permute", "pow", "relu", "reshape", "sigmoid",
    "softmax", "split", "sqrt", "square", "squeeze", "std", "sub", "sum", "t", "tanh", "topk",
    "transpose", "unbind", "unsqueeze", "var", "view",
)  # fmt: skip


class TensorMethods:
    """Methods that each call `__torch_function__` with the function of torch or of Python."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError


def _method(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def call(self: TensorMethods, *args: Any, **kwargs: Any) -> Any:
        operands = (*args, self) if swapped else (self, *args)
        return self.__torch_function__(function, (), operands, kwargs)

    return call


for _name in (*_OPERATORS, *_ONE_SIDED):
    setattr(TensorMethods, f"__{_name}__", _method(getattr(operator, _name)))
for _name in _OPERATORS:
    setattr(TensorMethods, f"__r{_name}__", _method(getattr(operator, _name), swapped=True))
for _name in _METHODS:
    setattr(TensorMethods, _name, _method(getattr(Tensor, _name)))

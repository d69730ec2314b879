"""Conversion of tensors of any dtype for the back ends, as numbers to add or as bytes to move.

Moving needs no arithmetic, so a dtype that a back end does not know travels as bytes. Reducing
needs arithmetic, so a tensor travels in the nearest dtype with the same results, or is refused.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.flight_recorder import dtype_name
from torchdistpackage.errors import CommError

PLAIN = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)
"""Dtypes that both gloo and NCCL accept in every collective."""

_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}


def to_bytes(x: Tensor) -> Tensor:
    """Return the same rows, contiguous, in a dtype that all back ends can move; a view if
    possible.
    """
    if x.requires_grad:
        x = x.detach()
    if x.is_neg() or x.is_conj():
        x = x.resolve_conj().resolve_neg()
    if x.dtype in PLAIN:
        return x.contiguous()
    return x.contiguous().unsqueeze(-1).view(torch.uint8)


def in_place_of(x: Tensor, wire: Tensor) -> Callable[[], Tensor] | None:
    """Return a function that copies `wire`, made by `to_bytes`, back to `x`; None: same memory."""
    if wire.data_ptr() == x.data_ptr():
        return None

    def back() -> Tensor:
        with torch.no_grad():
            return x.copy_(wire if wire.dtype == x.dtype else wire.view(x.dtype).squeeze(-1))

    return back


def to_reducible(
    x: Tensor, op: dist.ReduceOp.RedOpType
) -> tuple[Tensor, Callable[[], Tensor] | None]:
    """Return (tensor to reduce in place, function that copies the result to `x`; None: same
    memory).

    Raises:
        CommError: this dtype has no such reduction.
    """
    wire, dtype = x.detach() if x.requires_grad else x, x.dtype
    if wire.is_neg():
        wire = wire.resolve_neg()
    if dtype not in PLAIN:
        wire = _nearest(wire, op)
    elif not dtype.is_floating_point and op == dist.ReduceOp.AVG:
        raise _refusal(dtype, "averaged", "sum them, and divide")
    if not wire.is_contiguous():
        if any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)):
            raise CommError(
                f"a tensor of shape {tuple(x.shape)} whose elements share memory (expanded) cannot "
                f"hold the result of a reduction in place; use x.clone()"
            )
        wire = wire.contiguous()
    if wire is x or (wire.dtype in PLAIN and wire.data_ptr() == x.data_ptr()):
        return wire, None

    def back() -> Tensor:
        with torch.no_grad():
            return x.copy_(torch.view_as_complex(wire) if dtype.is_complex else wire)

    return wire, back


def as_added(x: Tensor) -> Tensor:
    """Return contiguous rows in a dtype that every back end can add; `from_added` converts back.

    Raises:
        CommError: this dtype has no sum.
    """
    if x.requires_grad:
        x = x.detach()
    if x.is_neg():
        x = x.resolve_neg()
    return (x if x.dtype in PLAIN else _nearest(x, dist.ReduceOp.SUM)).contiguous()


def from_added(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Return reduced `as_added` tensors in their original `dtype`."""
    # undoes as_added: the back end reduced a dtype that it can add
    return torch.view_as_complex(wire) if dtype.is_complex else wire.to(dtype)


def added(parts: Sequence[Tensor], kept_index: int | None = None) -> Tensor:
    """Return the sum of the parts in their order, in the memory of a part if possible.

    Narrow floats are added in float32, so that each element is rounded once.

    kept_index: index of a tensor that must not be overwritten.
    """
    total, *others = parts
    if total.is_floating_point() and total.itemsize < 4:
        # back to the dtype of the parts: only the additions are wide
        return sum((part.float() for part in others), total.float()).to(total.dtype)
    if kept_index == 0:
        total = others.pop(0).add_(total)
    for part in others:
        total.add_(part)
    return total


def _nearest(x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    """Return the tensor in the nearest dtype that has the same reductions; refuse other dtypes."""
    dtype = x.dtype
    if dtype.is_complex:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise _refusal(dtype, "ordered", "reduce its abs()")
        return torch.view_as_real(x.resolve_conj())
    if op == dist.ReduceOp.AVG:
        raise _refusal(dtype, "averaged", "convert it to a float")
    if dtype in _WIDER:
        return x.to(_WIDER[dtype])
    if dtype is torch.bool:
        # torch adds booleans as numbers; gloo would add bytes, which wrap at 256 ranks
        return x.to(torch.int32)
    wider = "bfloat16" if dtype.is_floating_point else "int64"
    raise _refusal(dtype, "reduced", f"convert it to {wider}, or gather it and reduce it yourself")


def _refusal(dtype: torch.dtype, action: str, instead: str) -> CommError:
    return CommError(f"tensors of dtype {dtype_name(dtype)} cannot be {action}; {instead}")

"""What each collective puts where: the arithmetic of the in-memory transport.

One rule: inputs are read when all members have met, outputs are written before any of them goes
on, and sums run in group order, so the same inputs give the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.harness.lint.matcher import CREATION, SPLIT, START, Disagreement, PendingOp
from torchdistpackage.harness.lint.replay import split

OPS: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "avg": (dist.ReduceOp.AVG, torch.add),
    "product": (dist.ReduceOp.PRODUCT, torch.mul),
    "min": (dist.ReduceOp.MIN, torch.minimum),
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "band": (dist.ReduceOp.BAND, torch.bitwise_and),
    "bor": (dist.ReduceOp.BOR, torch.bitwise_or),
    "bxor": (dist.ReduceOp.BXOR, torch.bitwise_xor),
}


@dataclass
class Payload:
    """One rank's tensors in a collective. root: index in the group, where there is one."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    op: str = ""
    root: int = 0


def op_name(op: object) -> str:
    """`sum` for ReduceOp.SUM.

    Raises:
        NotImplementedError: the operation scales or is a user's own.
    """
    for name, (known, _) in OPS.items():
        if op == known:
            return name
    raise NotImplementedError(f"reduce operation {op} is not delivered between threads")


@torch.no_grad()
def deliver(entries: list[PendingOp]) -> None:
    """Move the data of a collective whose members, in group order, have all entered.

    Raises:
        Disagreement: what one sends another does not expect.
    """
    assert entries[0].call is not None
    operation = entries[0].call.operation
    _RULES[operation](entries, [e.payload for e in entries])


@torch.no_grad()
def copy(source: Tensor, target: Tensor) -> None:
    """The elements of `source` in order, whatever the two shapes."""
    if source.numel():
        target.detach().copy_(source.detach().reshape(target.shape))


def combined(tensors: list[Tensor], op: str) -> Tensor:
    """Element-wise over the ranks.

    As NCCL has it, floats of a mean are divided first, so that no sum overflows, and a mean of
    whole numbers is cut.
    """
    exact = tensors[0].is_floating_point() or tensors[0].is_complex()
    if op == "avg" and exact:
        tensors = [x / len(tensors) for x in tensors]
    first, *rest = tensors
    total = reduce(OPS[op][1], rest, first.detach().clone())
    return total // len(tensors) if op == "avg" and not exact else total


def even_parts(x: Tensor, size: int, number: int) -> list[Tensor]:
    """Views of `size` elements each; a tensor of another number raises ValueError."""
    if x.numel() != size * number or not x.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} stands for {number} parts of {size} elements; "
            f"give a contiguous one of {size * number}"
        )
    flat = x.detach().view(-1)
    return [flat[i * size : (i + 1) * size] for i in range(number)]


def rows(x: Tensor, sizes: Sequence[int] | None, number: int) -> list[Tensor]:
    """Views of as many rows each as `sizes` say, or even ones."""
    sizes = list(sizes or [x.shape[0] // number] * number)
    if sum(sizes) != x.shape[0]:
        raise ValueError(f"{sizes} rows to exchange are not the {x.shape[0]} rows of the tensor")
    return list(x.detach().split(sizes))


def _all_reduce(entries: list[PendingOp], payloads: list[Payload]) -> None:
    for same in zip(*(p.inputs for p in payloads), strict=True):
        total = combined(list(same), payloads[0].op)
        for x in same:
            copy(total, x)


def _reduce(entries: list[PendingOp], payloads: list[Payload]) -> None:
    root = payloads[0].root
    for same in zip(*(p.inputs for p in payloads), strict=True):
        copy(combined(list(same), payloads[0].op), same[root])


def _broadcast(entries: list[PendingOp], payloads: list[Payload]) -> None:
    root = payloads[0].root
    for same in zip(*(p.inputs for p in payloads), strict=True):
        for i, x in enumerate(same):
            if i != root:
                copy(same[root], x)


def _all_gather(entries: list[PendingOp], payloads: list[Payload]) -> None:
    for i, source in enumerate(payloads):
        for j, target in enumerate(payloads):
            _same_size(entries, i, j, source.inputs[0], target.outputs[i])
    kept = [p.inputs[0].clone() for p in payloads]
    for target in payloads:
        for x, room in zip(kept, target.outputs, strict=True):
            copy(x, room)


def _reduce_scatter(entries: list[PendingOp], payloads: list[Payload]) -> None:
    for i, target in enumerate(payloads):
        for j, source in enumerate(payloads):
            _same_size(entries, j, i, source.inputs[i], target.outputs[0])
    op = payloads[0].op
    parts = [combined([p.inputs[i] for p in payloads], op) for i in range(len(payloads))]
    for part, target in zip(parts, payloads, strict=True):
        copy(part, target.outputs[0])


def _all_to_all(entries: list[PendingOp], payloads: list[Payload]) -> None:
    for i, source in enumerate(payloads):
        for j, target in enumerate(payloads):
            _same_size(entries, i, j, source.inputs[j], target.outputs[i])
    kept = [[x.clone() for x in p.inputs] for p in payloads]
    for j, target in enumerate(payloads):
        for i, room in enumerate(target.outputs):
            copy(kept[i][j], room)


def _gather(entries: list[PendingOp], payloads: list[Payload]) -> None:
    root = payloads[0].root
    for i, source in enumerate(payloads):
        _same_size(entries, i, root, source.inputs[0], payloads[root].outputs[i])
        copy(source.inputs[0], payloads[root].outputs[i])


def _scatter(entries: list[PendingOp], payloads: list[Payload]) -> None:
    root = payloads[0].root
    for i, target in enumerate(payloads):
        _same_size(entries, root, i, payloads[root].inputs[i], target.outputs[0])
        copy(payloads[root].inputs[i], target.outputs[0])


def _nothing(entries: list[PendingOp], payloads: list[Payload]) -> None:
    """A barrier, or the making of a group."""


def _same_size(entries: list[PendingOp], i: int, j: int, sent: Tensor, room: Tensor) -> None:
    if sent.numel() != room.numel():
        one, other = entries[i], entries[j]
        assert one.call is not None
        raise Disagreement(
            one,
            other,
            f"in {one.call.operation} {one.number} rank {one.rank} gives rank {other.rank} "
            f"{tuple(sent.shape)}, but that has room for {tuple(room.shape)}",
        )


_RULES: dict[str, Callable[[list[PendingOp], list[Any]], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _nothing,
    CREATION.operation: _nothing,
    START.operation: _nothing,
    SPLIT.operation: split,
}

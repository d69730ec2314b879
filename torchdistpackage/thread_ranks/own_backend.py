"""The interface between torch.distributed and our own back ends, of `Collective`s and messages.

torch calls the methods of a group and of a handle by the names here, which change with its version.
A back end decides what a call does: that of harness/late, or the order linter's transport.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HERE = __file__
"""Frames of this file are left out of the stacks of calls."""
Tensors = Sequence[Tensor]

_OPS: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "avg": (dist.ReduceOp.AVG, torch.add),
    "product": (dist.ReduceOp.PRODUCT, torch.mul),
    "min": (dist.ReduceOp.MIN, torch.minimum),
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "band": (dist.ReduceOp.BAND, torch.bitwise_and),
    "bor": (dist.ReduceOp.BOR, torch.bitwise_or),
    "bxor": (dist.ReduceOp.BXOR, torch.bitwise_xor),
}


@dataclass(slots=True)
class Collective:
    """One member's part in a collective.

    like: tensors whose shapes and dtypes all members must have. sends[i]: what to send to member i.
    rooms[i]: tensors shaped like what member i sends. writes: the tensors to write the result to:
    what arrived, or its reduction by `op`. root: the root's index in the group.
    """

    operation: str
    like: Tensors
    sends: Sequence[Tensors]
    rooms: Sequence[Tensors]
    writes: Tensors
    op: str = ""
    root: int | None = None


class OwnWork(dist.Work):
    """The handle of a call that writes the tensors `result`."""

    def __init__(self, result: Tensors):
        super().__init__()
        self._result = list(result)

    def synchronize(self) -> None:
        """Wait; torch's own code calls this name."""
        self.wait()

    def get_future(self) -> torch.futures.Future:
        """Return a future that completes at the end of a backward, or at once outside of one.

        A wait inside a backward would keep the other ranks from going on.
        """
        future = torch.futures.Future()

        def settle() -> None:
            self.wait()
            future.set_result(self._result)

        if torch._C._current_graph_task_id() == -1:
            settle()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(settle)
        return future


class OwnGroup(dist.ProcessGroup):
    """One member's end of a group; `rank` is its index in the group, as in torch."""

    def __init__(self, rank: int, size: int, name: str, backend: str):
        super().__init__(rank, size)
        self._name, self._backend = name, backend

    def getBackendName(self) -> str:
        """Return the name of the back end."""
        return self._backend

    @property
    def group_name(self) -> str:
        """The name that torch gave the group."""
        return self._name

    @abstractmethod
    def collective(self, call: Collective, is_async: bool) -> dist.Work:
        """Issue a collective."""

    def _issue(self, opts, *parts, **options) -> dist.Work:
        """Issue the collective with these fields of `Collective`."""
        return self.collective(Collective(*parts, **options), bool(getattr(opts, "asyncOp", False)))

    def _at(self, root: int, tensors: Tensors) -> list[Tensors]:
        """Return these tensors for the root, and none for the other members."""
        return [tensors if i == root else [] for i in range(self.size())]

    # -- by the names that torch.distributed calls ---------------------------------------

    def allreduce(self, tensors: list[Tensor], opts=None) -> dist.Work:
        all_ = [tensors] * self.size()
        return self._issue(opts, "all_reduce", tensors, all_, all_, tensors, op=_op(opts))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts) -> dist.Work:
        n, root = self.size(), opts.rootRank
        writes = tensors if self.rank() == root else []
        parts = self._at(root, tensors), [writes] * n, writes
        return self._issue(opts, "reduce", tensors, *parts, op=_op(opts), root=root)

    def broadcast(self, tensors: list[Tensor], opts) -> dist.Work:
        n, root = self.size(), opts.rootRank
        sends, writes = ([tensors] * n, []) if self.rank() == root else ([[]] * n, tensors)
        parts = sends, self._at(root, writes), writes
        return self._issue(opts, "broadcast", tensors, *parts, root=root)

    def allgather(self, outputs, inputs: list[Tensor], opts=None) -> dist.Work:
        n = self.size()
        rooms = [[room[i] for room in outputs] for i in range(n)]
        return self._issue(opts, "all_gather", inputs, [inputs] * n, rooms, flat(rooms))

    def reduce_scatter(self, outputs: list[Tensor], inputs, opts=None) -> dist.Work:
        n = self.size()
        sends = [[parts[i] for parts in inputs] for i in range(n)]
        parts = sends, [outputs] * n, outputs
        return self._issue(opts, "reduce_scatter", outputs, *parts, op=_op(opts))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts=None) -> dist.Work:
        parts = [[x] for x in inputs], [[x] for x in outputs], outputs
        return self._issue(opts, "all_to_all", outputs, *parts)

    def gather(self, outputs, inputs: list[Tensor], opts) -> dist.Work:
        rooms = [[x] for x in outputs[0]] if outputs else [[]] * self.size()
        parts = self._at(opts.rootRank, inputs), rooms, flat(rooms)
        return self._issue(opts, "gather", inputs, *parts, root=opts.rootRank)

    def scatter(self, outputs: list[Tensor], inputs, opts) -> dist.Work:
        sends = [[x] for x in inputs[0]] if inputs else [[]] * self.size()
        parts = sends, self._at(opts.rootRank, outputs), outputs
        return self._issue(opts, "scatter", outputs, *parts, root=opts.rootRank)

    def barrier(self, opts=None) -> dist.Work:
        token = [torch.zeros(1, dtype=torch.uint8)]
        all_ = [token] * self.size()
        return self._issue(opts, "barrier", token, all_, all_, token, op="max")

    def all_gather_single_coalesced(self, outputs, inputs, opts=None) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return self.allgather([_even_parts(out, x, self.size()) for out, x in pairs], inputs, opts)

    def all_gather_single(self, output: Tensor, x: Tensor, opts=None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [x], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        parts = [_even_parts(x, out, self.size()) for out, x in pairs]
        return self.reduce_scatter(outputs, parts, opts)

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts=None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [x], opts)

    def all_to_all_single(
        self, output: Tensor, x: Tensor, output_sizes=None, input_sizes=None, opts=None
    ) -> dist.Work:
        n = self.size()
        return self.alltoall(_rows(output, output_sizes, n), _rows(x, input_sizes, n), opts)

    # names before torch 2.13
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def flat(parts: Sequence[Tensors]) -> list[Tensor]:
    """Return all tensors of `parts` in one list."""
    return [x for tensors in parts for x in tensors]


@torch.no_grad()
def copy(source: Tensor, target: Tensor) -> None:
    """Copy the elements of `source` in order; the shapes may differ."""
    if source.numel():
        target.detach().copy_(source.detach().reshape(target.shape))


def combined(tensors: Tensors, op: str) -> Tensor:
    """Return the element-wise reduction over the ranks, in group order.

    A mean is NCCL's: floats are divided first, so that the sum does not overflow, and the mean of
    integers is rounded down.
    """
    exact = tensors[0].is_floating_point() or tensors[0].is_complex()
    if op == "avg" and exact:
        tensors = [x / len(tensors) for x in tensors]
    first, *rest = tensors
    total = reduce(_OPS[op][1], rest, first.detach().clone())
    return total // len(tensors) if op == "avg" and not exact else total


def _op(opts) -> str:
    """Return the name of a reduction, `sum` for ReduceOp.SUM; refuse one that `_OPS` lacks."""
    reduce_op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for name, (candidate, _) in _OPS.items():
        if reduce_op == candidate:
            return name
    raise NotImplementedError(
        f"threads cannot reduce with operation {reduce_op}; use one of {', '.join(_OPS)}"
    )


def _even_parts(x: Tensor, like: Tensor, number: int) -> list[Tensor]:
    """Return a view of `x` for each member, shaped like `like`; refuse an `x` of another size."""
    size = like.numel()
    if x.numel() != size * number or not x.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} must hold {number} parts of {size} elements; "
            f"pass a contiguous one of {size * number} elements"
        )
    parts = x.detach().view(-1)
    return [parts[i * size : (i + 1) * size].view(like.shape) for i in range(number)]


def _rows(x: Tensor, sizes: Sequence[int] | None, number: int) -> list[Tensor]:
    """Return views of `x` with the numbers of rows in `sizes`, or with equal numbers."""
    sizes = list(sizes or [x.shape[0] // number] * number)
    if sum(sizes) != x.shape[0]:
        raise ValueError(
            f"the sizes {sizes} add up to {sum(sizes)}, but the tensor has {x.shape[0]} rows; pass "
            "sizes that add up to them"
        )
    return list(x.detach().split(sizes))

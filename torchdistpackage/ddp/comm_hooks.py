"""Communication hooks that send fewer bytes: `bf16_compress`, `fp16_compress`, `PowerSGD`.

A hook (`CommHook` in bucket_comm.py) leaves in the bucket an approximation of the plain reduction,
and keeps the used flags at its end, which count ranks, zero or positive.

PowerSGD is algorithms 1 and 2 of arXiv:1905.13727. For a matrix M (rows, cols), ranks sum
P = M Q (rows, rank), make it orthonormal, and sum M^T P (cols, rank), which is the Q of the next
step: one power iteration a step, from a warm start. Each rank adds what P Q^T misses of its own M
to its next M. So everything sent so far and what ranks still keep add up to the sum of all
gradients.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import cast
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.ddp.bucket_comm import BucketMember, CommWork, Start


def bf16_compress(flat: Tensor, group: Group, op: object = primitives.SUM) -> CommWork:
    """Reduce in bf16, half the bytes of fp32. Gradients and their sums are rounded to 8 bits."""
    return _narrow(flat, group, op, torch.bfloat16)


def fp16_compress(flat: Tensor, group: Group, op: object = primitives.SUM) -> CommWork:
    """Reduce in fp16, half the bytes of fp32, with less rounding and less range than bf16.

    It overflows only if the result exceeds 65504, because a mean is divided before the sum.
    """
    return _narrow(flat, group, op, torch.float16)


def narrowed(dtype: torch.dtype, start: Start = primitives.start_all_reduce) -> Start:
    """Return `start` with floats wider than `dtype` cast to `dtype`."""
    return partial(_narrow, dtype=dtype, start=start)


def _narrow(
    flat: Tensor,
    group: Group,
    op: object,
    dtype: torch.dtype,
    start: Start = primitives.start_all_reduce,
) -> CommWork:
    """Cast the bucket to a narrower dtype if that saves bytes, and start to reduce the copy."""
    narrower = flat.is_floating_point() and flat.element_size() > dtype.itemsize
    if group.size() == 1 or not narrower:
        return start(flat, group, op)
    # the smaller dtype is for the network alone; gradients keep theirs
    wire = flat.to(dtype)
    return _Narrowed(flat, wire, start(wire, group, op))


class _Narrowed:
    """A reduction in flight of a narrower copy; `wait` writes it back to the bucket."""

    __slots__ = ("_flat", "_pending", "_wire")

    def __init__(self, flat: Tensor, wire: Tensor, pending: CommWork):
        self._flat, self._wire, self._pending = flat, wire, pending

    def wait(self) -> None:
        # the sum must be there before it is copied back
        self._pending.wait()
        # the optimizer reads the bucket in its own dtype
        self._flat.copy_(self._wire)


# -- PowerSGD ---------------------------------------------------------------------------------


class PowerSGD:
    """PowerSGD with error feedback. One object serves any number of buckets.

    rank: columns of the two factors. For a matrix (n, m), ranks send (n + m) * rank elements
        instead of n * m. Vectors, matrices that would not become smaller, and dtypes other than
        fp32 and fp64 are sent uncompressed.
    num_exact_steps: number of first steps that reduce everything exactly.
    seed: seed of the first Q, the same on all ranks.

    It keeps an error of the gradient's size for each compressed parameter; pickles omit these.
    """

    def __init__(self, rank: int = 4, *, num_exact_steps: int = 0, seed: int = 0):
        if rank < 1:
            raise ValueError(f"rank is {rank}; use 1 or more columns")
        self.rank, self.num_exact_steps, self.seed = rank, num_exact_steps, seed
        self.underway: list[_Underway] = []
        self._matrices = WeakTensorKeyDictionary()

    def bind(self, members: Sequence[BucketMember], num_elements: int) -> Start:
        """Return the start function of one bucket; state of its members from old buckets stays."""
        matrices: list[_Matrix] = []
        plain: list[tuple[int, int]] = []
        end = 0
        for member in members:
            start, end = member.offset, member.offset + math.prod(member.shape)
            rows, cols = _as_matrix(member)
            rank = min(self.rank, rows, cols)
            if (rows + cols) * rank >= rows * cols:
                plain.append((start, end))
                continue
            matrix = self._matrices.get(member.parameter)
            if matrix is None:
                seed = self.seed + crc32(member.name.encode())
                matrix = _Matrix(rows, cols, rank, self.num_exact_steps, seed)
                self._matrices[member.parameter] = matrix
            matrix.start = start
            matrices.append(matrix)
        return partial(self._start, matrices, [*plain, (end, num_elements)])

    def _start(
        self,
        matrices: list["_Matrix"],
        plain: list[tuple[int, int]],
        flat: Tensor,
        group: Group,
        op: object = primitives.SUM,
    ) -> CommWork:
        is_exact = any(m.num_exact > 0 for m in matrices)
        for matrix in matrices:
            matrix.num_exact -= 1
        # torch has no QR decomposition in half precision
        is_wide = flat.dtype in (torch.float32, torch.float64)
        if group.size() == 1 or is_exact or not (is_wide and matrices):
            return primitives.start_all_reduce(flat, group, op)
        self.underway.append(reduction := _Underway(self, matrices, plain, flat, group, op))
        return reduction

    def __getstate__(self) -> dict[str, int]:
        return {"rank": self.rank, "num_exact_steps": self.num_exact_steps, "seed": self.seed}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(**state)


def _as_matrix(member: BucketMember) -> tuple[int, int]:
    """Return (rows, cols) of the member in memory order, as near to square as its dims allow."""
    by_stride = sorted(zip(member.stride, member.shape, strict=True), reverse=True)
    num_elements, rows = math.prod(member.shape), 1
    cuts: list[tuple[int, int]] = []
    for _, extent in by_stride:
        rows *= extent
        if rows:
            cuts.append((rows, num_elements // rows))
    return min(cuts, key=sum, default=(1, num_elements))


class _Matrix:
    """State of one member: its place, its Q, its error so far, and its remaining exact steps."""

    def __init__(self, rows: int, cols: int, rank: int, num_exact: int, seed: int):
        self.start, self.rows, self.cols, self.rank = 0, rows, cols, rank
        self.num_exact = num_exact
        draw = torch.Generator().manual_seed(seed)
        # drawn on the CPU in one dtype, so that Q is the same on all devices; narrowed at first use
        self.q = torch.randn(cols, rank, generator=draw, dtype=torch.float64)
        self.lost: Tensor | None = None

    def of(self, flat: Tensor) -> Tensor:
        """Return the member's elements in the bucket as a matrix."""
        return flat[self.start : self.start + self.rows * self.cols].view(self.rows, self.cols)

    def correct(self, flat: Tensor) -> Tensor:
        """Add this rank's error of earlier steps to its gradient in the bucket, and return it."""
        matrix = self.of(flat)
        if self.lost is None:
            self.q, self.lost = self.q.to(matrix), torch.zeros_like(matrix)
        return matrix.add_(self.lost)


class _Underway:
    """One compressed reduction in flight: first P and then, after `send_q`, Q."""

    def __init__(
        self,
        hook: PowerSGD,
        matrices: list[_Matrix],
        plain: list[tuple[int, int]],
        flat: Tensor,
        group: Group,
        op: object,
    ):
        self._hook, self._matrices = hook, matrices
        self._flat, self._group, self._op = flat, group, op
        self._plain = [flat[start:stop] for start, stop in plain]
        self._ps = [m.correct(flat) @ m.q for m in matrices]
        self._first = _FusedAllReduce([*self._ps, *self._plain], group, op)
        self._second: _FusedAllReduce | None = None

    def wait(self) -> None:
        """Wait for Q, and leave P Q^T in the bucket.

        First all reductions in flight send their Q, in the order of their launches, so that the Q
        of one bucket does not wait for that of another.
        """
        for reduction in self._hook.underway:
            reduction.send_q()
        self._hook.underway.remove(self)
        # the gradient is P Q^T, so it needs the Q that all ranks have summed
        qs = cast(_FusedAllReduce, self._second).wait()
        for matrix, p, q in zip(self._matrices, self._ps, qs, strict=True):
            torch.mm(p, q.T, out=matrix.of(self._flat))
            # keep Q finite: one step with NaN must not spoil all later steps
            matrix.q = q.nan_to_num(0.0, 0.0, 0.0)

    def send_q(self) -> None:
        """Wait for the sum of P, make it orthonormal, and start to sum Q."""
        if self._second is not None:
            return
        # the sum must be complete: a P that is made orthonormal first would differ between ranks
        arrived = self._first.wait()
        sums, plain = arrived[: len(self._matrices)], arrived[len(self._matrices) :]
        for part, reduced in zip(self._plain, plain, strict=True):
            part.copy_(reduced)
        if primitives.is_queued(self._group):  # batching saves kernel launches, which CPUs have not
            self._ps = _orthonormal(sums)
        else:
            self._ps = [torch.linalg.qr(p).Q for p in sums]
        qs = []
        for matrix, p in zip(self._matrices, self._ps, strict=True):
            corrected = matrix.of(self._flat)
            qs.append(q := corrected.T @ p)
            lost = cast(Tensor, matrix.lost)
            torch.addmm(corrected, p, q.T, alpha=-1, out=lost)
            lost.nan_to_num_(0.0, 0.0, 0.0)
        self._second = _FusedAllReduce(qs, self._group, self._op)


def _orthonormal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return an orthonormal basis Q of each matrix, with one call for all of one shape."""
    by_shape: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(index)
    bases = list(matrices)
    for indices in by_shape.values():
        qs = torch.linalg.qr(torch.stack([matrices[index] for index in indices])).Q
        for index, q in zip(indices, qs, strict=True):
            bases[index] = q
    return bases


class _FusedAllReduce:
    """Several tensors in one all-reduce."""

    def __init__(self, parts: list[Tensor], group: Group, op: object):
        self._shapes = [part.shape for part in parts]
        joined = torch.cat([part.reshape(-1) for part in parts])
        self._pending = primitives.start_all_reduce(joined, group, op)

    def wait(self) -> list[Tensor]:
        # the views returned here share the memory that the collective still writes
        joined = self._pending.wait()
        parts = joined.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

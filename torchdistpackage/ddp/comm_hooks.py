"""Communication hooks that send fewer bytes: `bf16_compress`, `fp16_compress`, `PowerSGD`.

A hook (`CommHook` in bucket_comm.py) gives back in the bucket what the plain reduction would, only
less exactly, and keeps the used flags at its end, which count ranks, zero or positive.

PowerSGD is algorithms 1 and 2 of arXiv:1905.13727. A matrix M (rows, cols) goes as P = M Q (rows,
rank), is made orthonormal after the sum, and as M^T P (cols, rank), which is the next step's Q: one
power iteration a step, from a warm start. What P Q^T misses of my own M is added to my next M, so
that all that was ever sent and what ranks still keep is together the sum of all gradients.
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
    """Half the bytes of fp32: numbers are rounded to 8 bits, and so are their sums."""
    return _narrow(flat, group, op, torch.bfloat16)


def fp16_compress(flat: Tensor, group: Group, op: object = primitives.SUM) -> CommWork:
    """Half the bytes of fp32, in 11 bits: smaller rounding than bf16, and a smaller range.

    It overflows beyond 65504, where the result does: a mean is divided before it is summed.
    """
    return _narrow(flat, group, op, torch.float16)


def narrowed(dtype: torch.dtype, start: Start = primitives.start_all_reduce) -> Start:
    """`start`, given floats that are wider than `dtype` as `dtype`."""
    return partial(_narrow, dtype=dtype, start=start)


def _narrow(
    flat: Tensor,
    group: Group,
    op: object,
    dtype: torch.dtype,
    start: Start = primitives.start_all_reduce,
) -> CommWork:
    narrower = flat.is_floating_point() and flat.element_size() > dtype.itemsize
    if group.size() == 1 or not narrower:
        return start(flat, group, op)
    wire = flat.to(dtype)
    return _Narrowed(flat, wire, start(wire, group, op))


class _Narrowed:
    """Rounded numbers on their way."""

    __slots__ = ("_flat", "_pending", "_wire")

    def __init__(self, flat: Tensor, wire: Tensor, pending: CommWork):
        self._flat, self._wire, self._pending = flat, wire, pending

    def wait(self) -> None:
        self._pending.wait()
        self._flat.copy_(self._wire)


# -- PowerSGD ---------------------------------------------------------------------------------


class PowerSGD:
    """PowerSGD with error feedback. One object serves any number of buckets.

    rank: columns of the two factors. Of a matrix (n, m), (n + m) * rank elements are sent instead
        of n * m; sent uncompressed are tensors that would not become smaller, vectors, and dtypes
        other than fp32 and fp64.
    num_exact_steps: number of first steps that reduce everything exactly.
    seed: of the first Q, the same on all ranks.

    Keeps as many bytes as the compressed gradients take, by parameter; a pickle leaves them out.
    """

    def __init__(self, rank: int = 4, *, num_exact_steps: int = 0, seed: int = 0):
        if rank < 1:
            raise ValueError(f"rank is {rank}; use 1 or more columns")
        self.rank, self.num_exact_steps, self.seed = rank, num_exact_steps, seed
        self.underway: list[_Underway] = []
        self._matrices = WeakTensorKeyDictionary()

    def bind(self, members: Sequence[BucketMember], num_elements: int) -> Start:
        """The start of one bucket; what was kept for its members in another one stays."""
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
        is_wide = flat.dtype in (torch.float32, torch.float64)
        if group.size() == 1 or is_exact or not (is_wide and matrices):
            return primitives.start_all_reduce(flat, group, op)
        self.underway.append(begun := _Underway(self, matrices, plain, flat, group, op))
        return begun

    def __getstate__(self) -> dict[str, int]:
        return {"rank": self.rank, "num_exact_steps": self.num_exact_steps, "seed": self.seed}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(**state)


def _as_matrix(member: BucketMember) -> tuple[int, int]:
    """(rows, cols) of the member as it lies in memory, as near to square as its dims allow."""
    by_stride = sorted(zip(member.stride, member.shape, strict=True), reverse=True)
    num_elements, rows = math.prod(member.shape), 1
    cuts: list[tuple[int, int]] = []
    for _, extent in by_stride:
        rows *= extent
        if rows:
            cuts.append((rows, num_elements // rows))
    return min(cuts, key=sum, default=(1, num_elements))


class _Matrix:
    """One member: where it lies, its Q, what was lost so far, and how long it goes as it is."""

    def __init__(self, rows: int, cols: int, rank: int, num_exact: int, seed: int):
        self.start, self.rows, self.cols, self.rank = 0, rows, cols, rank
        self.num_exact = num_exact
        draw = torch.Generator().manual_seed(seed)
        self.q = torch.randn(cols, rank, generator=draw, dtype=torch.float64)
        self.lost: Tensor | None = None

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.rows * self.cols].view(self.rows, self.cols)

    def correct(self, flat: Tensor) -> Tensor:
        """My gradient, in the bucket, with what was lost of it before."""
        matrix = self.of(flat)
        if self.lost is None:
            self.q, self.lost = self.q.to(matrix), torch.zeros_like(matrix)
        return matrix.add_(self.lost)


class _Underway:
    """P on its way; then, after `send_q`, Q."""

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
        """Leave P Q^T, what came in both messages, in the bucket.

        Those that left earlier send their Q first, and all that have left send theirs now, so that
        no Q waits for the one before it.
        """
        for begun in self._hook.underway:
            begun.send_q()
        self._hook.underway.remove(self)
        qs = cast(_FusedAllReduce, self._second).wait()
        for matrix, p, q in zip(self._matrices, self._ps, qs, strict=True):
            torch.mm(p, q.T, out=matrix.of(self._flat))
            # one step that was not finite must not spoil all that follow
            matrix.q = q.nan_to_num(0.0, 0.0, 0.0)

    def send_q(self) -> None:
        if self._second is not None:
            return
        arrived = self._first.wait()
        sums, plain = arrived[: len(self._matrices)], arrived[len(self._matrices) :]
        for part, came in zip(self._plain, plain, strict=True):
            part.copy_(came)
        if primitives.is_queued(self._group):  # a processor has no launches to save
            self._ps = _orthonormal(sums)
        else:
            self._ps = [torch.linalg.qr(p).Q for p in sums]
        qs = []
        for matrix, p in zip(self._matrices, self._ps, strict=True):
            mine = matrix.of(self._flat)
            qs.append(q := mine.T @ p)
            lost = cast(Tensor, matrix.lost)
            torch.addmm(mine, p, q.T, alpha=-1, out=lost)
            lost.nan_to_num_(0.0, 0.0, 0.0)
        self._second = _FusedAllReduce(qs, self._group, self._op)


def _orthonormal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Q of each, (rows, rank); those of one shape are factored in one call."""
    alike: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(matrices):
        alike.setdefault(matrix.shape, []).append(index)
    found = list(matrices)
    for indices in alike.values():
        qs = torch.linalg.qr(torch.stack([matrices[index] for index in indices])).Q
        for index, q in zip(indices, qs, strict=True):
            found[index] = q
    return found


class _FusedAllReduce:
    """Tensors that are reduced as one."""

    def __init__(self, parts: list[Tensor], group: Group, op: object):
        self._shapes = [part.shape for part in parts]
        joined = torch.cat([part.reshape(-1) for part in parts])
        self._pending = primitives.start_all_reduce(joined, group, op)

    def wait(self) -> list[Tensor]:
        joined = self._pending.wait()
        parts = joined.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

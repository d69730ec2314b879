"""Merge score rectangles into one softmax, one at a time, and compute the gradients of each.

A merge weights the outputs of two parts of a softmax by their log-sum-exps (Milakov, Gimelshein,
arXiv:1805.02867). Sums are kept in at least float32, whatever the dtype of queries and keys:
rounding each merge to half precision would add an error for every rectangle.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdistpackage.parallel.context.kernels import Drawn, Gradients, Kernel, Options
from torchdistpackage.parallel.context.visibility import Seen, Task, Visibility

Tasks = Sequence[Task]


@dataclass(frozen=True)
class Scoring:
    """The kernels, mask and options that score every rectangle of one attention.

    masked: the kernel of rectangles that need a mask; None: `kernel`.
    """

    kernel: Kernel
    visibility: Visibility
    scale: float
    dropout: float = 0.0
    masked: Kernel | None = None

    def forward(self, task: Task, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Drawn]:
        return self._kernel(task).forward(q, k, v, self._mask(task, q), self._options(task))

    def backward(self, task: Task, drawn: Drawn, grad: Tensor, *tensors: Tensor) -> Gradients:
        """Return the gradients of one rectangle.

        tensors: q, k, v, and the merged output and log-sum-exp of these queries.
        """
        mask = self._mask(task, tensors[0])
        return self._kernel(task).backward(grad, *tensors, mask, drawn, self._options(task))

    def _kernel(self, task: Task) -> Kernel:
        return self.masked if self.masked and task.seen is Seen.SOME else self.kernel

    def _mask(self, task: Task, q: Tensor) -> Tensor | None:
        return self.visibility.mask(task, q.dtype, q.device) if task.seen is Seen.SOME else None

    def _options(self, task: Task) -> Options:
        return Options(self.scale, self.dropout, task.seen is Seen.CAUSAL)


class Merged:
    """Output and log-sum-exp of queries `q` (B, H, S, D) over all keys added so far.

    drawn: the dropout state of each task, in order.
    """

    def __init__(self, q: Tensor, scoring: Scoring):
        self._q, self._scoring = q, scoring
        self.out: Tensor | None = None
        self.lse: Tensor | None = None
        self.drawn: list[Drawn] = []

    def add(self, tasks: Tasks, k: Tensor, v: Tensor) -> None:
        """Merge in the keys (B, h, T, D) and values of a slice, for the visible rectangles
        `tasks`.
        """
        q = self._q
        for task in tasks:
            rows, columns = task.rows, task.columns
            out, lse, drawn = self._scoring.forward(
                task, q[:, :, rows], k[:, :, columns], v[:, :, columns]
            )
            self.drawn.append(drawn)
            # several parts are added up, so they are kept in float32 until the last one
            out = out.to(lse.dtype)
            if self.out is None or self.lse is None:
                if rows == slice(0, q.shape[2]):
                    self.out, self.lse = out, lse
                    continue
                self.out = out.new_zeros((*q.shape[:3], v.shape[3]))
                self.lse = lse.new_full(q.shape[:3], -torch.inf)
            lse_so_far = self.lse[:, :, rows]
            weight = torch.sigmoid(lse - lse_so_far).unsqueeze(-1)
            self.out[:, :, rows].lerp_(out, weight)
            self.lse[:, :, rows] = torch.logaddexp(lse_so_far, lse)

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the output, in the dtype of the queries, and the log-sum-exp."""
        assert self.out is not None and self.lse is not None
        return self.out.to(self._q.dtype), self.lse


class Backward:
    """Computes the gradients of one attention: of each slice's keys and values in turn, and of the
    queries.
    """

    def __init__(
        self,
        grad: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        scoring: Scoring,
        drawn: Sequence[Drawn],
    ):
        self._grad, self._q, self._out, self._lse = grad, q, out, lse
        self._scoring, self._drawn = scoring, iter(drawn)
        self._dq: Tensor | None = None

    def part(self, tasks: Tasks, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the keys and values of a slice; `tasks` in the order of the
        forward.
        """
        grad, q, out, lse = self._grad, self._q, self._out, self._lse
        wide = lse.dtype  # sum in at least float32: a key gathers gradients from all queries
        dk = dv = None
        for task in tasks:
            rows, columns = task.rows, task.columns
            grads = self._scoring.backward(
                task, next(self._drawn), grad[:, :, rows],
                q[:, :, rows], k[:, :, columns], v[:, :, columns], out[:, :, rows], lse[:, :, rows],
            )  # fmt: skip
            self._dq = _added(self._dq, grads[0], rows, q, wide)
            dk = _added(dk, grads[1], columns, k, wide)
            dv = _added(dv, grads[2], columns, v, wide)
        return (
            torch.zeros_like(k, dtype=wide) if dk is None else dk,
            torch.zeros_like(v, dtype=wide) if dv is None else dv,
        )

    def take(self) -> Tensor:
        """Return the gradient of the queries."""
        assert self._dq is not None
        # added up over hops in a wider type; autograd expects the type of the queries
        return self._dq.to(self._q.dtype)


def _added(total: Tensor | None, x: Tensor, where: slice, like: Tensor, dtype) -> Tensor:
    """Add `x` at the slice `where` of a running total, which begins as None."""
    # `dtype` is wide enough to add the terms of all hops without rounding each
    x = x.to(dtype)
    if total is None:
        if where == slice(0, like.shape[2]):
            return x
        total = torch.zeros_like(like, dtype=dtype)
    total[:, :, where] += x
    return total

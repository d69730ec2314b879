"""Gradients of which few rows are not zero travel as those rows and their numbers.

One rule: ranks first tell each other how many rows each has, in the order of all reductions, and
what follows from these counts is the same on all. Each rank names a row once, and all add the
rows up in group order, so that all end with equal bits.

`SparseGrad` is for sparse gradients, which stay sparse; embedding_rows.py has those of embeddings
whose gradients are dense.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group, Work
from torchdistpackage.ddp.param_spec import ParamSpec

DENSE, UNUSED = -1, -2
"""Instead of a count: the gradient here is dense; there is none."""


class UnbucketedGrad:
    """Stands where a bucket's gradients would, for one whose gradient stays where it is made."""

    def __init__(self, shared: ParamSpec, arrived: Callable[[], None]):
        self.members, self.views = (shared,), (None,)
        self._arrived = arrived

    def absorb(self, place: int, *, is_final: bool = False) -> None:
        """A gradient came."""
        self._arrived()

    def is_divided(self, place: int) -> bool:
        """Not before it is summed."""
        return False

    def detach_views(self) -> list[int]:
        """Nothing lives here."""
        return []


class RowCounts:
    """Exchange of how many rows each rank has, and of the rows; base of what sums them."""

    def __init__(self, group: Group):
        self._group = group
        self._pending: Work | None = None

    @property
    def launched(self) -> bool:
        return self._pending is not None

    def abandon(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def _start_counts(self, count: int, device: torch.device) -> None:
        word = torch.tensor([count], device=device)
        self._pending = primitives.start_all_gather(word, self._group)

    def _wait_counts(self) -> list[int]:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending.wait().tolist()

    def _all_rows(
        self, ids: Tensor, rows: Tensor, counts: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids, rows) of each rank."""
        sizes = [max(count, 0) for count in counts]
        both = [primitives.start_all_gather(x, self._group, sizes) for x in (ids, rows)]
        return zip(*(pending.wait().split(sizes) for pending in both), strict=True)


class SparseGrad(RowCounts):
    """Sum of a sparse gradient, coalesced. If it is dense on some rank it becomes so on all."""

    def __init__(self, shared: ParamSpec):
        super().__init__(shared.group)
        self.gradients = UnbucketedGrad(shared, lambda: None)
        self._shared = shared
        self._grad: Tensor | None = None

    def launch(self) -> None:
        parameter, self._grad = self._shared.parameter, None
        if (grad := parameter.grad) is not None:
            self._grad = grad.detach().to(self._shared.sum_dtype)
            if grad.is_sparse:
                self._grad = self._grad.coalesce()
        self._start_counts(_count(self._grad), parameter.device)

    def wait(self) -> None:
        counts, parameter, divide = self._wait_counts(), self._shared.parameter, self._shared.divide
        grad, self._grad, dtype = self._grad, None, self._shared.sum_dtype
        if max(counts) == UNUSED:
            return
        if DENSE in counts:
            whole = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            if grad is not None:
                whole += grad.to_dense() if grad.is_sparse else grad
            primitives.all_reduce(whole, self._group)
            parameter.grad = whole.div_(divide).to(parameter.dtype)
            return
        ids, rows = _parts(grad, parameter, dtype)
        gathered = list(self._all_rows(ids, rows, counts))
        ids = torch.cat([ids for ids, _ in gathered])
        rows = torch.cat([rows for _, rows in gathered])
        shape = parameter.shape
        # True and False are both an answer, without which torch warns
        total = torch.sparse_coo_tensor(ids[None], rows, shape, check_invariants=False).coalesce()
        parameter.grad = total.div_(divide).to(parameter.dtype)


def _count(grad: Tensor | None) -> int:
    if grad is None:
        return UNUSED
    return grad._nnz() if grad.is_sparse else DENSE


def _parts(grad: Tensor | None, like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(n) numbers of rows and (n, ...) rows of a sparse gradient; none of none."""
    if grad is None:
        ids = torch.empty(0, dtype=torch.int64, device=like.device)
        return ids, torch.empty((0, *like.shape[1:]), dtype=dtype, device=like.device)
    return grad.indices()[0].contiguous(), grad.values()

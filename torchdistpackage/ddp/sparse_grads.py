"""Reduction of sparse gradients, which travel as their nonzero rows with the rows' numbers.

These are the gradients of `nn.Embedding(sparse=True)`, which stay sparse and are in no bucket.
Ranks first exchange how many rows each has, and all take the same decisions from these counts. Each
rank sends a row once, and all add the rows in group order, so that all end with equal bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Work
from torchdistpackage.ddp.param_spec import ParamSpec

DENSE, UNUSED = -1, -2
"""Values in place of a count: the gradient on this rank is dense; this rank has no gradient."""


def mark_sparse(module: nn.Module, specs: Sequence[ParamSpec]) -> list[ParamSpec]:
    """Return the specs, with those of the module's sparse embeddings marked as sparse."""
    sparse = {id(m.weight) for m in module.modules() if _is_sparse(m)}
    return [replace(s, sparse_rows=True) if id(s.parameter) in sparse else s for s in specs]


class UnbucketedGrad:
    """A stand-in for a bucket's memory, for a gradient that stays where autograd put it."""

    def __init__(self, spec: ParamSpec):
        self.members, self.views = (spec,), (None,)

    def absorb(self, member: int, *, is_final: bool = False) -> None:
        """Leave the gradient where it is."""

    def is_divided(self, member: int) -> bool:
        """Return False: the gradient is divided only after the sum."""
        return False

    def detach_views(self) -> list[int]:
        """Return no members: no gradient lies in this memory."""
        return []


class SparseGrad:
    """The `BucketComm` of a sparse gradient, with a coalesced sum.

    If the gradient is dense on some rank, the sum is dense on all.
    """

    holders: Sequence[Tensor] = ()

    def __init__(self, spec: ParamSpec):
        self.gradients = UnbucketedGrad(spec)
        self._spec, self._group = spec, spec.group
        self._grad: Tensor | None = None
        self._counts: Work | None = None

    def launch(self) -> None:
        parameter, self._grad, count = self._spec.parameter, None, UNUSED
        if (grad := parameter.grad) is not None:
            # narrow gradients are added in a wider dtype, as in buckets
            self._grad, count = grad.detach().to(self._spec.sum_dtype), DENSE
            if grad.is_sparse:
                self._grad = self._grad.coalesce()
                count = self._grad._nnz()
        own_count = torch.tensor([count], device=parameter.device)
        self._counts = primitives.all_gather(own_count, self._group, async_op=True)

    def wait(self) -> None:
        assert self._counts is not None
        # the host waits here: it needs the counts to allocate what the other ranks send
        counts: list[int] = self._counts.wait().tolist()
        parameter, divide = self._spec.parameter, self._spec.divide
        grad, self._grad, self._counts = self._grad, None, None
        like = {"dtype": self._spec.sum_dtype, "device": parameter.device}
        if max(counts) == UNUSED:
            return
        if DENSE in counts:
            total = torch.zeros(parameter.shape, **like)
            if grad is not None:
                total += grad.to_dense() if grad.is_sparse else grad
            primitives.all_reduce(total, self._group)
        else:
            ids = torch.empty(0, dtype=torch.int64, device=parameter.device)
            rows = torch.empty((0, *parameter.shape[1:]), **like)
            if grad is not None:
                ids, rows = grad.indices()[0].contiguous(), grad.values()
            gathered = list(self._all_rows(ids, rows, counts))
            ids = torch.cat([ids for ids, _ in gathered])[None]
            rows = torch.cat([rows for _, rows in gathered])
            # the argument is explicit because torch warns without it, and 2.11 takes only this form
            with torch.sparse.check_sparse_tensor_invariants(enable=False):
                total = torch.sparse_coo_tensor(ids, rows, parameter.shape).coalesce()
        # rows may have been added in a wider dtype; autograd takes gradients of the parameter's own
        parameter.grad = total.div_(divide).to(parameter.dtype)

    def abandon(self) -> None:
        if self._counts is not None:
            # the exchange in flight still writes to its memory
            self._counts.wait()
            self._counts = None

    def _all_rows(
        self, ids: Tensor, rows: Tensor, counts: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return (ids, rows) of each rank."""
        sizes = [max(count, 0) for count in counts]
        both = [primitives.all_gather(x, self._group, sizes, True) for x in (ids, rows)]
        # both gathers are under way before the first is waited for
        return zip(*(work.wait().split(sizes) for work in both), strict=True)


def _is_sparse(module: nn.Module) -> bool:
    """Return whether a module is an embedding with sparse gradients."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse

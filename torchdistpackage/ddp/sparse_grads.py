"""Gradients of which few rows are not zero travel as those rows and their numbers.

Ranks first exchange how many rows each has, in the order of all reductions, and what follows from
these counts is the same on all. Each rank names a row once, and all add the rows up in group order,
so that all end with equal bits.

`SparseGrad` sums gradients of `nn.Embedding(sparse=True)`, which stay sparse. With the option
`embedding_rows` the backward of other lookups leaves (ids, rows) with an `EmbeddingGrad`, where
autograd's own gradient would be as large as the table, if there are few and the backward is one
that reduces; otherwise they are added to the dense gradient at once. A weight that only embeddings
hold is then in no bucket; one that a head holds too is in its bucket with the head's part, which
leaves long before, and gets the rows on top.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group, Work
from torchdistpackage.ddp.bucket_comm import AllReduceBucket, BucketComm, read_used_flags
from torchdistpackage.ddp.bucket_plan import plan_buckets
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.weak_hook import WeakHook

DENSE, UNUSED = -1, -2
"""Instead of a count: the gradient here is dense; there is none."""


class SparseRows:
    """The parameters of `module` that travel as rows, among those that are reduced.

    lookups: whether dense gradients may too (the option `embedding_rows`). counts: whether the
    backward that runs is one that reduces. shared: all parameters, those that are in no bucket
    marked. after: carriers of rows that are added to what a bucket has brought. handles: to remove,
    so that lookups are plain again.

    Raises:
        ValueError: `lookups` of a table on a device.
    """

    def __init__(
        self,
        module: nn.Module,
        shared: Sequence[ParamSpec],
        *,
        lookups: bool,
        counts: Callable[[], bool],
    ):
        modules = list(module.modules())
        names = {id(s.parameter): s.name for s in shared}
        sparse = {names.get(id(m.weight)) for m in modules if _is_sparse(m)}
        looking = _looked_up(modules, shared) if lookups else []
        embeddings = {m for m, _ in looking}
        others = (m._parameters.values() for m in modules if m not in embeddings)
        held = {id(parameter) for parameters in others for parameter in parameters}
        tied = {s.name for _, s in looking if id(s.parameter) in held}
        self._tables = {s.name: EmbeddingGrad(s, counts) for _, s in looking}
        alone = sparse | ({*self._tables} - tied)
        self.shared = [replace(s, sparse_rows=True) if s.name in alone else s for s in shared]
        self.after: list[BucketComm] = [
            EmbeddingRows(table, None) for name, table in self._tables.items() if name in tied
        ]
        self.handles = [  # copies of the module are plain
            m.register_forward_hook(WeakHook(_Lookup(m, self._tables[s.name]))) for m, s in looking
        ]

    def make_bucket_comm(self, shared: ParamSpec) -> BucketComm:
        """The carrier of a parameter that is in no bucket."""
        table = self._tables.get(shared.name)
        if table is None:
            return SparseGrad(shared)
        dense = replace(shared, sparse_rows=False)
        return EmbeddingRows(table, AllReduceBucket(plan_buckets([dense.entry(0)], 0)[0], [dense]))


class UnbucketedGrad:
    """In place of a bucket's gradients, for one whose gradient stays where it is made."""

    def __init__(self, shared: ParamSpec, arrived: Callable[[], None] = lambda: None):
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

    def abandon(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def _start_counts(self, count: int, device: torch.device) -> None:
        word = torch.tensor([count], device=device)
        self._pending = primitives.all_gather(word, self._group, async_op=True)

    def _wait_counts(self) -> list[int]:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending.wait().tolist()

    def _all_rows(
        self, ids: Tensor, rows: Tensor, counts: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids, rows) of each rank."""
        sizes = [max(count, 0) for count in counts]
        both = [primitives.all_gather(x, self._group, sizes, True) for x in (ids, rows)]
        return zip(*(pending.wait().split(sizes) for pending in both), strict=True)


class SparseGrad(RowCounts):
    """Sum of a sparse gradient, coalesced. If it is dense on some rank it becomes so on all."""

    def __init__(self, shared: ParamSpec):
        super().__init__(shared.group)
        self.gradients = UnbucketedGrad(shared)
        self._shared = shared
        self._grad: Tensor | None = None

    def launch(self) -> None:
        parameter, self._grad, count = self._shared.parameter, None, UNUSED
        if (grad := parameter.grad) is not None:
            self._grad, count = grad.detach().to(self._shared.sum_dtype), DENSE
            if grad.is_sparse:
                self._grad = self._grad.coalesce()
                count = self._grad._nnz()
        self._start_counts(count, parameter.device)

    def wait(self) -> None:
        counts, parameter, divide = self._wait_counts(), self._shared.parameter, self._shared.divide
        grad, self._grad = self._grad, None
        like = {"dtype": self._shared.sum_dtype, "device": parameter.device}
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
            # enabled or not: without an answer torch warns, and 2.11 asks for it in this form
            with torch.sparse.check_sparse_tensor_invariants(enable=False):
                total = torch.sparse_coo_tensor(ids, rows, parameter.shape).coalesce()
        parameter.grad = total.div_(divide).to(parameter.dtype)


# -- lookups in dense embeddings -------------------------------------------------------------


class EmbeddingGrad:
    """The weight of one or several embeddings, and the rows that wait for their sum.

    counts: whether the backward that runs is one that reduces. is_dense: besides lookups something
    left a gradient here since the last reduction.
    """

    def __init__(self, shared: ParamSpec, counts: Callable[[], bool]):
        self.shared, self._counts = shared, counts
        self.is_dense = False
        self._taken: list[tuple[Tensor, Tensor]] = []

    def add_rows(self, ids: Tensor, rows: Tensor) -> None:
        """The gradient (n, ...) of lookups of `ids` (n)."""
        if self._counts():
            self._taken.append((ids, rows))
        else:
            self.mark_dense()
            self.add_dense(ids, rows)

    def add_dense(self, ids: Tensor, rows: Tensor) -> None:
        """Add rows to the dense gradient."""
        parameter = self.shared.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():
            parameter.grad.index_add_(0, ids, rows)

    def merged(self) -> tuple[Tensor, Tensor]:
        """What waits: ids (m), ascending, each once, and rows (m, ...)."""
        p = self.shared.parameter
        every = torch.cat([p.new_empty(0, dtype=torch.int64), *(ids for ids, _ in self._taken)])
        some = torch.cat([p.new_empty((0, *p.shape[1:])), *(rows for _, rows in self._taken)])
        found, places = torch.unique(every, return_inverse=True)
        rows = p.new_zeros((len(found), *p.shape[1:])).index_add_(0, places, some)
        return found, rows

    def mark_dense(self) -> None:
        """There is a dense gradient too."""
        self.is_dense = True

    def clear(self) -> None:
        """Begin anew, after a reduction."""
        self._taken.clear()
        self.is_dense = False


class EmbeddingRows(RowCounts):
    """Sum of the rows that lookups of one table left.

    dense: for a table that is only looked up, its dense gradient, which is reduced when that of
    some rank is dense after all; None: it travels in another bucket, before.
    """

    def __init__(self, table: EmbeddingGrad, dense: AllReduceBucket | None):
        super().__init__(table.shared.group)
        self._table, self._dense = table, dense
        self.gradients = UnbucketedGrad(table.shared, table.mark_dense)

    def launch(self) -> None:
        self._ids, self._rows = self._table.merged()
        is_dense = self._dense is not None and self._table.is_dense
        self._start_counts(DENSE if is_dense else len(self._ids), self._ids.device)

    def wait(self) -> None:
        counts, table, dense = self._wait_counts(), self._table, self._dense
        if DENSE in counts and dense is not None:
            table.add_dense(self._ids, self._rows)
            dense.launch()
            dense.wait()
            read_used_flags([dense])
        elif any(counts):
            if dense is not None and table.shared.parameter.grad is None:
                table.shared.parameter.grad = dense.gradients.views[0].zero_()
            for ids, rows in self._all_rows(self._ids, self._rows, counts):
                table.add_dense(ids, rows.div_(table.shared.divide))
        table.clear()

    def abandon(self) -> None:
        super().abandon()
        self._table.clear()
        if self._dense is not None:
            self._dense.abandon()


class _Lookup:
    """Forward hook of an embedding: the same rows, whose backward leaves them with `table`."""

    def __init__(self, embedding: nn.Embedding, table: EmbeddingGrad):
        self._table, self._padding = table, embedding.padding_idx
        # a leaf, so that autograd calls the backward though it gives nothing to anybody
        self._anchor = torch.empty(0, device=embedding.weight.device, requires_grad=True)
        self._most = embedding.num_embeddings // table.shared.group.size()

    def __call__(self, module: nn.Module, inputs: tuple, output: Tensor) -> Tensor | None:
        """None leaves the lookup as it is, which is less to send for many."""
        is_few = len(inputs) == 1 and 0 < inputs[0].numel() <= self._most
        if not is_few or not output.requires_grad or torch.compiler.is_compiling():
            return None
        ids = inputs[0].reshape(-1)
        return _LookedUp.apply(output.detach(), self._anchor, self._table, ids, self._padding)


class _LookedUp(torch.autograd.Function):
    """Identity on rows, whose backward keeps their gradient."""

    @staticmethod
    def forward(
        ctx, rows: Tensor, anchor: Tensor, table: EmbeddingGrad, ids: Tensor, padding: int | None
    ):
        ctx.mark_dirty(rows)  # so that it may be changed in place, as any output of a layer
        ctx.table, ctx.ids, ctx.padding = table, ids, padding
        return rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        ids, rows = ctx.ids, grad.detach().reshape(-1, grad.shape[-1])
        if ctx.padding is not None:
            kept = ids != ctx.padding
            ids, rows = ids[kept], rows[kept]
        ctx.table.add_rows(ids, rows)
        return None, None, None, None, None


def _looked_up(
    modules: Sequence[nn.Module], shared: Sequence[ParamSpec]
) -> list[tuple[nn.Embedding, ParamSpec]]:
    """Embeddings whose lookups do no more than read rows of one of `shared`, each with that."""
    by_parameter = {id(s.parameter): s for s in shared if s.group.size() > 1 and not s.deferred}
    looking: list[tuple[nn.Embedding, ParamSpec]] = []
    for m in modules:
        is_plain = isinstance(m, nn.Embedding) and type(m).forward is nn.Embedding.forward
        if not is_plain or m.sparse or m.scale_grad_by_freq or m.max_norm is not None:
            continue
        s = by_parameter.get(id(m.weight))
        if s is None or m.weight.dtype not in (torch.float32, torch.float64):
            continue
        if m.weight.device.type != "cpu":
            raise ValueError(
                f"embedding_rows: {s.name} is on {m.weight.device}, where the host would have to "
                f"wait for the device in the backward to learn how many rows there are; leave "
                f"embedding_rows out, the dense gradient is then summed under the backward"
            )
        looking.append((m, s))
    return looking


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse

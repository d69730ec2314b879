"""Embeddings whose gradients travel as rows: which do, what their lookups leave, how it is summed.

One rule: embeddings with sparse gradients always do; others where it was asked for, and then a
weight that only embeddings hold is in no bucket at all, while one that a head holds too is in its
bucket with the head's part, which leaves long before, and gets the rows on top.

Autograd's own gradient of a lookup is as large as the table. Here the backward of a lookup leaves
(numbers of rows, rows) with the table instead, if there are few of them and the backward is one
that reduces. Otherwise they are added to the dense gradient at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchdistpackage.ddp.bucket_comm import AllReduceBucket, BucketComm, wait_all
from torchdistpackage.ddp.bucket_plan import plan_buckets
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.sparse_grads import DENSE, RowCounts, SparseGrad, UnbucketedGrad
from torchdistpackage.ddp.weak_hook import WeakHook

Looking = Sequence[tuple[nn.Embedding, ParamSpec]]
"""Embeddings, each with its weight."""


class Embeddings:
    """Those of `module`, of whose parameters `shared` are reduced.

    lookups: whether dense gradients may travel as rows too. counts: whether the backward that runs
    is one that reduces.
    """

    def __init__(
        self,
        module: nn.Module,
        shared: Sequence[ParamSpec],
        *,
        lookups: bool,
        counts: Callable[[], bool],
    ):
        names = {id(s.parameter): s.name for s in shared}
        sparse = {names.get(id(m.weight)) for m in module.modules() if _is_sparse(m)}
        looking = looked_up(module, shared) if lookups else []
        self._tables = {s.name: EmbeddingGrad(s, counts) for _, s in looking}
        alone = {*self._tables} - held_elsewhere(module, looking)
        self.shared = [
            replace(s, sparse_rows=True) if s.name in sparse | alone else s for s in shared
        ]
        self.after: list[BucketComm] = [
            EmbeddingRows(table, None) for name, table in self._tables.items() if name not in alone
        ]
        self._handles = [hook_lookups(m, self._tables[s.name]) for m, s in looking]

    def make_bucket_comm(self, shared: ParamSpec) -> BucketComm:
        """The carrier of one of those that travel as rows."""
        table = self._tables.get(shared.name)
        if table is None:
            return SparseGrad(shared)
        whole = replace(shared, sparse_rows=False)
        return EmbeddingRows(table, AllReduceBucket(plan_buckets([whole.entry(0)], 0)[0], [whole]))

    def remove(self) -> None:
        """Let lookups be plain again."""
        for handle in self._handles:
            handle.remove()


def looked_up(module: nn.Module, shared: Sequence[ParamSpec]) -> Looking:
    """Those of `module` whose lookups can leave rows of one of `shared`.

    Raises:
        ValueError: the table is on a device, whose host would wait for it several times a step.
    """
    by_parameter = {id(s.parameter): s for s in shared if s.group.size() > 1 and not s.deferred}
    found = ((m, by_parameter.get(id(m.weight))) for m in module.modules() if can_leave_rows(m))
    looking = [(m, s) for m, s in found if s is not None]
    for _, s in looking:
        if s.parameter.device.type != "cpu":
            raise ValueError(
                f"embedding_rows: {s.name} is on {s.parameter.device}, where the host would have "
                f"to wait for the device in the backward to learn how many rows there are; leave "
                f"embedding_rows out, the dense gradient is then summed under the backward"
            )
    return looking


def held_elsewhere(module: nn.Module, looking: Looking) -> set[str]:
    """Names of weights that modules beside those which look them up hold too."""
    embeddings = {m for m, _ in looking}
    others = (m._parameters.values() for m in module.modules() if m not in embeddings)
    held = {id(parameter) for parameters in others for parameter in parameters}
    return {s.name for _, s in looking if id(s.parameter) in held}


class EmbeddingGrad:
    """The weight of one or several embeddings, and the rows that wait for their sum.

    counts: whether the backward that runs is one that reduces. is_dense: besides lookups something
    left a gradient here since the last reduction. added: called when lookups were added to `.grad`
    in another backward, of which no hook of the parameter tells.
    """

    added: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, shared: ParamSpec, counts: Callable[[], bool]):
        self.shared, self._counts = shared, counts
        self.is_dense = False
        self._taken: list[tuple[Tensor, Tensor]] = []

    def add_rows(self, ids: Tensor, rows: Tensor) -> None:
        """The gradient (n, ...) of lookups of `ids` (n)."""
        if self._counts():
            self._taken.append((ids, rows))
        else:
            self.is_dense = True
            self.add_dense(ids, rows)
            self.added()

    def add_dense(self, ids: Tensor, rows: Tensor) -> None:
        """Add rows to the dense gradient."""
        parameter = self.shared.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():
            parameter.grad.index_add_(0, ids, rows)

    def merged(self) -> tuple[Tensor, Tensor]:
        """What waits: ids (m), ascending, each once, and rows (m, ...)."""
        parameter = self.shared.parameter
        if not self._taken:
            return torch.empty(0, dtype=torch.int64, device=parameter.device), self._zeros(0)
        found, places = torch.unique(torch.cat([i for i, _ in self._taken]), return_inverse=True)
        rows = self._zeros(len(found))
        rows.index_add_(0, places, torch.cat([rows for _, rows in self._taken]))
        return found, rows

    def _zeros(self, num: int) -> Tensor:
        """As many rows; of the parameter, which may be absent (ZeRO), only facts are read."""
        p = self.shared.parameter
        return torch.zeros((num, *p.shape[1:]), dtype=p.dtype, device=p.device)

    def mark_dense(self) -> None:
        """Autograd made a dense gradient."""
        self.is_dense = True

    def clear(self) -> None:
        """Begin anew, after a reduction."""
        self._taken.clear()
        self.is_dense = False


class EmbeddingRows(RowCounts):
    """Sum of the rows that lookups of one table left.

    whole: for a table that is only looked up, its dense gradient, which is reduced when that of
    some rank is dense after all; None: it travels in another bucket, before.
    """

    def __init__(self, table: EmbeddingGrad, whole: AllReduceBucket | None):
        super().__init__(table.shared.group)
        self._table, self._whole = table, whole
        self.gradients = UnbucketedGrad(table.shared, table.mark_dense)

    def launch(self) -> None:
        self._ids, self._rows = self._table.merged()
        is_dense = self._whole is not None and self._table.is_dense
        self._start_counts(DENSE if is_dense else len(self._ids), self._ids.device)

    def wait(self) -> None:
        counts, table = self._wait_counts(), self._table
        if DENSE in counts and self._whole is not None:
            table.add_dense(self._ids, self._rows)
            self._whole.launch()
            wait_all([self._whole])
        elif any(counts):
            if self._whole is not None and table.shared.parameter.grad is None:
                table.shared.parameter.grad = self._whole.gradients.views[0].zero_()
            for ids, rows in self._all_rows(self._ids, self._rows, counts):
                table.add_dense(ids, rows.div_(table.shared.divide))
        table.clear()

    def abandon(self) -> None:
        super().abandon()
        self._table.clear()
        if self._whole is not None:
            self._whole.abandon()


class _Lookup:
    """Forward hook of an embedding."""

    def __init__(self, embedding: nn.Embedding, table: EmbeddingGrad):
        self._table, self._padding = table, embedding.padding_idx
        # a leaf, so that autograd calls the backward though it gives nothing to anybody
        self._anchor = torch.empty(0, device=embedding.weight.device, requires_grad=True)
        self._most = embedding.num_embeddings // table.shared.group.size()

    def __call__(self, module: nn.Module, inputs: tuple, output: Tensor) -> Tensor | None:
        """The same rows; None leaves the lookup as it is, which is less to send for many."""
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


def hook_lookups(embedding: nn.Embedding, table: EmbeddingGrad) -> RemovableHandle:
    """Let the lookups of this module leave rows with the table; copies of it are plain."""
    return embedding.register_forward_hook(WeakHook(_Lookup(embedding, table)))


def can_leave_rows(module: nn.Module) -> bool:
    """Whether it is an embedding whose lookups do no more than read rows of a plain weight."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and not (module.sparse or module.scale_grad_by_freq or module.max_norm is not None)
        and module.weight.dtype in (torch.float32, torch.float64)
    )


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse

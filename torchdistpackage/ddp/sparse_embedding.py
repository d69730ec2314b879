"""Lookups in an embedding whose gradient stays the few rows that were looked up.

One rule: autograd's own gradient of a lookup is as large as the table; here the backward of one
leaves (numbers of rows, rows) with the table instead, if there are few of them and the backward is
one that reduces. Otherwise they are added to the dense gradient at once, and nothing is special.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.weak_hook import WeakHook


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

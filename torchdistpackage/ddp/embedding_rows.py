"""Which embeddings of a module have gradients that travel as rows, and what carries these.

One rule: those with sparse gradients always do; others where it was asked for, and then a weight
that only embeddings hold is in no bucket at all, while one that a head holds too is in its bucket
with the head's part and gets the rows on top.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from torchdistpackage.ddp.bucket_comm import AllReduceBucket, BucketComm
from torchdistpackage.ddp.bucket_plan import plan_buckets
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.sparse_embedding import EmbeddingGrad, can_leave_rows, hook_lookups
from torchdistpackage.ddp.sparse_grads import EmbeddingRows, SparseGrad


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


Looking = Sequence[tuple[nn.Embedding, ParamSpec]]
"""Embeddings, each with its weight."""


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


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse

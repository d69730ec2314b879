"""Lookups in a table that a head shares: their gradients follow the head's to the owners, as rows.

One rule: the head's gradient is the first of a backward and the lookups' the last. As one sum both
would be the last to leave, the largest of all, with nothing left to compute meanwhile.
"""

from collections.abc import Callable, Iterable, Sequence
from weakref import ref

from torch import nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.ddp.embedding_rows import (
    EmbeddingGrad,
    held_elsewhere,
    hook_lookups,
    looked_up,
)
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.sparse_grads import RowCounts, UnbucketedGrad
from torchdistpackage.ddp.zero.grad_buffer import ReduceScatterBucket


class TiedEmbeddingRows(RowCounts):
    """Carrier of the rows that lookups of `table` left.

    They are added to the sum in `bucket`, of which the table is member `place`. settled: called
    when they are.
    """

    bucket: ReduceScatterBucket
    place: int
    settled: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, table: EmbeddingGrad):
        super().__init__(table.shared.group)
        self._table, self.gradients = table, UnbucketedGrad(table.shared, table.mark_dense)

    def lie_in(self, bucket: ReduceScatterBucket, place: int) -> None:
        """The table is member `place` of `bucket`."""
        self.bucket, self.place = bucket, place
        where = ref(bucket.gradients)  # hooks of the module know the table

        def adopt() -> None:
            if (gradients := where()) is not None:
                gradients.absorb(place)

        self._table.added = adopt

    def launch(self) -> None:
        self._ids, self._rows = self._table.merged()
        self._start_counts(len(self._ids), self._ids.device)

    def wait(self) -> None:
        counts = self._wait_counts()
        if any(counts):
            for ids, rows in self._all_rows(self._ids, self._rows, counts):
                self.bucket.add_rows(self.place, ids, rows.div_(self._table.shared.divide))
        self._table.clear()
        self.settled()

    def abandon(self) -> None:
        super().abandon()
        self._table.clear()


def searched(module: nn.Module | None, replicas: Group | None) -> nn.Module:
    """`module`, in which tables are looked for.

    Raises:
        ValueError: there is none, or rows would have to reach `replicas` as well.
    """
    if module is None:
        raise ValueError(
            "embedding_rows without a module: its embeddings are to be found there; give "
            "ZeroOptimizer(optimizer, module, ...), or leave embedding_rows out"
        )
    if replicas is not None:
        raise ValueError(
            "embedding_rows with replicas: rows are sent to the owners of one group only; "
            "leave one of the two out"
        )
    return module


class TiedEmbeddings:
    """The tables of `module`, of whose parameters `shared` are summed, that a head shares.

    reduces: whether the backward that runs is one that reduces; the module's hooks keep it.
    after: the carriers of their rows. buckets: numbers of those with such tables.
    """

    def __init__(
        self, module: nn.Module | None, shared: Sequence[ParamSpec], reduces: Callable[[], bool]
    ):
        looking = [] if module is None else looked_up(module, shared)
        tied = held_elsewhere(module, looking) if module is not None else set()
        looking = [(m, s) for m, s in looking if s.name in tied and m.weight.is_contiguous()]
        tables = {s.name: EmbeddingGrad(s, reduces) for _, s in looking}
        self._rows = {name: TiedEmbeddingRows(table) for name, table in tables.items()}
        self.after, self.buckets = [*self._rows.values()], list[int]()
        self.handles = [hook_lookups(m, tables[s.name]) for m, s in looking]

    def coming(self, shared: Sequence[ParamSpec]) -> list[ParamSpec]:
        """The same as if registered where gradients come last first: tables behind all others."""
        return sorted(shared, key=lambda s: s.name in self._rows)

    def first(self, buckets: Iterable[int]) -> list[int]:
        """The same, but for those that a forward needs before all others: it looks up first."""
        return sorted(buckets, key=lambda b: b not in self.buckets)

    def attach(self, number: int, carrier: ReduceScatterBucket) -> None:
        """Let bucket `number` wait for the rows of the tables in it, if there are any."""
        places = {shared.name: place for place, shared in enumerate(carrier.line.members)}
        here = [name for name in self._rows if name in places]
        for name in here:
            self._rows[name].lie_in(carrier, places[name])
        if here:
            self.buckets.append(number)
            carrier.awaits_rows, self._rows[here[-1]].settled = True, carrier.settled

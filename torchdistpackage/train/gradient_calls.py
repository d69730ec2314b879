"""The calls by which a step sums gradients and, under ZeRO, gathers parameters. No torch.

One rule, that of ddp: gradients of one group travel in buckets, in the order of a backward; those
of weights that several stages hold leave last. Under ZeRO a bucket is cut evenly: each rank gets
its part of the sum and, after the update, gives its part of the parameters to all.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from torchdistpackage.ddp.bucket_plan import Bucket, BucketEntry
from torchdistpackage.ddp.bucket_plan import plan_buckets as plan_buckets
from torchdistpackage.ddp.zero.cut import even_bounds
from torchdistpackage.harness.lint.matcher import OpSignature
from torchdistpackage.harness.lint.programs import Collective
from torchdistpackage.layout.derive import gradient_axes, gradient_ranks, num_elements
from torchdistpackage.layout.layout import Layout
from torchdistpackage.train.memory import gradient_format, weight_format
from torchdistpackage.train.plan import BUCKET_BYTES, Plan
from torchdistpackage.train.products import gather, reduction


@dataclass(frozen=True, slots=True)
class Sum:
    """A bucket that several ranks share: name of their group, one of its layouts.

    slice_elements: of it that each rank owns under ZeRO.
    """

    group: str
    layout: Layout
    bucket: Bucket
    slice_elements: int

    @property
    def is_late(self) -> bool:
        return len(self.layout.stages) > 1


class GradientCalls:
    """Of one plan; what ranks share is worked out once."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._wide = gradient_format(plan.config.precision)
        self._weight = weight_format(plan.config.precision)
        self._ranks: dict[Hashable, tuple[int, ...]] = {}

    def sums(self, place: int, rank: int) -> list[Sum]:
        """What the rank, at `place` along pipe, shares with others, in the order in which it
        leaves."""
        if self._plan.shape is None:
            return []
        held: dict[str, Layout] = {}
        for index in self._plan.pieces_on(place):
            for _, layout in parameters(self._plan, index):
                held.setdefault(layout.name, layout)
        layouts = list(held.values())
        view = self._plan.topology.view
        keys = [(gradient_ranks(x, view(x.view), rank), len(x.stages) > 1) for x in layouts]
        entries = [
            BucketEntry(i, num_elements(x, view(x.view), rank), self._wide.num_bytes, keys[i])
            for i, x in enumerate(layouts)
        ]
        found: list[Sum] = []
        for bucket in plan_buckets(entries, BUCKET_BYTES):
            ranks, _ = keys[bucket.members[0]]
            name = f"gradients {ranks}"
            if len(ranks) > 1:
                length = even_bounds(bucket.used_flags, len(ranks), self._weight.num_bytes)[1]
                found.append(Sum(name, layouts[bucket.members[0]], bucket, length))
        return found

    def reductions(self, sums: Sequence[Sum]) -> Iterator[Collective]:
        """Each sum as it leaves; under ZeRO the marks of all buckets of a group follow the last."""
        for at, each in enumerate(sums):
            if not self._plan.config.parallel.zero:
                shape = (each.bucket.num_elements,)
                yield self._call(each, reduction("all_reduce", shape, self._wide.dtype))
                continue
            shape = (each.slice_elements,)
            yield self._call(each, reduction("reduce_scatter", shape, self._wide.dtype))
            if not any(other.group == each.group for other in sums[at + 1 :]):
                number = sum(len(x.bucket.members) for x in sums if x.group == each.group)
                yield self._call(each, reduction("all_reduce", (number,), "int32"))

    def gathers(self, sums: Sequence[Sum]) -> Iterator[Collective]:
        """In stages 1 and 2, from the bucket that the forward reads first on."""
        if self._plan.config.parallel.zero in (1, 2):
            early = [x for x in sums if not x.is_late]
            late = [x for x in sums if x.is_late]
            for each in reversed([*early, *late]):
                yield self._call(each, gather((each.slice_elements,), self._weight.dtype))

    def ranks(self, layout: Layout, rank: int) -> tuple[int, ...]:
        """Over which a gradient is summed, one tuple for all ranks in it."""
        mesh = self._plan.topology.view(layout.view)
        axes, stages = gradient_axes(layout, mesh), tuple(layout.stages)
        coord = mesh.coord(rank)
        inside = {*axes, "pipe"} if len(stages) > 1 else {*axes}
        key = (layout.view, axes, stages, *(i for a, i in coord.items() if a not in inside))
        if key not in self._ranks:
            self._ranks[key] = gradient_ranks(layout, mesh, rank)
        return self._ranks[key]

    @staticmethod
    def _call(each: Sum, call: OpSignature) -> Collective:
        return Collective(each.group, (call,), blocks=False, label="gradients")


def parameters(plan: Plan, piece: int) -> list[tuple[str, Layout]]:
    """Of one piece, by local name, in the order in which its module registers them."""
    assert plan.model is not None and plan.shape is not None
    name = plan.pieces[piece]
    prefix = plan.model.module_of(name)
    held = [f"{prefix}.{local}" for local in plan.model.piece_layouts(plan.shape, name)]
    is_tied_head = piece == len(plan.pieces) - 1 and plan.shape.tied
    tied = {f"{prefix}.weight": f"{plan.pieces[0]}.weight"} if is_tied_head else {}
    found = [(n, plan.layouts[tied.get(n, n)]) for n in held]
    # what a module holds itself comes before what its parts hold
    return sorted(found, key=lambda item: item[0].removeprefix(f"{prefix}.").count(".") > 0)

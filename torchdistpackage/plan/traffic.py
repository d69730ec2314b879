"""Bytes of a step by axis: every call that a rank makes in it, counted from the plan. No torch.

Tests compare the count with the record of real ranks, call by call. What a rank cannot know before
it runs is stated instead of guessed: for the number of tokens sent to its experts, an average rank
is counted.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from torchdistpackage.ddp.bucket_plan import Bucket, BucketEntry, plan_buckets
from torchdistpackage.ddp.zero.shard_bounds import (
    ModuleParam,
    even_length,
    group_by_module,
    owned_bounds,
)
from torchdistpackage.families.table import ContextWay
from torchdistpackage.layout.derive import gradient_ranks, local_shape, num_elements, sharding_ranks
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.partition import greedy_partition
from torchdistpackage.models.gpt_layout import ATTENTION, HALVES
from torchdistpackage.parallel.context.choice import exchange_calls
from torchdistpackage.parallel.expert.shape import STATES
from torchdistpackage.plan.context_plan import attention_of_rank
from torchdistpackage.plan.run_plan import TASK_ROOM, VOTE_ROOM, Plan
from torchdistpackage.predict.calls import CallCount, Microbatch, merged
from torchdistpackage.predict.newton_schulz import (
    NUM_ITERATIONS,
    Parameter,
    iterated_together,
    matrices_of,
    of_matrix,
    split_dim,
)
from torchdistpackage.schedule.actions import flatten
from torchdistpackage.schedule.generators import evaluation
from torchdistpackage.topology.mesh import Mesh

STEP_NUMBERS = 4 + TASK_ROOM + VOTE_ROOM
"""Numbers that all ranks add up in a step, beside the counts of experts: `StepStats` with room for
votes and a task (train/step_stats.py, train/experts.py)."""
UNLIMITED_BYTES = 2**62


def uncounted(plan: Plan) -> str | None:
    """Return why the calls of a step are unknown before it runs, or None."""
    if plan.model is None:
        return "a model of your own: its bytes are known once it is built"
    config, parallel = plan.config, plan.config.parallel
    in_layers = max(parallel.tensor, parallel.context, parallel.expert) > 1
    if config.train.recompute == "auto" and in_layers:
        return "known once the run has chosen what is computed again (train.recompute: auto)"
    if config.model.loss is not None:
        return f"known once {config.model.loss} runs"
    if config.data.is_unpaired:
        return "not counted for labelled answers, whose divergence is estimated besides"
    if plan.teacher is not None:
        return "not counted for a run with a teacher (train.distill)"
    if config.data.is_embedding:
        return "not counted for texts to compare, whose embeddings data ranks gather"
    if not _all_stages_send_back(plan):
        return "not counted for stages in front of the first adapter, which get no gradients"
    if config.has_reference and plan.zero == 3 and not config.has_reference_copy:
        return "not counted for pairs of answers whose reference reads what parallel.zero=3 frees"
    settings = getattr(plan.shape, "given", {})
    if parallel.context > 1 and settings.get("sliding_window"):
        return "not counted for a sliding window over parts of a sequence"
    context_way: ContextWay | None = getattr(plan.shape, "context_way", None)
    if (
        parallel.context > 1
        and context_way is not None
        and context_way != ContextWay(positions=context_way.positions)
    ):
        mixing = ", ".join((*context_way.scanned, *context_way.gathered)) or (
            "attention over all keys"
        )
        return f"not counted for {mixing} over parts of a sequence"
    return plan.model.uncounted(microbatch(plan, 0))


def _all_stages_send_back(plan: Plan) -> bool:
    """Return whether a parameter of the first stage is trained, so that every later stage sends
    gradients back.
    """
    if plan.schedule.num_stages == 1 or not plan.config.model.lora.target:
        return True
    assert plan.model is not None, "adapters are for a model of model.hf"
    first = tuple(f"{plan.pieces[i]}." for i in plan.stages[0])
    index, output = plan.schedule.placement[0], f"{plan.model.output_layer}."
    return any(
        name.startswith(first)
        or (layout.is_table and index in layout.stages and not name.startswith(output))
        for name, layout in plan.layouts.items()
        if plan.is_trained(name)
    )


def traffic(plan: Plan, rank: int) -> tuple[CallCount, ...]:
    """Return the calls of `rank` in one step, in no order; `uncounted` says whether they are
    known.
    """
    assert plan.model is not None
    calls = [*_gradients(plan, rank), *_messages(plan, rank), *_statistics(plan)]
    calls += _matrices(plan, rank)
    times = plan.rounds * plan.schedule.num_microbatches
    pipe_index, batch = plan.topology.dense.coord(rank)["pipe"], microbatch(plan, rank)
    layers = list(_attentions(plan, rank, batch))
    # the reference of pairs goes forward before each pass
    passes = (batch, batch.forward_alone) if plan.config.has_reference else (batch,)
    for stage in plan.schedule.stages_of(pipe_index):
        for each in passes:
            for layer in plan.model.layer_numbers(plan.stages[stage], each):
                layers += layer.calls
        is_last = stage == plan.schedule.num_stages - 1
        data, context = plan.config.data, plan.config.parallel.context
        if (data.is_preference or data.is_pairs) and is_last and context > 1:
            text = "log-probabilities of answers and their tokens"
            number, count = 2 * batch.samples, len(passes)
            if data.head is not None:
                text, number = "rewards of answers, their margins and counts", 3 * batch.samples
            layers.append(CallCount("context", "all_reduce", number, batch.losses, text, count))
    calls += (call.times(times) for call in layers)
    return merged(x if x.ranks else _placed(plan, rank, x) for x in calls)


def busiest(plan: Plan) -> tuple[int, tuple[CallCount, ...]]:
    """Return the rank with the most bytes in its calls, among the first ranks of all pipe indices,
    and these calls.
    """
    mesh = plan.topology.dense
    ranks = [mesh.rank({"pipe": index}) for index in range(len(plan.schedule.programs))]
    every = [(rank, traffic(plan, rank)) for rank in ranks]
    return max(every, key=lambda each: sum(call.num_bytes for call in each[1]))


def between_nodes(calls: Iterable[CallCount], ranks_per_node: int) -> float:
    """Return the bytes of a rank's calls whose ranks are on several nodes."""
    return sum(
        call.num_bytes
        for call in calls
        if call.ranks[0] // ranks_per_node != call.ranks[-1] // ranks_per_node
    )


def _placed(plan: Plan, rank: int, call: CallCount) -> CallCount:
    return replace(call, ranks=tuple(plan.topology.group(rank, call.axis)))


def microbatch(plan: Plan, rank: int) -> Microbatch:
    """Return the sizes and types of the input that the layers of `rank` get at a time."""
    config, size = plan.config, plan.topology.dense.axis_size
    numbers = plan.numbers
    seq_len = config.data.seq_len if plan.shape is None else plan.shape.seq_len
    return Microbatch(
        samples=plan.samples_per_microbatch,
        tokens=seq_len // size("context"),
        tensor=size("tensor"),
        index=plan.topology.dense.coord(rank)["tensor"],
        expert=config.parallel.expert,
        stream=numbers.weights.dtype,
        products=numbers.activations.dtype,
        losses=numbers.gradients.dtype,
        recomputed=config.train.recompute == "blocks",
        drops=config.model.dropout > 0,
        has_positions=config.data.document_masks,
        by_row=config.data.is_preference,
        smooths=config.train.label_smoothing > 0,
    )


# -- data, and what else sums gradients ------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Group:
    """Ranks over which gradients are summed; equal groups are one object, so that thousands of
    ranks are hashed once.

    deferred: as in `ParamSpec`. replicas: ranks with the same shard, this one included.
    """

    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    deferred: bool
    mesh: Mesh

    @cached_property
    def along(self) -> str:
        """The axes of the ranks."""
        return _axes_of(self.mesh, self.ranks)

    @cached_property
    def along_replicas(self) -> str:
        """The axes of the replicas."""
        return _axes_of(self.mesh, self.replicas)


@dataclass(frozen=True, slots=True)
class _Summed:
    """A parameter whose gradient is summed over a group, in registration order."""

    name: str
    num_elements: int
    group: _Group


def _gradients(plan: Plan, rank: int) -> Iterator[CallCount]:
    """Yield the calls that sum gradients, in NaiveDDP's buckets (ddp/bucket_plan.py) or in ZeRO's
    buckets of modules.
    """
    summed, wide = _summed(plan, rank), plan.numbers.gradients
    sent = plan.numbers.reduced
    if not plan.zero:
        for group, bucket in _buckets(summed, wide.num_bytes, plan.bucket_bytes):
            yield _over(group, "all_reduce", bucket.num_elements, sent.dtype, "gradients")
        return
    sums = plan.rounds if plan.zero >= 2 else 1
    for each in _sharded(plan, rank, summed):
        group, ranks, replicas = each.group, each.group.ranks, each.group.replicas
        part, end = each.part, each.end
        if len(ranks) > 1:
            yield _over(group, "reduce_scatter", end, sent.dtype, "gradients").times(sums)
        if len(replicas) > 1:
            shard = _over_replicas(group, part, sent.dtype, "sums of shards")
            yield shard.times(sums)
        if len(ranks) > 1:
            gathered = _over(group, "all_gather", part, plan.numbers.weights.dtype, "parameters")
            yield gathered.times(plan.rounds if each.is_freed else 1)
    note = "which parameters were used"
    for group, number in Counter(x.group for x in summed).items():
        if len(group.ranks) > 1:
            yield _over(group, "all_reduce", number, "int32", note).times(sums)
        if len(group.replicas) > 1:
            yield _over_replicas(group, number, "int32", note).times(sums)


def _matrices(plan: Plan, rank: int) -> Iterator[CallCount]:
    """Yield the calls for matrices that tensor ranks split (optim/muon.py): two bring those of one
    group of the optimizer to owners and back, and where ranks iterate together they sum squares.
    """
    optim, tensor = plan.config.optim, plan.config.parallel.tensor
    if not optim.spec.takes_split or tensor == 1:
        return
    view = plan.topology.view
    counts = {x.name: num_elements(x, view(x.view), rank) for x in _trained(plan, rank)}
    if plan.zero:
        for bucket in _sharded(plan, rank, _summed(plan, rank)):
            counts |= bucket.parts()
    by_settings: dict[int | None, list[str]] = {}
    for name, count in counts.items():
        layout = plan.layouts[name]
        if count and layout.is_matrix and any("tensor" in axes for axes in layout.split[-2:]):
            by_settings.setdefault(optim.group_of(name), []).append(name)
    dtype = "float64" if plan.numbers.gradients.dtype == "float64" else "bfloat16"
    for names in by_settings.values():
        works: list[tuple[Parameter, bool]] = []
        for name in names:
            layout = plan.layouts[name]
            matrix = of_matrix(layout)
            stack = math.prod(local_shape(layout, view(layout.view), rank)[:-2])
            works.append((matrices_of(matrix, stack), split_dim(matrix) is not None))
        item_bytes = 8 if dtype == "float64" else 2
        chosen = iterated_together(tuple(works), tensor, item_bytes, optim.muon_exchange)
        if chosen:
            parts = [x for i in chosen for x in works[i][0]]
            norms = "float64" if dtype == "float64" else "float32"
            num = sum(x.number for x in parts)
            yield CallCount("tensor", "all_reduce", num, norms, "norms of matrices")
            text, size = "products of the parts of matrices", sum(x.summed for x in parts)
            yield CallCount("tensor", "all_reduce", size, dtype, text, NUM_ITERATIONS)
        if moved := sum(counts[name] for i, name in enumerate(names) if i not in chosen):
            text = "matrices to the ranks that own them, and updates"
            yield CallCount("tensor", "all_to_all", moved, dtype, text, 2)


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """A bucket of gradients of one rank, as ddp/ packs it.

    members: name and number of elements of each parameter, side by side at `offsets`, in `end`
    elements with padding and flags. first, part: the slice of this rank, where it starts and its
    length; all of it without ZeRO. is_freed: stage 3 frees its parameters between steps.
    """

    group: _Group
    members: tuple[tuple[str, int], ...]
    offsets: tuple[int, ...]
    end: int
    first: int
    part: int
    is_freed: bool

    def parts(self) -> dict[str, int]:
        """Return how many elements of each member are in this rank's slice, by name."""
        last, parts = self.first + self.part, dict[str, int]()
        for (name, size), offset in zip(self.members, self.offsets, strict=True):
            parts[name] = max(min(last, offset + size) - max(self.first, offset), 0)
        return parts


def planned_buckets(plan: Plan, rank: int) -> Iterator[PlannedBucket]:
    """Yield the buckets of gradients that `rank` sums."""
    summed, wide = _summed(plan, rank), plan.numbers.gradients
    if plan.zero:
        yield from _sharded(plan, rank, summed)
        return
    for group, bucket in _buckets(summed, wide.num_bytes, plan.bucket_bytes):
        members = tuple((summed[i].name, summed[i].num_elements) for i in bucket.members)
        end = bucket.num_elements
        yield PlannedBucket(group, members, bucket.offsets, end, 0, end, False)


def _sharded(plan: Plan, rank: int, summed: list[_Summed]) -> Iterator[PlannedBucket]:
    """Yield ZeRO's buckets of whole modules."""
    wide, weight = plan.numbers.gradients, plan.numbers.weights
    units = (x.name.rpartition(".")[0] or x.name for x in summed)
    modules = [
        ModuleParam(unit, x.num_elements * wide.num_bytes, x.group)
        for unit, x in zip(units, summed, strict=True)
    ]
    numbers = group_by_module(modules, plan.bucket_bytes)
    narrowest = min(weight.num_bytes, plan.numbers.reduced.num_bytes)
    owner_of = _owners(plan, summed) if plan.config.optim.spec.needs_whole else None
    for group, bucket in _buckets(summed, wide.num_bytes, UNLIMITED_BYTES, numbers):
        ranks, offsets = group.ranks, bucket.offsets
        members = tuple((summed[i].name, summed[i].num_elements) for i in bucket.members)
        if owner_of is None:
            part = even_length(bucket.used_flags, len(ranks), narrowest)
            first, end = ranks.index(rank) * part, part * len(ranks)
        else:
            sizes = [size for _, size in members]
            owners = [owner_of[i] for i in bucket.members]
            offsets, bounds = owned_bounds(sizes, owners, len(ranks), weight.num_bytes, narrowest)
            first, end = bounds[ranks.index(rank)], bounds[-1]
            part = bounds[ranks.index(rank) + 1] - first
        # a weight of several stages is never freed
        is_freed = plan.zero == 3 and not group.deferred
        yield PlannedBucket(group, members, offsets, end, first, part, is_freed)


def _owners(plan: Plan, summed: list[_Summed]) -> list[int]:
    """Return the index of the rank that owns each whole parameter (ddp/zero/bucket.py)."""
    owners = [0] * len(summed)
    for ranks in dict.fromkeys(x.group.ranks for x in summed):
        # as `whole_owners` deals them out: whatever their replicas
        members = [i for i, x in enumerate(summed) if x.group.ranks == ranks]
        sizes = [math.prod(plan.layouts[summed[i].name].shape) for i in members]
        shares = greedy_partition(sizes, len(ranks))
        for owner, some in enumerate(shares):
            for i in some:
                owners[members[i]] = owner
    return owners


def _trained(plan: Plan, rank: int) -> Iterator[Layout]:
    """Yield the layouts of the parameters with a gradient on a rank."""
    pipe_index = plan.topology.dense.coord(rank)["pipe"]
    for x in plan.layouts.values():
        if (not x.stages or pipe_index in x.stages) and _has_gradient(plan, x.name):
            yield x


def _summed(plan: Plan, rank: int) -> list[_Summed]:
    view = plan.topology.view
    groups: dict[Hashable, _Group] = {}
    group_of: dict[Hashable, _Group | None] = {}
    gradients: list[_Summed] = []
    for x in _trained(plan, rank):
        kind = x.view, x.split, x.unreduced, x.stages, x.heads  # what groups differ in
        if kind not in group_of:
            group_of[kind] = _group(plan, x, rank, groups)
        if (group := group_of[kind]) is not None:
            gradients.append(_Summed(x.name, num_elements(x, view(x.view), rank), group))
    return gradients


def _group(plan: Plan, layout: Layout, rank: int, groups: dict[Hashable, _Group]) -> _Group | None:
    """Return the group of a parameter, from `groups` if an equal one is there; None: its gradient
    is not summed."""
    mesh = plan.topology.dense
    summed = gradient_ranks(layout, plan.topology.view(layout.view), rank)
    if len(summed) == 1:
        return None
    ranks, replicas = sharding_ranks(summed, mesh, rank, plan.zero_group)
    deferred = len(layout.stages) > 1
    return groups.setdefault((ranks, replicas, deferred), _Group(ranks, replicas, deferred, mesh))


def _has_gradient(plan: Plan, name: str) -> bool:
    return plan.is_trained(name) and not name.endswith(STATES)


def _buckets(
    summed: list[_Summed], element_bytes: int, cap_bytes: int, numbers: list[int] | None = None
) -> Iterator[tuple[_Group, Bucket]]:
    """Yield each bucket with its group. numbers: only members with equal numbers share a bucket."""
    entries = [
        BucketEntry(
            i, x.num_elements, element_bytes, (x.group, 0 if numbers is None else numbers[i])
        )
        for i, x in enumerate(summed)
    ]
    for bucket in plan_buckets(entries, cap_bytes):
        yield summed[bucket.members[0]].group, bucket


def _over(group: _Group, operation: str, num: int, dtype: str, note: str) -> CallCount:
    return CallCount(group.along, operation, num, dtype, note, ranks=group.ranks)


def _over_replicas(group: _Group, num: int, dtype: str, note: str) -> CallCount:
    return CallCount(group.along_replicas, "all_reduce", num, dtype, note, ranks=group.replicas)


def _axes_of(mesh: Mesh, ranks: tuple[int, ...]) -> str:
    """Return the axes along which these ranks differ."""
    along: list[str] = []
    stride = 1
    for name, size in reversed(mesh.axes):
        if size > 1 and len({rank // stride % size for rank in ranks}) > 1:
            along.append(name)
        stride *= size
    return "+".join(reversed(along))


# -- the other axes ----------------------------------------------------------------------------


def _messages(plan: Plan, rank: int) -> Iterator[CallCount]:
    """Yield the messages between stages: activations forward, and their gradients back."""
    batch = microbatch(plan, rank)
    schedules = [plan.schedule]
    if plan.config.has_reference:  # which goes forward alone
        schedules.append(evaluation(plan.schedule, plan.config.pipeline.microbatches))
    pipe_index = plan.topology.dense.coord(rank)["pipe"]
    actions = (action for each in schedules for action in flatten(each.programs[pipe_index]))
    number = sum(action.kind.is_send for action in actions) * plan.rounds
    assert plan.shape is not None
    num = batch.rows * plan.shape.dim // (batch.tensor if plan.shape.sequence_parallel else 1)
    if number:
        yield CallCount(
            "pipe", "send", num, batch.stream, "activations and their gradients", number
        )


def _attentions(plan: Plan, rank: int, batch: Microbatch) -> Iterator[CallCount]:
    """Yield the calls of attention over slices of a sequence, for one micro-batch."""
    coord, size = plan.topology.dense.coord(rank), plan.topology.dense.axis_size("context")
    if size == 1:
        return
    number = sum(map(_attends, (plan.pieces[i] for i in plan.pieces_on(coord["pipe"]))))
    comm_type, attention, a2a_size = attention_of_rank(plan)
    group, own_index = plan.topology.group(rank, "context"), coord["context"]
    first = own_index - own_index % a2a_size
    block, ring = group[first : first + a2a_size], group[own_index % a2a_size :: a2a_size]
    for call in exchange_calls(attention, size, comm_type, own_index, a2a_size=a2a_size):
        # also in the recomputed forward, and in that of a reference
        forwards = 1 + batch.recomputed + plan.config.has_reference
        times = number * (forwards if call.is_forward else 1)
        dtype = batch.losses if call.is_wide else batch.products
        ranks = tuple(block if call.operation == "all_to_all" else ring)
        num = call.num_elements
        yield CallCount("context", call.operation, num, dtype, "attention", times, ranks)


def _attends(piece: str) -> bool:
    """Return whether a piece has an attention: half a block of our GPT, or a block of
    transformers.
    """
    return piece.endswith(f".{ATTENTION}") or ("." in piece and not piece.endswith(HALVES))


def _statistics(plan: Plan) -> Iterator[CallCount]:
    """Yield the all-reduce of the step's numbers."""
    if plan.world_size == 1:
        return
    experts = {
        name.partition(".experts.")[0]: x.shape[0] + 1
        for name, x in plan.layouts.items()
        if "expert" in x.split_axes and ".experts." in name
    }
    num, ranks = STEP_NUMBERS + sum(experts.values()), tuple(range(plan.world_size))
    yield CallCount("all", "all_reduce", num, "float64", "numbers of the step", ranks=ranks)

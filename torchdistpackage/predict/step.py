"""The seconds of one training step as a sum of named terms.

Computation and exposed communication of a microbatch come from layer.py; weights and gradients
travel on a stream of their own beside the blocks, which is followed block by block; the order of a
pipeline is timed by schedule/engine.py. A term is what would be saved if its cause took no time, in
the order of `TERMS`, and the terms add up to the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter

from torchdistpackage.predict.collectives import Fabric
from torchdistpackage.predict.devices import Accelerator
from torchdistpackage.predict.kernels import memory_seconds
from torchdistpackage.predict.layer import (
    BlockTime,
    LayerCosts,
    Operation,
    adapter_parameters,
    shares,
)
from torchdistpackage.predict.muon import iteration_seconds
from torchdistpackage.predict.workload import ShardGroups, StepLayout, TransformerSizes
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.costs import StageCosts
from torchdistpackage.schedule.engine import Order, TaskGraph
from torchdistpackage.schedule.generators import GENERATORS

TERMS = (
    "compute",
    "recompute",
    "exposed tensor",
    "exposed context",
    "exposed expert",
    "bubble",
    "exposed pipe",
    "exposed data",
    "optimizer",
    "host and framework",
)

ADAM_BYTES = 34
"""Bytes that AdamW reads and writes for a parameter: master weight, two means and gradient in
float32, the new values of the first three, a bfloat16 copy, and the gradient once more for its
norm."""
MUON_BYTES = 30
"""Bytes that Muon reads and writes besides its iterations: master weight and momentum in float32,
both there and back, the gradient twice, a bfloat16 copy, and the update in bfloat16 there and
back."""
FOREACH_BYTES = 92
"""The same in one kernel an operation (torch/optim/adamw.py, `_multi_tensor_adamw`): 8 to 16 bytes
in each of eight, and 12 for the gradient's norm and its scale. torchtitan, pull request 881,
measured that the fused one makes a step of 8B on 8 H100 1.6 to 2.2 % faster."""
HOST_CALL_S = 31e-6
"""Host time of an operation: Python, dispatch, autograd and the launch, as a mixture of experts
shows it that is too small for its device (row b200-30b1 of published.py)."""
HOST_DTENSOR_S = 0.2e-3
"""Host time of a step for a parameter that is a DTensor: about four operations of its norm and of
its optimizer, dispatched in Python at 50 us each (pytorch/pytorch#134191)."""
HOST_GRAPH_S = 1e-6
"""The same for a recorded graph."""
HOST_STEP_S = 10e-3
"""A step's own: its batch, its numbers that all ranks add up, the learning rate and the log."""
HOST_MICROBATCH_S = 0.5e-3
"""The loop around a microbatch, in which the device waits for the first kernel."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The seconds of a step by term, in the order of `TERMS`."""

    terms: Mapping[str, float]

    @property
    def total(self) -> float:
        """The seconds of the step."""
        return sum(self.terms.values())


def step_time(
    sizes: TransformerSizes,
    layout: StepLayout,
    device: Accelerator,
    schedule: Schedule | None = None,
    fabric: Fabric | None = None,
) -> StepTime:
    """Predict the step of a model in a layout on a device.

    schedule: of the pipe; None: the one that the layout names. fabric: measured links; None: those
    of the device.

    Raises:
        ConfigError: a bandwidth is zero.
    """
    return StepModel(sizes, device, fabric).time(layout, schedule)


_timed_by = attrgetter(
    *StepLayout.__dataclass_fields__.keys()
    - {"ranks", "num_microbatches", "pipe", "chunks", "zero", "shard", "rounds", "exchanges"}
    - {"blocks", "order", "recompute"}
)
"""The fields that the times of a layer are computed from where nothing is copied; `_timed` adds
`zero` and `num_microbatches`, of which most values give the same times."""


@dataclass(slots=True)
class _Parts:
    """Seconds of a step besides its microbatches: of exposed data, of the optimizer, and of the
    step's own work on the host."""

    data: float
    optimizer: float
    host: float


class StepModel:
    """Predicts steps of one model on one device. Blocks that layouts share are timed once.

    fabric: measured links; None: those of the device.
    """

    def __init__(
        self, sizes: TransformerSizes, device: Accelerator, fabric: Fabric | None = None
    ) -> None:
        self.sizes = sizes
        self.device = device
        self._fabric = fabric
        self._makespans: dict[object, float] = {}
        self._pieces: dict[object, tuple[BlockTime, BlockTime, BlockTime]] = {}
        self._computed: dict[object, tuple[list[Operation], BlockTime, BlockTime]] = {}

    def time(self, layout: StepLayout, schedule: "Schedule | Ordered | None" = None) -> StepTime:
        """Return the terms of a step; `schedule` is of the pipe, None: the one the layout names."""
        stages = layout.pipe * layout.chunks
        placement = _placement(layout, schedule) if stages > 1 else (0,)
        parts, stage_times = self._parts(layout, placement), self._stages(layout)
        if stages == 1:
            total = stage_times[0]
            bubble = pipe = 0.0
        else:
            total, bubble, pipe = self._pipeline(stage_times, layout, schedule)
        times = layout.rounds * layout.num_microbatches
        terms = {
            "compute": times * (total.forward + total.backward),
            "recompute": times * total.recompute,
            "exposed tensor": times * sum(total.tensor),
            "exposed context": times * sum(total.context),
            "exposed expert": times * sum(total.expert),
            "bubble": layout.rounds * bubble,
            "exposed pipe": layout.rounds * pipe,
            "exposed data": parts.data,
            "optimizer": parts.optimizer,
            "host and framework": times * sum(total.host) + parts.host,
        }
        return StepTime(terms)

    def least(self, layout: StepLayout, loads: Sequence["RankLoad"], *, splits: bool) -> float:
        """Return seconds of computation and messages that no order of the stages undercuts.

        loads: of the pipe ranks, by `rank_loads`. splits: orders may put off the gradients of
        weights, so no rank waits after its backwards.
        """
        timed = self._timed(layout)
        work, opening, closing = (sum(x.pass_s) for x in timed)
        block_s, first = (work, opening) if not splits else (x.pass_s[0] for x in timed[:2])
        message = _message_seconds(self.sizes, layout, self.links(layout)) * (1 if splits else 2)
        m = layout.num_microbatches
        return layout.rounds * max(
            x.blocks_before * block_s
            + x.moves * message
            + (0.0 if x.is_first else first)
            + m * (x.blocks * work + x.is_first * opening + x.is_last * closing)
            for x in loads
        )

    def rest(self, layout: StepLayout, placement: Sequence[int]) -> float:
        """Return the seconds of exposed data, of the optimizer and of the step's own work."""
        parts = self._parts(layout, placement)
        return parts.data + parts.optimizer + parts.host

    def work(self, layout: StepLayout) -> float:
        """Return the seconds of a microbatch on all stages together."""
        block, first, last = self._timed(layout)
        return sum(first.pass_s) + sum(last.pass_s) + self.sizes.layers * sum(block.pass_s)

    def least_of_order(self, layout: StepLayout, order: "Ordered") -> float:
        """Return seconds of the whole step that its terms add up to, or hardly less."""
        stages = self._stages(layout)
        busiest = _busiest(stages, order.placement)
        message = _message_seconds(self.sizes, layout, self.links(layout))
        busiest_s = layout.num_microbatches * sum(busiest.pass_s)
        seconds = max(self._makespan(stages, order, layout.num_microbatches, message), busiest_s)
        return layout.rounds * seconds + self.rest(layout, order.placement)

    def _pipeline(
        self, stages: list[BlockTime], layout: StepLayout, schedule: "Schedule | Ordered | None"
    ) -> tuple[BlockTime, float, float]:
        """Return what the busiest rank computes of a microbatch on all its stages, the bubble, and
        what messages add to the step."""
        name, m = layout.schedule, layout.num_microbatches
        message = _message_seconds(self.sizes, layout, self.links(layout))
        timed = min(m, _ROUNDS * layout.pipe) if schedule is None else m
        if schedule is None:
            order = _order(name, layout.pipe, timed, layout.chunks)
        elif isinstance(schedule, Schedule):
            work = TaskGraph(schedule.placement, m)
            order = Ordered(schedule.placement, work.order(schedule))
        else:
            order = schedule
        busiest = _busiest(stages, order.placement)
        free = self._makespan(stages, order, timed, 0.0)
        waits = self._makespan(stages, order, timed, message) - free
        if m > timed:  # what messages add to each further round, beside filling the pipe
            fewer = timed - layout.pipe
            few = _order(name, layout.pipe, fewer, layout.chunks)
            early = self._makespan(stages, few, fewer, message)
            early -= self._makespan(stages, few, fewer, 0.0)
            waits += max(waits - early, 0.0) * (m - timed) / (timed - fewer)
        return busiest, max(free - timed * sum(busiest.pass_s), 0.0), max(waits, 0.0)

    def _makespan(self, stages: list[BlockTime], order: "Ordered", m: int, message: float) -> float:
        """Return the seconds of an order, each computed once for all layouts that it is of."""
        passes = tuple(each.pass_s for each in stages)
        key = order, passes, m, message
        if key not in self._makespans:
            forward, backward = zip(*passes, strict=True)
            halves = tuple(each / 2 for each in backward)
            costs = StageCosts(forward, backward, halves, halves, (message,) * len(stages))
            work = TaskGraph(order.placement, m, costs)
            self._makespans[key] = work.makespan(order.order)
        return self._makespans[key]

    def _stages(self, layout: StepLayout) -> list[BlockTime]:
        block, first, last = self._timed(layout)
        stages = layout.pipe * layout.chunks
        blocks = layout.blocks or (self.sizes.layers / stages,) * stages
        ends = [(each, False, False) for each in blocks]
        ends[0] = (blocks[0], True, stages == 1)
        ends[-1] = (blocks[-1], stages == 1, True)
        call_s = self._call_s(layout)
        times: dict[tuple[float, bool, bool], BlockTime] = {}
        for number, is_first, is_last in set(ends):
            each = BlockTime().plus(block, number)
            each = each.plus(first) if is_first else each
            each = each.plus(last) if is_last else each
            times[number, is_first, is_last] = each.behind_host(call_s, self.device.is_host)
        return [times[each] for each in ends]

    def _parts(self, layout: StepLayout, placement: Sequence[int]) -> _Parts:
        sizes, device = self.sizes, self.device
        fabric, call_s = self.links(layout), self._call_s(layout)
        block, _, last = self._timed(layout)
        stages = layout.pipe * layout.chunks
        blocks = layout.blocks or (sizes.layers / stages,) * stages
        of_rank = [0.0] * layout.pipe
        for stage, rank in enumerate(placement):
            of_rank[rank] += blocks[stage]
        kinds = {(n, i == placement[0], i == placement[-1]) for i, n in enumerate(of_rank)}
        data = [_Data(sizes, layout, fabric, *each) for each in kinds]
        paced = [each.behind_host(call_s, device.is_host) for each in (block, last)]
        exposed_data = max(
            each.exposed(paced[0], paced[1] if stages == 1 else BlockTime()) for each in data
        )
        return _Parts(
            exposed_data,
            _optimizer_seconds(sizes, layout, device, fabric),
            _host_seconds(sizes, layout, device),
        )

    def _timed(self, layout: StepLayout) -> tuple[BlockTime, BlockTime, BlockTime]:
        """Return the times of a block and of the two ends, which LayerCosts computes from the ranks
        that share a layer and not from how stages, replicas and rounds are arranged."""
        computed: object = replace(layout, blocks=(), recompute="none")
        if layout.copies == "none":
            zero = max(layout.zero, 2)  # only stage 3 frees what its gradients add up in
            computed = (_timed_by(layout), zero, layout.num_microbatches if layout.float8 else 1)
        links = self.links(layout)
        # beyond a node all are as far as the next one
        distances = (
            min(layout.stride("context"), links.node_size) if layout.context > 1 else 0,
            min(layout.expert_stride, links.node_size) if layout.expert > 1 else 0,
        )
        key = computed, layout.recompute, distances
        if key not in self._pieces:
            costs = LayerCosts(self.sizes, layout, self.device, links)
            if computed not in self._computed:
                timed = costs.block_operations(), costs.embedding(), costs.head()
                self._computed[computed] = timed
            operations, embedding, head = self._computed[computed]
            self._pieces[key] = costs.block(operations), embedding, head
        return self._pieces[key]

    def links(self, layout: StepLayout) -> Fabric:
        """Return the links between the ranks."""
        if self._fabric is not None:
            return self._fabric
        return Fabric.of(self.device, layout.node_size, layout.network_bytes_per_s)

    def _call_s(self, layout: StepLayout) -> float:
        return HOST_GRAPH_S if layout.graphs else self.device.call_s or HOST_CALL_S


# -- data ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Data:
    """Weights and gradients of one rank on their way: those of its blocks, and of the embedding
    and the head where it has the first and the last stage."""

    sizes: TransformerSizes
    layout: StepLayout
    fabric: Fabric
    num_blocks: float
    is_first: bool
    is_last: bool

    def exposed(self, block: BlockTime, last: BlockTime) -> float:
        """Return the seconds that a step waits for."""
        x = self.layout
        if x.sharers == 1 and x.data == 1:
            return 0.0
        head, embedding = self._ends()
        if x.zero == 3 and not x.exchanges:
            freed = self._freed(block, last, self._gather(), self._reduce())
            # FSDP's root has both ends, and nothing runs beside it
            ends = self._gather_end(head + embedding) + self._scatter_end(head + embedding)
            return (freed + ends) * x.rounds * x.num_microbatches
        reduce, gather = self._reduce(), self._gather() if x.zero else 0.0
        times = max(x.exchanges, 1)
        sums = self._sum_end(head), self._sum_end(embedding)
        weights = (self._gather_end(head), self._gather_end(embedding)) if x.zero else (0.0, 0.0)
        if not x.overlaps_data:
            return times * (self.num_blocks * (reduce + gather) + sum(sums) + sum(weights))
        forward, backward = block.pass_s
        return times * (
            self._after(backward, reduce, *sums) + self._after(forward, gather, *weights)
        )

    def _ends(self) -> tuple[float, float]:
        """Parameters of the head and of the embedding on this rank. A weight of both is sent with
        the embedding, after which its gradient is final."""
        z = self.sizes
        count = z.vocab_parameters / self.layout.tensor
        has_head = self.is_last and not (z.tied and self.is_first)
        return count * has_head, count * self.is_first

    def _gathers_frozen(self) -> bool:
        """Return whether ranks gather frozen weights, which ZeRO shards."""
        return self.layout.zero == 3 and self.layout.shards_frozen

    def _gather_end(self, count: float) -> float:
        x = self.layout
        if x.lora and not self._gathers_frozen():
            return 0.0
        return self.fabric.gather_seconds(x.weight_bytes * count, *self._sharers(x.shards))

    def _scatter_end(self, count: float) -> float:
        x = self.layout
        if x.lora:
            return 0.0
        return self.fabric.scatter_seconds(x.reduce_bytes * count, *self._sharers(x.shards))

    def _sum_end(self, count: float) -> float:
        return 0.0 if self.layout.lora else self._sum(count, self.layout.shards)

    def _gather(self) -> float:
        """Seconds to gather the weights of a block."""
        all_shares = shares(self.sizes, self.layout)
        return sum(
            self.fabric.gather_seconds(self.layout.weight_bytes * count, *self._sharers(shared))
            for count, shared in (all_shares if self._gathers_frozen() else self._trained())
        )

    def _reduce(self) -> float:
        """Seconds to reduce the gradients of a block."""
        return sum(self._sum(*each) for each in self._trained())

    def _trained(self) -> list[tuple[float, ShardGroups]]:
        """Return the parameters of a block that train, as `shares` does."""
        x = self.layout
        if not x.lora:
            return shares(self.sizes, x)
        return [(adapter_parameters(self.sizes, x), x.shards)]

    def _sharers(self, shared: ShardGroups) -> tuple[int, int]:
        """Return the number of ranks that share parameters, and their distance."""
        return self.fabric.joined(shared.sharers)

    def _sum(self, count: float, shared: ShardGroups) -> float:
        """Seconds to reduce the gradients of so many parameters, over copies of shards as well."""
        x = self.layout
        num_bytes = x.reduce_bytes * count
        if x.zero == 0:
            return self.fabric.sum_seconds(num_bytes, *self._sharers(shared))
        ranks, stride = self._sharers(shared)
        seconds = self.fabric.scatter_seconds(num_bytes, ranks, stride)
        copies = self.fabric.joined(shared.copies)
        return seconds + self.fabric.sum_seconds(num_bytes / ranks, *copies)

    def _after(self, compute_s: float, comm_s: float, head_s: float, embedding_s: float) -> float:
        """Exposed time where each block's communication may start when the block has ended. The
        head's goes first, the embedding's last; weights are gathered in the other order, which
        exposes as much."""
        compute, sent = 0.0, head_s
        blocks = max(round(self.num_blocks), 1)
        for _ in range(blocks):
            compute += compute_s
            sent = max(sent, compute) + comm_s
        exposed = sent + embedding_s - compute
        total = head_s + blocks * comm_s + embedding_s
        return exposed + max(total - exposed, 0.0) * self.fabric.slowdown

    def _freed(self, block: BlockTime, last: BlockTime, gather: float, reduce: float) -> float:
        """Exposed time of a microbatch where a block's weights are gathered ahead by one block,
        forward and again backward, and its gradients leave when it has ended."""
        forward, backward = block.pass_s
        blocks = max(round(self.num_blocks), 1)
        forward_s = _ahead([forward] * blocks, gather, 0.0)
        back = _ahead([sum(last.pass_s) + backward] + [backward] * (blocks - 1), gather, reduce)
        compute = blocks * (forward + backward) + sum(last.pass_s)
        exposed = forward_s + back - compute
        return exposed + max(blocks * (2 * gather + reduce) - exposed, 0.0) * self.fabric.slowdown


def _ahead(compute: list[float], gather: float, reduce: float) -> float:
    """The end of a pass whose blocks wait for their weights, gathered one block ahead, and whose
    gradients leave on the same stream."""
    stream = gather
    now, stream_s = 0.0, stream
    for seconds in compute:
        start = max(now, stream_s)
        stream = max(stream, start) + gather  # the next block's, asked for at this one's start
        stream_s = stream
        now = start + seconds
        if reduce:
            stream = max(stream, now) + reduce
    # the last block asks for no further weights
    return max(now, stream - gather if reduce else now)


@dataclass(frozen=True, slots=True, eq=False)
class Ordered:
    """A schedule as numbers: for each stage its rank, and for each rank its computations. Each is
    equal to itself alone, as orders are long."""

    placement: tuple[int, ...]
    order: Order


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The work of a pipe rank as numbers of blocks. blocks_before, moves: blocks and messages
    between ranks that a micro-batch passes before this rank's first stage."""

    blocks_before: float
    moves: int
    blocks: float
    is_first: bool
    is_last: bool


def rank_loads(blocks: Sequence[float], placement: Sequence[int]) -> tuple[RankLoad, ...]:
    """Return the loads of ranks, but for those that another's exceeds in every number."""
    of_rank: dict[int, float] = dict.fromkeys(placement, 0.0)
    load_before: dict[int, tuple[float, int]] = {}
    passed, moves = 0.0, 0
    for stage, rank in enumerate(placement):
        load_before.setdefault(rank, (passed, moves))
        of_rank[rank] += blocks[stage]
        passed += blocks[stage]
        moves += stage + 1 < len(placement) and placement[stage + 1] != rank
    loads = {
        RankLoad(*load_before[rank], num_blocks, rank == placement[0], rank == placement[-1])
        for rank, num_blocks in of_rank.items()
    }

    def exceeds(one: RankLoad, other: RankLoad) -> bool:
        return one != other and (
            one.blocks_before >= other.blocks_before
            and one.moves >= other.moves
            and one.blocks >= other.blocks
            and one.is_first == other.is_first
            and one.is_last >= other.is_last
        )

    return tuple(x for x in loads if not any(exceeds(y, x) for y in loads))


# -- pipe ------------------------------------------------------------------------------------


def _message_seconds(sizes: TransformerSizes, layout: StepLayout, fabric: Fabric) -> float:
    """Return the seconds of a message between two stages."""
    rows = layout.tokens / (layout.tensor if layout.sequence_parallel else 1)
    num_bytes = rows * sizes.dim * layout.item_bytes
    return fabric.message_seconds(num_bytes, layout.stride("pipe"))


_ROUNDS = 3
"""Rounds of a pipe whose order is timed: later microbatches add what the busiest rank computes."""


def _placement(layout: StepLayout, schedule: "Schedule | Ordered | None") -> tuple[int, ...]:
    """Return the pipe rank of each stage."""
    if schedule is not None:
        return schedule.placement
    timed = min(layout.num_microbatches, _ROUNDS * layout.pipe)
    return _order(layout.schedule, layout.pipe, timed, layout.chunks).placement


def _busiest(stages: Sequence[BlockTime], placement: Sequence[int]) -> BlockTime:
    """Return what the busiest rank computes of a microbatch on all its stages."""
    of_rank = [BlockTime() for _ in range(max(placement) + 1)]
    for stage, rank in enumerate(placement):
        of_rank[rank] = of_rank[rank].plus(stages[stage])
    return max(of_rank, key=lambda each: sum(each.pass_s))


@lru_cache(maxsize=16)
def _order(name: str, ranks: int, m: int, chunks: int) -> Ordered:
    """Return a schedule as numbers."""
    schedule = GENERATORS[name](ranks, m, chunks)
    return Ordered(schedule.placement, TaskGraph(schedule.placement, m).order(schedule))


# -- the rest --------------------------------------------------------------------------------


def _optimizer_seconds(
    sizes: TransformerSizes, layout: StepLayout, device: Accelerator, fabric: Fabric
) -> float:
    """Return the seconds of AdamW, or of Muon with it, on what this rank updates."""
    x, z = layout, sizes
    stages = x.pipe
    experts = z.layers * z.num_experts * z.mlp_parameters
    dense = z.parameters - experts
    parameters = dense / (x.tensor * stages) + experts / (x.tensor * stages * x.expert)
    if x.lora:
        parameters = z.layers * adapter_parameters(z, x) / stages
    sharers = x.sharers if x.zero else 1
    if z.num_experts and x.zero and not x.lora:
        parameters = dense / (x.tensor * stages * sharers)
        parameters += experts / (x.tensor * stages * max(sharers, x.expert))
        sharers = 1
    num_bytes = FOREACH_BYTES if x.optimizer == "foreach" else ADAM_BYTES
    seconds = memory_seconds(device, num_bytes * parameters / sharers)
    if x.optimizer != "muon":
        return seconds
    tables = (1 if z.tied else 2) * z.vocab_parameters / (x.tensor * stages * max(x.sharers, 1))
    saved = (ADAM_BYTES - MUON_BYTES) * max(parameters / sharers - tables, 0.0)
    return seconds - memory_seconds(device, saved) + iteration_seconds(z, x, device, fabric)


def _host_seconds(sizes: TransformerSizes, layout: StepLayout, device: Accelerator) -> float:
    """Return the seconds of a step's own work on the host, in which the device waits; in proportion
    to a measured call."""
    share = (device.call_s or HOST_CALL_S) / HOST_CALL_S
    tensors = 0.0
    if layout.copies == "all" and not layout.lora:
        tensors = sizes.layers * (12 if sizes.num_experts else 9 + 2 * sizes.qk_norm)
    loop = layout.rounds * layout.num_microbatches * HOST_MICROBATCH_S
    return share * (HOST_STEP_S + loop + tensors * HOST_DTENSOR_S)

"""Lower bounds of a rank's bytes under a layout, without its plan. No torch.

A search leaves layouts out by these bounds, so none may exceed the predicted peak (`plan/peak.py`)
of any rank; tests compare them. They follow it closely: weights, gradients and optimizer state of
each pipe rank by ZeRO's rules, what its stages keep at the fullest moments of the schedule that are
known from its numbers, and the communicators of the axes.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add, mul
from typing import NamedTuple

from torchdistpackage.config.schema import RunConfig
from torchdistpackage.layout.derive import creations
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.gpt_layout import ATTENTION, HALVES, HEAD
from torchdistpackage.models.registry import spec_of
from torchdistpackage.plan.layout_space import LayoutChoice, zero_stages
from torchdistpackage.plan.memory import MemoryEstimate, communicators, memory
from torchdistpackage.plan.memory_fit import unpredicted_memory
from torchdistpackage.plan.order_peaks import Live, live_of, placement_of
from torchdistpackage.plan.peak import FRAGMENTED, LeastBytes, least_bytes
from torchdistpackage.plan.run_plan import Plan, make_plan
from torchdistpackage.plan.stage_partition import ModelUnits, cut_of
from torchdistpackage.plan.step_time import blocks_of, sizes_of
from torchdistpackage.predict.calls import ITEM_BYTES
from torchdistpackage.predict.step import RankLoad, rank_loads
from torchdistpackage.topology.mesh import topology

_NEARLY = 0.99
"""Factor against rounding of bytes that are computed from three sizes of a block."""


def base_plan(run: RunConfig, ranks_per_node: int | None) -> Plan:
    """Return the plan of data parallelism on one rank; numbers of other plans are derived from its
    own.

    Raises:
        ConfigError: the file is wrong on any layout.
    """
    run = LayoutChoice(zero=1).of(run, 1)
    return make_plan(run, 1, "the file with one rank", ranks_per_node=ranks_per_node)


class _StateBytes(NamedTuple):
    """Bytes of weights, gradients and optimizer state of a rank without ZeRO."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0

    @classmethod
    def of(cls, estimate: MemoryEstimate) -> "_StateBytes":
        return cls(estimate.weights_bytes, estimate.gradients_bytes, estimate.optimizer_bytes)

    def least(self, zero: int, several: bool, sharers: float, third_stage: "_ThirdStage") -> float:
        """Return the fewest bytes of a rank at a stage of ZeRO, including the buckets of gathered
        weights.

        The file's number formats may add copies. several: whether gradients of several
        micro-batches add up."""
        adds_up = zero < 2 or several
        return (
            self.weights
            * (
                1
                if zero < 3
                else third_stage.gathered * (sharers > 1) + third_stage.parts / sharers
            )
            + self.gradients * (adds_up + (zero >= 2) / sharers)
            + self.optimizer / (sharers if zero else 1)
        )


class _ThirdStage(NamedTuple):
    """The numbers of weights that the third stage of ZeRO counts.

    gathered: those in buckets; 0 if buckets are not counted. parts: those of a rank's shards; 0 if
    they are copies of wider ones.
    """

    gathered: int
    parts: int


class _StateParts(NamedTuple):
    """The state of dense parameters, of experts, and of a weight that is both embedding and head:
    different ranks share each."""

    dense: _StateBytes = _StateBytes()
    experts: _StateBytes = _StateBytes()
    tied: _StateBytes = _StateBytes()


class _Held(NamedTuple):
    """The pieces of a stage: full blocks, halves whose other half is on another stage, and the
    head.
    """

    blocks: int
    attentions: int
    mlps: int
    heads: int

    @classmethod
    def of(cls, names: list[str]) -> "_Held":
        halves: dict[str, list[str]] = {}
        for name in names:
            if name.endswith(HALVES):
                block, _, half = name.rpartition(".")
                halves.setdefault(block, []).append(half)
        alone = [block_halves[0] for block_halves in halves.values() if len(block_halves) == 1]
        attentions = alone.count(ATTENTION)
        number = len(halves) - len(alone)
        return cls(number, attentions, len(alone) - attentions, names.count(HEAD))


class _PieceBytes(NamedTuple):
    """The least bytes of a micro-batch in a block, in an attention or an MLP whose other half is on
    another stage, and in the head.
    """

    block: LeastBytes
    attention: LeastBytes
    mlp: LeastBytes
    head: LeastBytes

    def of(self, pieces: _Held) -> LeastBytes:
        """Return the bytes of a stage."""
        besides = self.block.besides if pieces.blocks else 0.0
        # what is behind a block has gone when its backward runs
        if pieces.attentions:
            besides = max(self.attention.besides, besides - self.attention.kept)
        if pieces.heads:
            besides = max(self.head.besides, besides - self.head.kept)
        return LeastBytes(
            sum(n * x.kept for n, x in zip(pieces, self, strict=True)),
            sum(n * x.deferred for n, x in zip(pieces, self, strict=True)),
            besides,
        )


class _RankPieces(NamedTuple):
    """The pieces of the stages of a rank. messages: neighbours of its stages. ends: how many of its
    stages are the first or the last."""

    held: tuple[_Held, ...]
    messages: int
    ends: int


@dataclass(frozen=True, slots=True)
class PlacedCut:
    """The pieces that a placement gives to stages and ranks.

    blocks, held: number of blocks, and the pieces, of each stage. kinds: number of pieces of each
    kind on each rank. ranks: the pieces of each rank.
    """

    blocks: tuple[float, ...]
    loads: tuple[RankLoad, ...]
    held: list[_Held]
    kinds: list[Counter[int]]
    ranks: list[_RankPieces]


class MemoryBounds:
    """Bounds of all layouts of one run. base: its `base_plan`. on_gpu: with NCCL's communicators
    and the allocator of a GPU."""

    def __init__(self, run: RunConfig, world_size: int, base: Plan, on_gpu: bool) -> None:
        assert base.model is not None
        self.run, self.world_size, self.base, self.on_gpu = run, world_size, base, on_gpu
        self.sizes = sizes_of(base)
        self.units = ModelUnits.of(base.model)
        # what a run chooses to compute again (auto) may keep less than its layers state
        is_auto = run.train.recompute == "auto"
        self.counts_activations = unpredicted_memory(base) is None and not is_auto
        has_copy = base.numbers.weights != base.numbers.gradients
        is_frozen = not all(base.is_trained(name) for name in base.layouts)
        self._third_stage = _ThirdStage(
            int(self.counts_activations), int(not has_copy and not is_frozen)
        )
        self._stream_bytes = ITEM_BYTES[base.numbers.weights.dtype]
        self._needs_whole = run.optim.spec.needs_whole
        self._kinds: list[int] = []
        self._layouts = self._by_piece()
        self._pieces = Counter(self._kinds)
        self._whole: dict[object, tuple[_StateParts, list[_StateParts]]] = {}
        self._bytes: dict[object, _PieceBytes] = {}
        self._affine: dict[object, list[tuple[float, float, float]]] = {}
        self._kept: dict[object, list[float]] = {}
        self._groups: dict[object, int] = {}
        self._of_rank: dict[object, list[float]] = {}
        self._least_state: dict[object, float] = {}
        self._cuts: dict[tuple[tuple[int, ...], bool], PlacedCut] = {}

    def micro_batch(self, choice: LayoutChoice) -> int:
        """Return the sequences of a micro-batch on a data rank."""
        data = self.world_size // (choice.tensor * choice.pipe * choice.context)
        samples = self.run.data.global_batch * self.run.data.rows_per_sample
        return samples // (data * choice.accumulate * choice.microbatches)

    def least_peak(self, choice: LayoutChoice, stages: tuple[int, ...] | None = None) -> float:
        """Return a lower bound for the fullest rank's bytes, with any of these stages of ZeRO if
        given."""
        states = self._least_states(choice, stages or (choice.zero,))
        return max(map(add, states, self._activations(choice))) + self._communicators(choice)

    def least_mean(self, choice: LayoutChoice) -> float:
        """Return a lower bound for the fullest rank's bytes under any schedule and stage of ZeRO.

        It is that of an average pipe rank with one micro-batch."""
        key = choice.tensor, choice.pipe, choice.expert, choice.microbatches > 1
        if key not in self._least_state:
            state_bytes, _ = self._whole_state(choice)
            stages = zero_stages(self.run, self.world_size, choice)
            self._least_state[key] = self._state(choice, stages, state_bytes)
        state = self._least_state[key]
        activation_bytes = self._least_kept_of_model(choice, self.micro_batch(choice))
        return (state + activation_bytes) / choice.pipe + self._communicators(choice)

    def _least_states(self, choice: LayoutChoice, stages: tuple[int, ...]) -> list[float]:
        """Return the fewest bytes of state of each pipe rank with any of these stages of ZeRO."""
        cut = self.cut(choice)
        key = id(cut), choice.tensor, choice.expert, choice.microbatches > 1, stages
        if key not in self._of_rank:
            _, of_kind = self._whole_state(choice)
            # most ranks have as many pieces of each kind as others
            pieces = [frozenset(kinds.items()) for kinds in cut.kinds]
            least = {
                each: self._state(choice, stages, self._sum(dict(each), of_kind))
                for each in set(pieces)
            }
            self._of_rank[key] = [least[each] for each in pieces]
        return self._of_rank[key]

    def _state(self, choice: LayoutChoice, stages: tuple[int, ...], states: _StateParts) -> float:
        """Return the fewest bytes of state of a rank with any of these stages of ZeRO."""
        if self._needs_whole:  # each parameter has an owner
            sharers = (math.inf,) * 3
        else:
            dense = self.world_size / (choice.tensor * choice.pipe)
            # those of both stages share a tied weight
            sharers = dense, max(dense / choice.expert, 1.0), 2 * dense
        third = self._third_stage
        # a weight of several stages is never freed
        rests = third, third, third._replace(parts=0)
        several = choice.microbatches > 1
        parts = [*zip(states, sharers, rests, strict=True)]
        return min(sum(x.least(zero, several, n, y) for x, n, y in parts) for zero in stages)

    def _activations(self, choice: LayoutChoice) -> list[float]:
        """Return the fewest bytes that each pipe rank needs besides its state."""
        cut, micro = self.cut(choice), self.micro_batch(choice)
        if not self.counts_activations:
            return [0.0] * choice.pipe
        m, chunks = choice.microbatches, choice.chunks
        pieces = self._least_bytes(choice, micro)
        key = id(pieces), id(cut), choice.schedule, m
        if key in self._kept:
            return self._kept[key]
        live: Sequence[Live] = (((1, 0),),)
        if choice.pipe > 1:
            live = live_of(choice.schedule, choice.pipe, m, chunks)
        of_stage = {each: pieces.of(each) for each in set(cut.held)}
        rows = micro * self.run.data.seq_len // choice.context
        along = choice.tensor if choice.sequence_parallel else 1
        stream = rows // along * self.sizes.dim * self._stream_bytes
        share = 1 + FRAGMENTED * (self.on_gpu)
        of_rank: dict[_RankPieces, tuple[list[float], float]] = {}
        for rank in set(cut.ranks):
            stages = [of_stage[each] for each in rank.held]
            besides = min(x.besides for x in stages)
            # messages of one micro-batch at least, and ids or targets of all
            besides += 2 * stream * rank.messages + 8 * m * rows * rank.ends
            of_rank[rank] = [x.kept for x in stages] + [x.deferred for x in stages], besides
        needed: list[float] = []
        for rank, moments in zip(cut.ranks, live, strict=True):
            weights, besides = of_rank[rank]
            worst = max([sum(map(mul, counts, weights)) for counts in moments])
            needed.append(share * (worst + besides))
        self._kept[key] = needed
        return needed

    def _communicators(self, choice: LayoutChoice) -> int:
        """Return the bytes of NCCL's communicators for the groups of the axes."""
        if (not self.on_gpu) or not self.counts_activations:
            return 0
        key = choice.tensor, choice.pipe, choice.context, choice.expert
        if key not in self._groups:
            axes = choice.of(self.run, self.world_size).parallel.axes()
            world = topology(axes, self.world_size, expert=choice.expert)
            created = communicators(creations(world, 0), 0, world, "auto")
            self._groups[key] = created.device_bytes
        return self._groups[key]

    def _least_kept_of_model(self, choice: LayoutChoice, micro: int) -> float:
        """Return the fewest bytes that a micro-batch keeps in all blocks and the head.

        They consist of a constant, a term per token and a term per position, which three sizes
        determine."""
        if not self.counts_activations or self.run.data.seq_len % 4:
            return 0.0
        key = choice.tensor, choice.sequence_parallel, choice.recompute
        if key not in self._affine:
            tried = [(1, 1), (1, 2), (2, 1)]
            one_layer, two, half = (
                self._least_bytes(replace(choice, context=context, expert=1), number)
                for context, number in tried
            )
            self._affine[key] = [
                (2 * c.kept - a.kept, b.kept - a.kept, 2 * a.kept - b.kept - 2 * c.kept + a.kept)
                for a, b, c in zip(one_layer, two, half, strict=True)
            ]
        block, *_, head = (
            max(constant + (of_token * micro + of_position) / choice.context, 0.0)
            for constant, of_token, of_position in self._affine[key]
        )
        return _NEARLY * (self.sizes.layers * block + head)

    def _least_bytes(self, choice: LayoutChoice, micro: int) -> "_PieceBytes":
        """Return the fewest bytes of a micro-batch in a block, its halves, and the head."""
        key = (
            choice.tensor,
            choice.context,
            choice.expert,
            micro,
            choice.sequence_parallel,
            choice.recompute,
        )
        if key in self._bytes:
            return self._bytes[key]
        ranks = choice.tensor * choice.context
        alone = LayoutChoice(
            choice.tensor,
            context=choice.context,
            sequence_parallel=choice.sequence_parallel,
            recompute=choice.recompute,
            zero=1,
        )
        config = alone.of(self.run, ranks).resolve(ranks)
        world = topology(config.parallel.axes(), ranks)
        samples = micro // config.data.rows_per_sample
        data = config.data.model_copy(update={"global_batch": samples})
        config = config.model_copy(update={"data": data})
        plan = replace(self.base, config=config, topology=world, model=spec_of(config))

        groups = [(1, 2), (1,), (2,), (len(plan.pieces) - 1,)]
        groups += [(1, 2, 3, 4)] if self.sizes.layers > 1 else []
        block, attention, mlp, head, *longer = least_bytes(
            plan, groups, expert=choice.expert, on_gpu=self.on_gpu
        )
        if longer:  # the first block has the tables of positions besides
            second = longer[0].kept - block.kept
            attention = replace(attention, kept=attention.kept - (block.kept - second))
            block = replace(block, kept=second)
        self._bytes[key] = _PieceBytes(block, attention, mlp, head)
        return self._bytes[key]

    def cut(self, choice: LayoutChoice) -> PlacedCut:
        placement = placement_of(choice.schedule, choice.pipe, choice.chunks)
        key = placement, choice.chunks > 1
        if key not in self._cuts:
            config = choice.of(self.run, self.world_size)
            cut = cut_of(config, self.units, placement)
            blocks = blocks_of(self.units.names, cut)
            kinds = [Counter[int]() for _ in range(choice.pipe)]
            stages: list[list[int]] = [[] for _ in range(choice.pipe)]
            for stage, (rank, pieces) in enumerate(zip(placement, cut, strict=True)):
                kinds[rank].update(self._kinds[i] for i in pieces)
                stages[rank].append(stage)
            names = self.units.names
            stage_pieces = [_Held.of([names[i] for i in pieces]) for pieces in cut]
            loads = rank_loads(blocks, placement)
            last = len(cut) - 1
            ranks = [
                _RankPieces(
                    tuple(stage_pieces[s] for s in stages_of_rank),
                    sum((s < last) + (s > 0) for s in stages_of_rank),
                    (0 in stages_of_rank) + (last in stages_of_rank),
                )
                for stages_of_rank in stages
            ]
            self._cuts[key] = PlacedCut(blocks, loads, stage_pieces, kinds, ranks)
        return self._cuts[key]

    def _whole_state(self, choice: LayoutChoice) -> tuple[_StateParts, list[_StateParts]]:
        """Return the training state of the model with these degrees of tensor and expert, and that
        of each kind of piece."""
        key = choice.tensor, choice.expert
        if key not in self._whole:
            ranks = choice.tensor * choice.expert
            config = LayoutChoice(choice.tensor, expert=choice.expert).of(self.run, ranks)
            world = topology(config.parallel.axes(), ranks, expert=choice.expert)
            of_kind = [
                _StateParts(
                    *(
                        _StateBytes.of(memory(config, world, some, 0, self.base.packed))
                        for some in layouts
                    )
                )
                for layouts in self._layouts
            ]
            self._whole[key] = self._sum(self._pieces, of_kind), of_kind
        return self._whole[key]

    def _sum(self, kinds: Mapping[int, int], of_kind: Sequence[_StateParts]) -> _StateParts:
        return _StateParts(
            *(
                _StateBytes(
                    *(sum(n * of_kind[k][i][j] for k, n in kinds.items()) for j in range(3))
                )
                for i in range(3)
            )
        )

    def _by_piece(self) -> list[tuple[list[Layout], ...]]:
        """Return the layouts of each kind of piece, dense ones, those of experts and a tied one,
        and set `kinds`, the kind of each piece."""
        base = self.base
        of_piece: dict[str, list[Layout]] = {name: [] for name in base.pieces}
        for name, layout in base.layouts.items():
            parts = name.split(".")
            paths = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
            piece = next((x for x in paths if x in of_piece), base.pieces[0])
            of_piece[piece].append(layout)
        kinds: dict[object, int] = {}
        layouts: list[tuple[list[Layout], ...]] = []
        is_tied = self.sizes.tied
        for piece_bytes in of_piece.values():
            key = tuple(
                (replace(x, name=""), base.is_trained(x.name), x.name in base.packed)
                for x in piece_bytes
            )
            if key not in kinds:
                kinds[key] = len(layouts)
                tied = [x for x in piece_bytes if is_tied and x.is_table]
                of_experts = [x for x in piece_bytes if "expert" in x.split_axes]
                dense = [x for x in piece_bytes if x not in tied and x not in of_experts]
                layouts.append((dense, of_experts, tied))
            self._kinds.append(kinds[key])
        return layouts

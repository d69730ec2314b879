"""Search the layouts of a run for those whose predicted step takes the least time. No torch.

The search is exact: it finds what a prediction of every layout would find. A layout is refined in
steps (degrees, schedule, stage of ZeRO, order of the pipe), each with a bound that no step of it
undercuts, and the one with the lowest bound is refined first. What comes out first has its whole
plan made by `make_plan`, so it passes all that a run of it has to pass, and its time is that of
`run_time`. Bounds of memory leave out layouts that cannot fit before their order is built.
"""

import heapq
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from operator import mul

from torchdistpackage.config.check import failed_rules
from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import ConfigError, ScheduleError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.registry import spec_of
from torchdistpackage.plan.memory import MemoryEstimate, memory
from torchdistpackage.plan.memory_fit import largest_peak, unpredicted_memory
from torchdistpackage.plan.peak import FRAGMENTED, least_kept
from torchdistpackage.plan.run_plan import Plan, make_plan, stage_loads
from torchdistpackage.plan.stage_partition import ModelUnits, cut_of
from torchdistpackage.plan.step_time import (
    RunTime,
    blocks_of,
    layout_of,
    run_time,
    sizes_of,
    unpredicted,
)
from torchdistpackage.predict.collectives import Fabric
from torchdistpackage.predict.devices import Accelerator
from torchdistpackage.predict.step import Ordered, RankLoad, StepModel, rank_loads
from torchdistpackage.predict.workload import StepLayout
from torchdistpackage.schedule.engine import TaskGraph
from torchdistpackage.schedule.generators import GENERATORS, TWO_CHUNKS
from torchdistpackage.topology.mesh import topology

CHUNKS = {"interleaved": (2, 3, 4, 6, 8)}
"""Numbers of stages on a rank that are tried; other schedules of several stages have two."""
SCHEDULES = tuple(name for name in GENERATORS if name != "forward")
THERE_AND_BACK = frozenset({"zb-v", "dualpipe-v"})
"""Schedules whose second stages go back over the ranks."""
ONE_BACKWARD = frozenset({"gpipe", "1f1b", "interleaved", "looped-bfs"})
"""Schedules whose backward is one; the others compute the gradients of weights apart."""
_ROUNDING = 1 - 1e-9


Live = tuple[tuple[int, ...], ...]
"""Micro-batches of each stage of a rank that it holds at its fullest moments."""


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The keys that a search sets; all others are those of the file. chunks: 1 where a rank has
    one stage."""

    tensor: int = 1
    pipe: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    accumulate: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    zero: int = 0

    def keys(self, world_size: int) -> dict[str, dict[str, object]]:
        """Return the values of the keys by section."""
        data = world_size // (self.tensor * self.pipe * self.context)
        pipeline: dict[str, object] = {
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "chunks": self.chunks if self.chunks > 1 else None,
            # an even cut into several stages a rank takes a second to find
            "partition": "uniform" if self.chunks > 1 else "cost",
            "costs": None,
            "file": None,
        }
        return {
            "parallel": {
                "data": data,
                "pipe": self.pipe,
                "context": self.context,
                "tensor": self.tensor,
                "expert": self.expert,
                "sequence_parallel": self.sequence_parallel,
                "zero": self.zero,
                "zero_group": None,
                "cp_comm_type": "auto",
                "tp_comm_overlap": False,
            },
            "pipeline": pipeline,
            "train": {"accumulate": self.accumulate, "recompute": self.recompute},
        }

    @classmethod
    def overrides(cls) -> list[str]:
        """Return overrides that take the keys of a search out of a file, which its values may not
        fit."""
        keys = cls(zero=1).keys(1)
        keys["parallel"]["data"] = "auto"
        keys["launch"] = {"elastic.nodes": None}
        return [
            f"{section}.{key}={json.dumps(value)}"
            for section, values in keys.items()
            for key, value in values.items()
        ]

    def of(self, run: RunConfig, world_size: int) -> RunConfig:
        """Return the run with these keys."""
        update: dict[str, object] = {}
        for section, values in self.keys(world_size).items():
            update[section] = getattr(run, section).model_copy(update=values)
        return run.model_copy(update=update)

    @property
    def complexity(self) -> int:
        """The number of keys that differ from those of data parallelism alone."""
        plain = LayoutChoice(accumulate=self.accumulate, microbatches=self.microbatches)
        return sum(getattr(self, x) != getattr(plain, x) for x in LayoutChoice.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class RankedLayout:
    """A layout that fits. peak_bytes: of the rank with the most memory."""

    choice: LayoutChoice
    plan: Plan
    time: RunTime
    peak_bytes: float

    @property
    def tokens_per_s(self) -> float:
        return self.time.step_tokens / self.time.step.total


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The layouts found, fastest first. limit_bytes: memory of a rank. least_bytes: the least that
    any valid layout needs of a rank, counted for those that were left out for their memory; None if
    none was. num_valid: combinations of degrees and micro-batches that the rules allow.
    """

    found: tuple[RankedLayout, ...]
    limit_bytes: float
    least_bytes: float | None
    num_valid: int
    refusal: str | None = None


def memory_limit(run: RunConfig, device: Accelerator) -> float:
    """Return the bytes that a rank may use: `train.memory_gb`, else all of its device; a host has
    no limit."""
    if run.train.memory_gb is not None:
        return run.train.memory_gb * 1e9
    return math.inf if device.is_host else device.memory_bytes


def peak_bytes(plan: Plan, device: Accelerator) -> float:
    """Return the most bytes that a rank is predicted to hold on a device; the training state alone
    where activations are not predicted."""
    if unpredicted_memory(plan) is None:
        return largest_peak(plan, on_gpu=not device.is_host).peak.total
    return max(load.memory.total_bytes for load in stage_loads(plan))


def search(
    run: RunConfig,
    world_size: int,
    device: Accelerator,
    *,
    ranks_per_node: int | None = None,
    fabric: Fabric | None = None,
    number: int = 10,
) -> SearchResult:
    """Return the `number` layouts of a run on `world_size` ranks that fit and are fastest.

    Raises:
        ConfigError: the step of this model is not predicted, or the file is wrong on any layout.
    """
    return _LayoutSearch(run, world_size, device, ranks_per_node, fabric, number).result()


# -- the space -----------------------------------------------------------------------------------

_TRIED = {
    "parallel.tensor",
    "parallel.pipe",
    "parallel.context",
    "parallel.data",
    "parallel.expert",
    "parallel.sequence_parallel",
    "parallel.zero",
    "pipeline.microbatches",
    "pipeline.schedule",
    "pipeline.chunks",
    "train.accumulate",
    "train.recompute",
}


def divisors(number: int, most: int) -> list[int]:
    """Return the divisors of a number up to `most`, ascending."""
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def degrees(run: RunConfig, world_size: int) -> Iterator[LayoutChoice]:
    """Yield the degrees that the rules allow, with one micro-batch."""
    for tensor in divisors(world_size, 1024):
        choice = LayoutChoice(tensor)
        if _breaks(choice.of(run, tensor), tensor, _TRIED - {"parallel.tensor"}):
            continue
        for pipe in divisors(world_size // tensor, 1024):
            for context in divisors(world_size // tensor // pipe, 1024):
                data = world_size // (tensor * pipe * context)
                if run.data.global_batch % data:
                    continue
                choice = LayoutChoice(tensor, pipe, context)
                # one micro-batch in an order of one stage a rank asks for the least
                left = {"parallel.expert", "parallel.sequence_parallel", "parallel.zero"}
                if _breaks(choice.of(run, world_size), world_size, left):
                    continue
                most = 1 if run.model.moe.num_experts is None else run.model.moe.num_experts
                for expert in divisors(data, most):
                    yield replace(choice, expert=expert)


def _breaks(config: RunConfig, world_size: int, undecided: set[str]) -> bool:
    """Return whether the run breaks a rule that reads none of the undecided keys."""
    return next(failed_rules(config, world_size, undecided), None) is not None


def divided(run: RunConfig, world_size: int, choice: LayoutChoice) -> Iterator[LayoutChoice]:
    """Yield the same degrees with each division of the samples into rounds and micro-batches."""
    data = world_size // (choice.tensor * choice.pipe * choice.context)
    samples = run.data.global_batch // data
    for number in divisors(samples, samples):
        yield replace(choice, microbatches=number)
        if choice.pipe == 1 and number > 1:
            yield replace(choice, accumulate=number)


def variants(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    """Yield the same with and without sequence parallelism and recomputation."""
    for along in (False, True) if choice.tensor > 1 else (False,):
        for recompute in ("none", "blocks"):
            yield replace(choice, sequence_parallel=along, recompute=recompute)


def scheduled(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    """Yield the same with each order of the pipe."""
    if choice.pipe == 1:
        yield choice
        return
    for name in SCHEDULES:
        chunks = CHUNKS.get(name, (2,)) if name in TWO_CHUNKS else (1,)
        for each in chunks:
            yield replace(choice, schedule=name, chunks=each)


def sharded(run: RunConfig, world_size: int, choice: LayoutChoice) -> Iterator[LayoutChoice]:
    """Yield the same with each stage of ZeRO; a single rank shards nothing."""
    alone = (1,) if run.precision.weights == "bf16" else (0,)
    for zero in (0, 1, 2, 3) if world_size > choice.tensor * choice.pipe else alone:
        yield replace(choice, zero=zero)


def all_layouts(run: RunConfig, world_size: int) -> Iterator[LayoutChoice]:
    """Yield every layout that a search considers, valid or not."""
    for degree in degrees(run, world_size):
        for each in divided(run, world_size, degree):
            for variant in variants(each):
                for order in scheduled(variant):
                    yield from sharded(run, world_size, order)


@dataclass(frozen=True, slots=True)
class _PlacedCut:
    """How a placement shares the pieces. blocks: of each stage. kinds: number of pieces of each
    kind on each rank."""

    blocks: tuple[float, ...]
    loads: tuple[RankLoad, ...]
    kinds: list[Counter[int]]


# -- the search ----------------------------------------------------------------------------------


@dataclass
class _LayoutSearch:
    run: RunConfig
    world_size: int
    device: Accelerator
    ranks_per_node: int | None
    fabric: Fabric | None
    number: int
    least: float | None = None
    refusal: str | None = None
    _whole: dict[tuple[int, int], tuple[tuple[MemoryEstimate, ...], ...]] = field(
        default_factory=dict[tuple[int, int], tuple[tuple[MemoryEstimate, ...], ...]]
    )
    _bytes: dict[LayoutChoice, tuple[float, float]] = field(
        default_factory=dict[LayoutChoice, tuple[float, float]]
    )
    _cuts: dict[tuple[tuple[int, ...], bool], "_PlacedCut"] = field(
        default_factory=dict[tuple[tuple[int, ...], bool], "_PlacedCut"]
    )

    def result(self) -> SearchResult:
        base = self._base()
        if (why := unpredicted(base)) is not None:
            raise ConfigError(f"--search needs predictions, and the time of a step is {why}")
        assert base.model is not None
        self.base = base
        self.layout = layout_of(base, self.ranks_per_node or 0)
        self.sizes = sizes_of(base)
        self.model = StepModel(self.sizes, self.device, self.fabric)
        self.units = ModelUnits.of(base.model)
        self.limit = memory_limit(self.run, self.device)
        self.layouts = self._by_piece(base)
        self.counts_activations = unpredicted_memory(base) is None
        self.pieces = Counter(self.kinds)
        found: list[RankedLayout] = []
        num_valid = 0
        ties = count()
        # (bound, tie, level, choice, what is known of it)
        queue: list[tuple[float, int, int, LayoutChoice, object]] = []

        def push(bound: float, level: int, choice: LayoutChoice, known: object = None) -> None:
            heapq.heappush(queue, (bound, next(ties), level, choice, known))

        for degree in degrees(self.run, self.world_size):
            for each in divided(self.run, self.world_size, degree):
                num_valid += 1
                for choice in variants(each):
                    best = replace(choice, zero=3)
                    state = self._states(best)
                    whole = sum(number * state[kind] for kind, number in self.pieces.items())
                    if self._within(whole / choice.pipe):
                        seconds = self.model.least_work(self._layout(best))
                        push(seconds * _ROUNDING, 0, choice)
        while queue and len(found) < self.number:
            bound, _, level, choice, known = heapq.heappop(queue)
            if level == 0:
                for each, seconds in self._with_schedules(choice):
                    push(max(bound, seconds * _ROUNDING), 1, each, seconds)
            elif level == 1:
                assert isinstance(known, float)
                for each, layout, seconds in self._with_shards(choice):
                    push(max(bound, (known + seconds) * _ROUNDING), 2, each, layout)
            elif level == 2:
                assert isinstance(known, StepLayout)
                seconds = self._ordered(choice, known)
                if seconds is not None:
                    push(max(bound, seconds * _ROUNDING), 3, choice)
            elif level == 3:
                ranked = self._planned(choice)
                if ranked is not None:
                    push(ranked.time.step.total, 4, choice, ranked)
            else:
                assert isinstance(known, RankedLayout)
                found.append(known)
        return SearchResult(tuple(found), self.limit, self.least, num_valid, self.refusal)

    def _base(self) -> Plan:
        """Return the plan of data parallelism on one rank, whose numbers others are changed from.

        Raises:
            ConfigError: the file is wrong on any layout.
        """
        run = LayoutChoice(zero=1).of(self.run, 1)
        return make_plan(run, 1, "the file with one rank", ranks_per_node=self.ranks_per_node)

    def _layout(self, choice: LayoutChoice) -> StepLayout:
        """Return what `layout_of` returns for a plan of this choice."""
        data = self.world_size // (choice.tensor * choice.pipe * choice.context)
        samples = self.run.data.global_batch * self.run.data.rows_per_sample
        rounds = choice.accumulate * choice.microbatches
        blocks: tuple[float, ...] = ()
        if choice.pipe > 1:
            blocks = self._cut(choice).blocks
        return replace(
            self.layout,
            ranks=self.world_size,
            micro_batch=samples // (data * rounds),
            num_microbatches=choice.microbatches,
            tensor=choice.tensor,
            pipe=choice.pipe,
            chunks=choice.chunks,
            context=choice.context,
            expert=choice.expert,
            zero=choice.zero,
            shard=0,
            sequence_parallel=choice.sequence_parallel,
            recompute="blocks" if choice.recompute == "blocks" else "none",
            rounds=choice.accumulate,
            exchanges=choice.accumulate if choice.zero >= 2 else 1,
            blocks=blocks,
        )

    # -- one refinement each ---------------------------------------------------------------------

    def _with_schedules(self, choice: LayoutChoice) -> Iterator[tuple[LayoutChoice, float]]:
        """Yield the choice with each schedule, and seconds that no stage of ZeRO undercuts."""
        seconds: dict[tuple[tuple[int, ...], bool, int], float] = {}
        for each in scheduled(choice):
            splits = each.schedule not in ONE_BACKWARD
            if splits and self.run.train.compile != "off":
                continue  # make_plan refuses it
            placement = placement_of(each.schedule, each.pipe, each.chunks)
            key = placement, splits, each.chunks
            if key not in seconds:
                layout = self._layout(replace(each, zero=3))
                loads = self._cut(each).loads
                seconds[key] = self.model.least(layout, loads, splits=splits)
            yield each, seconds[key]

    def _with_shards(
        self, choice: LayoutChoice
    ) -> Iterator[tuple[LayoutChoice, StepLayout, float]]:
        """Yield the choice with each stage of ZeRO that may fit, its layout, and the seconds of a
        step besides its micro-batches."""
        placement = placement_of(choice.schedule, choice.pipe, choice.chunks)
        live = live_of(choice.schedule, choice.pipe, choice.microbatches)
        for each in sharded(self.run, self.world_size, choice):
            layout = self._layout(each)
            if self._fits(each, layout, live):
                yield each, layout, self.model.rest(layout, placement)

    def _ordered(self, choice: LayoutChoice, layout: StepLayout) -> float | None:
        """Return the seconds of a step with its order; None if a rule or the memory forbids it."""
        if _breaks(choice.of(self.run, self.world_size), self.world_size, set()):
            return None
        if choice.pipe == 1:
            return self.model.time(layout).total
        order, live = ordered(choice.schedule, choice.pipe, choice.microbatches, choice.chunks)
        if not self._fits(choice, layout, live):
            return None
        return self.model.time(layout, order).total

    def _planned(self, choice: LayoutChoice) -> RankedLayout | None:
        """Return the whole plan if it may run and fits."""
        try:
            plan = make_plan(
                choice.of(self.run, self.world_size),
                self.world_size,
                ranks_per_node=self.ranks_per_node,
            )
        except (ConfigError, ScheduleError) as error:
            why = error.problems[0].text if isinstance(error, ConfigErrors) else str(error)
            self.refusal = self.refusal or why
            return None
        needed = peak_bytes(plan, self.device)
        if not self._within(needed):
            return None
        return RankedLayout(
            choice, plan, run_time(plan, self.device, self.ranks_per_node, self.fabric), needed
        )

    # -- memory ----------------------------------------------------------------------------------

    def _within(self, num_bytes: float) -> bool:
        if num_bytes > self.limit:
            self.least = min(self.least or math.inf, num_bytes)
        return num_bytes <= self.limit

    def _fits(
        self, choice: LayoutChoice, layout: StepLayout, live: Sequence[Live] | None = None
    ) -> bool:
        """Return whether the bytes that a rank needs at least are within its limit.

        live: of each rank; None: of any order, in which a stage holds one micro-batch at least.
        """
        state = self._states(choice)
        held = [
            sum(number * state[kind] for kind, number in kinds.items())
            for kinds in self._cut(choice).kinds
        ]
        block, head = self._kept(choice, layout)
        weights = [block * each for each in layout.blocks or (float(self.sizes.layers),)]
        weights[-1] += head
        stages: list[list[float]] = [[] for _ in range(choice.pipe)]
        for stage, rank in enumerate(placement_of(choice.schedule, choice.pipe, choice.chunks)):
            stages[rank].append(weights[stage])
        for rank, each in enumerate(stages):
            moments = ((1,) * len(each),) if live is None else live[rank]
            held[rank] += max(sum(map(mul, counts, each)) for counts in moments)
        return self._within(max(held))

    def _kept(self, choice: LayoutChoice, layout: StepLayout) -> tuple[float, float]:
        """Return the bytes that a micro-batch keeps at least of a block and of the head."""
        if not self.counts_activations:
            return 0.0, 0.0
        ranks = choice.tensor * choice.context * choice.expert
        key = replace(choice, pipe=1, schedule="1f1b", chunks=1, zero=1, accumulate=1)
        key = replace(key, microbatches=self.run.data.global_batch // layout.micro_batch)
        if key not in self._bytes:
            config = key.of(self.run, ranks).resolve(ranks)
            world = topology(config.parallel.axes(), ranks, expert=choice.expert)
            samples = config.data.model_copy(
                update={"global_batch": layout.micro_batch * choice.expert}
            )
            pipeline = config.pipeline.model_copy(update={"microbatches": 1})
            config = config.model_copy(update={"data": samples, "pipeline": pipeline})
            plan = replace(self.base, config=config, topology=world, model=spec_of(config))
            on_gpu = not self.device.is_host
            share = 1 + FRAGMENTED * on_gpu
            middle = self.base.pieces[1:3]
            assert middle[0].rpartition(".")[0] == middle[1].rpartition(".")[0]
            self._bytes[key] = (
                share * least_kept(plan, (1, 2), on_gpu=on_gpu),
                share * least_kept(plan, (len(plan.pieces) - 1,), on_gpu=on_gpu),
            )
        return self._bytes[key]

    def _cut(self, choice: LayoutChoice) -> "_PlacedCut":
        placement = placement_of(choice.schedule, choice.pipe, choice.chunks)
        key = placement, choice.chunks > 1
        if key not in self._cuts:
            config = choice.of(self.run, self.world_size)
            cut = cut_of(config, self.units, placement)
            blocks = blocks_of(self.units.names, cut)
            kinds = [Counter[int]() for _ in range(choice.pipe)]
            for rank, pieces in zip(placement, cut, strict=True):
                kinds[rank].update(self.kinds[i] for i in pieces)
            self._cuts[key] = _PlacedCut(blocks, rank_loads(blocks, placement), kinds)
        return self._cuts[key]

    def _states(self, choice: LayoutChoice) -> tuple[float, ...]:
        """Return bytes that the training state of each kind of piece takes at least."""
        experts = choice.expert
        key = choice.tensor, experts
        if key not in self._whole:
            config = LayoutChoice(choice.tensor, expert=experts).of(
                self.run, choice.tensor * experts
            )
            world = topology(config.parallel.axes(), choice.tensor * experts, expert=experts)
            self._whole[key] = tuple(
                tuple(memory(config, world, each, 0, self.base.packed) for each in both)
                for both in self.layouts
            )
        sharers = self.world_size / (choice.tensor * choice.pipe)
        shares = sharers, max(sharers / experts, 1.0)
        return tuple(
            sum(_least_state(x, choice, n) for x, n in zip(both, shares, strict=True))
            for both in self._whole[key]
        )

    def _by_piece(self, base: Plan) -> list[tuple[list[Layout], list[Layout]]]:
        """Return the layouts of each kind of piece, dense ones and those of experts, and set
        `kinds`, the kind of each piece."""
        of_piece: dict[str, list[Layout]] = {name: [] for name in base.pieces}
        for name, layout in base.layouts.items():
            parts = name.split(".")
            paths = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
            piece = next((x for x in paths if x in of_piece), base.pieces[0])
            of_piece[piece].append(layout)
        kinds: dict[object, int] = {}
        layouts: list[tuple[list[Layout], list[Layout]]] = []
        self.kinds: list[int] = []
        for held in of_piece.values():
            key = tuple(
                (replace(x, name=""), base.is_trained(x.name), x.name in base.packed) for x in held
            )
            if key not in kinds:
                kinds[key] = len(layouts)
                of_experts = [x for x in held if "expert" in x.split_axes]
                layouts.append(([x for x in held if x not in of_experts], of_experts))
            self.kinds.append(kinds[key])
        return layouts


def _least_state(whole: MemoryEstimate, choice: LayoutChoice, sharers: float) -> float:
    """Return bytes of training state that ZeRO leaves at least, of what a rank holds without it.
    The file's choice of number formats may add copies."""
    adds_up = choice.zero < 2 or choice.microbatches > 1
    return (
        whole.weights_bytes * (choice.zero < 3)
        + whole.gradients_bytes / (1 if adds_up else sharers)
        + whole.optimizer_bytes / (sharers if choice.zero else 1)
    )


def placement_of(schedule: str, pipe: int, chunks: int) -> tuple[int, ...]:
    """Return the pipe rank of each stage, without the order of a schedule."""
    if schedule in THERE_AND_BACK:
        return (*range(pipe), *reversed(range(pipe)))
    return tuple(range(pipe)) * chunks


def live_of(schedule: str, pipe: int, microbatches: int) -> tuple[Live, ...] | None:
    """Return for each rank what it holds at most, where that is known without the order."""
    if schedule == "1f1b":
        return tuple(((min(microbatches, pipe - rank),),) for rank in range(pipe))
    if schedule == "gpipe":
        return (((microbatches,),),) * pipe
    return None


@lru_cache(maxsize=256)
def ordered(schedule: str, pipe: int, microbatches: int, chunks: int) -> tuple[Ordered, list[Live]]:
    """Return a schedule as numbers, and what each rank holds at its fullest moments."""
    made = GENERATORS[schedule](pipe, microbatches, chunks)
    work = TaskGraph(made.placement, microbatches)
    order = work.order(made)
    return Ordered(made.placement, order), [
        _fullest(work, stages, program) for stages, program in zip(work.stages, order, strict=True)
    ]


def _fullest(work: TaskGraph, stages: list[int], program: list[int]) -> Live:
    """Return the numbers of live micro-batches that no other moment exceeds in every stage."""
    place = {stage: i for i, stage in enumerate(stages)}
    live = [0] * len(stages)
    peaks: set[tuple[int, ...]] = set()
    grew = False
    for number in program:
        stage = number % work.size // work.num_microbatches
        if number < work.size:
            live[place[stage]] += 1
            grew = True
        elif number >= 2 * work.size:
            if grew:
                peaks.add(tuple(live))
            live[place[stage]] -= 1
            grew = False
    return tuple(x for x in peaks if not any(x != y and all(map(int.__le__, x, y)) for y in peaks))

"""Search the layouts of a run for those with the shortest predicted step. No torch.

The search is exact: it finds what a prediction of every layout would find. A layout is refined in
steps (degrees, schedule, stage of ZeRO, order of the pipe), each with a bound that no step of it
undercuts, and the one with the lowest bound is refined first. What comes out first has its whole
plan made by `make_plan`, so it passes all that a run of it has to pass, and its time is that of
`run_time`. Bounds of memory leave out layouts that cannot fit before their order is built.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import ConfigError, ScheduleError
from torchdistpackage.plan.context_plan import context_exchange
from torchdistpackage.plan.layout_space import (
    LayoutChoice,
    breaks_rules,
    degrees,
    divided,
    orders,
    scheduled,
    sharded,
    variants,
    zero_stages,
)
from torchdistpackage.plan.memory_bounds import MemoryBounds, base_plan
from torchdistpackage.plan.memory_fit import largest_peak, unpredicted_memory
from torchdistpackage.plan.order_peaks import (
    ONE_BACKWARD,
    ordered,
    placement_of,
)
from torchdistpackage.plan.peak import peak_memory
from torchdistpackage.plan.run_plan import Plan, make_plan, stage_loads
from torchdistpackage.plan.step_time import (
    RunTime,
    layout_of,
    run_time,
    sizes_of,
    unpredicted,
)
from torchdistpackage.predict.collectives import Fabric
from torchdistpackage.predict.devices import Accelerator
from torchdistpackage.predict.step import StepModel
from torchdistpackage.predict.workload import ContextExchange, StepLayout

_ROUNDING = 1 - 1e-9


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
    simplest: RankedLayout | None = None


def memory_limit(run: RunConfig, device: Accelerator) -> float:
    """Return the bytes that a rank may use: `train.memory_gb`, else all of its device; unlimited on
    a host."""
    if run.train.memory_gb is not None:
        return run.train.memory_gb * 1e9
    return math.inf if device.is_host else device.memory_bytes


def peak_bytes(plan: Plan, device: Accelerator) -> float:
    """Return the largest predicted bytes of a rank on a device; only the training state if
    activations are not predicted."""
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
    error: float = 0.0,
) -> SearchResult:
    """Return the `number` layouts of a run on `world_size` ranks that fit and are fastest.

    Raises:
        ConfigError: the step of this model is not predicted, or the file is wrong on any layout.
    """
    return _LayoutSearch(run, world_size, device, ranks_per_node, fabric, number, error).result()


# -- the search -------------------------------------------------------------------------------


@dataclass
class _LayoutSearch:
    run: RunConfig
    world_size: int
    device: Accelerator
    ranks_per_node: int | None
    fabric: Fabric | None
    number: int
    error: float = 0.0
    least: float | None = None
    refusal: str | None = None
    _work: dict[object, float] = field(default_factory=dict[object, float])
    _exchanges: dict[object, ContextExchange] = field(default_factory=dict[object, ContextExchange])

    def result(self) -> SearchResult:
        self._prepare()
        layouts: list[RankedLayout] = []
        simplest: RankedLayout | None = None
        queue = _BoundQueue()
        num_valid = self._start(queue)
        placed: set[LayoutChoice] = set()
        while queue:
            bound, level, choice, payload = queue.pop()
            if level >= 2 and replace(choice, order=()) in placed:
                continue  # found already in a faster order of ranks
            if len(layouts) == self.number:
                # only a simpler layout is of interest, and only within the error
                simplest = simplest or self._simplest(layouts)
                if bound > layouts[0].time.step.total * (1 + self.error):
                    break
                if choice.complexity >= simplest.choice.complexity:
                    continue
            if level == 0:
                for each, seconds in self._with_schedules(choice):
                    queue.push(max(bound, seconds * _ROUNDING), 1, each)
            elif level == 1:
                for each, layout, seconds in self._with_shards(choice):
                    queue.push(max(bound, seconds * _ROUNDING), 2, each, layout)
            elif level == 2:
                assert isinstance(payload, StepLayout)
                seconds = self._ordered(choice, payload)
                if seconds is not None:
                    queue.push(max(bound, seconds * _ROUNDING), 3, choice)
            elif level == 3:
                ranked = self._planned(choice)
                if ranked is not None:
                    queue.push(ranked.time.step.total, 4, choice, ranked)
            else:
                assert isinstance(payload, RankedLayout)
                placed.add(replace(choice, order=()))
                if len(layouts) < self.number:
                    layouts.append(payload)
                else:
                    simplest = payload
        return SearchResult(
            tuple(layouts),
            self.limit,
            self.least,
            num_valid,
            self.refusal,
            simplest or (self._simplest(layouts) if layouts else None),
        )

    def _simplest(self, ranked: Sequence[RankedLayout]) -> RankedLayout:
        """Return the simplest of the layouts within the prediction error of the first; of several,
        the fastest."""
        limit = ranked[0].time.step.total * (1 + self.error)
        near = [x for x in ranked if x.time.step.total <= limit]
        return min(near, key=lambda x: x.choice.complexity)

    def _prepare(self) -> None:
        self.base = base = base_plan(self.run, self.ranks_per_node)
        if (why := unpredicted(base)) is not None:
            raise ConfigError(f"--search needs predictions, and the time of a step is {why}")
        self.bounds = MemoryBounds(self.run, self.world_size, base, not self.device.is_host)
        self.layout = layout_of(base, self.ranks_per_node or 0)
        self.sizes = sizes_of(base)
        self.model = StepModel(self.sizes, self.device, self.fabric)
        self.node_size = self.model.links(self.layout).node_size
        self.limit = memory_limit(self.run, self.device)

    def _layout(self, choice: LayoutChoice) -> StepLayout:
        """Return the result of `layout_of` for a plan of this choice."""
        micro = self.bounds.micro_batch(choice)
        of_exchange = choice.context, choice.tensor, micro
        if of_exchange not in self._exchanges:
            self._exchanges[of_exchange] = context_exchange(self.base, *of_exchange)
        return replace(
            self.layout,
            ranks=self.world_size,
            micro_batch=micro,
            context_exchange=self._exchanges[of_exchange],
            num_microbatches=choice.microbatches,
            tensor=choice.tensor,
            pipe=choice.pipe,
            chunks=choice.chunks,
            context=choice.context,
            expert=choice.expert,
            order=choice.order or self.layout.order,
            zero=choice.zero,
            shard=0,
            sequence_parallel=choice.sequence_parallel,
            recompute="blocks" if choice.recompute == "blocks" else "none",
            rounds=choice.accumulate,
            exchanges=choice.accumulate if choice.zero >= 2 else 1,
            blocks=self.bounds.cut(choice).blocks if choice.pipe > 1 else (),
        )

    # -- one refinement each ---------------------------------------------------------------------

    def _start(self, queue: "_BoundQueue") -> int:
        """Push all degrees, micro-batches, orders and block variants that may fit, each with a
        lower bound in seconds.

        The bound, the mean work of a pipe rank, holds for every schedule. Return the number of
        degrees with micro-batches."""
        number = 0
        for degree in degrees(self.run, self.world_size):
            tried = orders(self.run, self.world_size, self.node_size, degree)
            placed = [(x.order, self._distances(x)) for x in tried]
            for divided_ in divided(self.run, self.world_size, degree):
                number += 1
                micro = self.bounds.micro_batch(divided_)
                times = divided_.accumulate * divided_.microbatches / degree.pipe
                fitting = [x for x in variants(divided_) if self._within(self.bounds.least_mean(x))]
                for order, distances in placed:
                    for variant in fitting:
                        each = replace(variant, order=order) if order else variant
                        seconds = times * self._work_of_microbatch(each, micro, distances)
                        queue.push(seconds * _ROUNDING, 0, each)
        return number

    def _work_of_microbatch(
        self, choice: LayoutChoice, micro: int, distances: tuple[int, ...]
    ) -> float:
        """Return the fewest seconds of a micro-batch on all stages together. distances: those of
        its order."""
        key = (
            choice.tensor,
            choice.context,
            choice.expert,
            micro,
            choice.sequence_parallel,
            choice.recompute,
            distances,
        )
        if key not in self._work:
            self._work[key] = self.model.work(self._layout(replace(choice, zero=3)))
        return self._work[key]

    def _distances(self, choice: LayoutChoice) -> tuple[int, ...]:
        """Return the distance between neighbouring ranks along context and along data, up to a
        node.
        """
        if choice.context == 1 and choice.expert == 1:
            return ()
        sizes = {"tensor": choice.tensor, "pipe": choice.pipe, "context": choice.context}
        sizes["data"] = self.world_size // (choice.tensor * choice.pipe * choice.context)
        order = choice.order or self.layout.order
        return tuple(
            min(math.prod(sizes[x] for x in order[order.index(axis) + 1 :]), self.node_size)
            for axis in ("context", "data")
        )

    def _with_schedules(self, choice: LayoutChoice) -> Iterator[tuple[LayoutChoice, float]]:
        """Yield the choice with each schedule that may fit, and a lower bound in seconds for all
        stages of ZeRO."""
        seconds: dict[tuple[tuple[int, ...], bool, int], float] = {}
        for each in scheduled(choice):
            splits = each.schedule not in ONE_BACKWARD
            if splits and self.run.train.compile != "off":
                continue  # make_plan refuses it
            if each.pipe * each.chunks > len(self.bounds.units.names):
                continue  # a rule
            if not self._fits(each, zero_stages(self.run, self.world_size, each)):
                continue
            best = replace(each, zero=3)
            placement = placement_of(each.schedule, each.pipe, each.chunks)
            key = placement, splits, each.chunks
            if key not in seconds:
                loads = self.bounds.cut(each).loads
                seconds[key] = self.model.least(self._layout(best), loads, splits=splits)
            yield each, seconds[key]

    def _with_shards(
        self, choice: LayoutChoice
    ) -> Iterator[tuple[LayoutChoice, StepLayout, float]]:
        """Yield the choice with each stage of ZeRO that may fit, its layout, and a lower bound in
        seconds."""
        placement = placement_of(choice.schedule, choice.pipe, choice.chunks)
        loads, splits = self.bounds.cut(choice).loads, choice.schedule not in ONE_BACKWARD
        for each in sharded(self.run, self.world_size, choice):
            if not self._fits(each):
                continue
            layout = self._layout(each)
            least = self.model.least(layout, loads, splits=splits)
            yield each, layout, least + self.model.rest(layout, placement)

    def _ordered(self, choice: LayoutChoice, layout: StepLayout) -> float | None:
        """Return the seconds of a step with its order; None if a rule forbids it."""
        if breaks_rules(choice.of(self.run, self.world_size), self.world_size, set()):
            return None
        if choice.pipe == 1:
            return self.model.time(layout).total
        order = ordered(choice.schedule, choice.pipe, choice.microbatches, choice.chunks)
        return self.model.least_of_order(layout, order)

    def _planned(self, choice: LayoutChoice) -> RankedLayout | None:
        """Return the complete plan if it is allowed and fits."""
        try:
            plan = make_plan(
                choice.of(self.run, self.world_size),
                self.world_size,
                ranks_per_node=self.ranks_per_node,
                messages=False,
            )
        except (ConfigError, ScheduleError) as error:
            why = error.problems[0].text if isinstance(error, ConfigErrors) else str(error)
            self.refusal = self.refusal or why
            return None
        # the first pipe rank is one of those that `peak_bytes` asks
        if self.bounds.counts_activations and not self._within(
            peak_memory(plan, 0, on_gpu=not self.device.is_host).total
        ):
            return None
        needed = peak_bytes(plan, self.device)
        if not self._within(needed):
            return None
        layout, order = self._layout(choice), None
        if choice.pipe > 1:
            order = ordered(choice.schedule, choice.pipe, choice.microbatches, choice.chunks)
        step = self.model.time(layout, order)
        time = run_time(plan, self.device, self.ranks_per_node, self.fabric, step)
        return RankedLayout(choice, plan, time, needed)

    def _within(self, num_bytes: float) -> bool:
        if num_bytes > self.limit:
            self.least = min(self.least or math.inf, num_bytes)
        return num_bytes <= self.limit

    def _fits(self, choice: LayoutChoice, stages: tuple[int, ...] | None = None) -> bool:
        """Return whether the fewest bytes that a rank needs are within its limit, with one of these
        stages of ZeRO if given."""
        return self._within(self.bounds.least_peak(choice, stages))


class _BoundQueue:
    """Choices ordered by a lower bound in seconds for everything refined from them.

    level: how far one is refined; payload: results computed for it so far."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, bool, int, int, LayoutChoice, object]] = []
        self._ties = count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def push(self, bound: float, level: int, choice: LayoutChoice, payload: object = None) -> None:
        # of equal ones the file's order of ranks is first
        entry = bound, bool(choice.order), next(self._ties), level, choice, payload
        heapq.heappush(self._heap, entry)

    def pop(self) -> tuple[float, int, LayoutChoice, object]:
        bound, _, _, level, choice, payload = heapq.heappop(self._heap)
        return bound, level, choice, payload

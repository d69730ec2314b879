"""What a piece of a model was measured to cost, and the cut and stage costs that follow. No torch.

One rule: times add up along a stage, and of memory a stage holds its weights once and its
activations once for every microbatch that is under way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.partition.cost_split import (
    Cut,
    MemoryLimit,
    refine,
    split_by_cost,
)
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.costs import StageCosts
from torchdistpackage.schedule.timeline import simulate

STATE_FACTOR = 4.0
"""Bytes held for each byte of trained parameters: itself, its gradient, two moments of Adam."""


@dataclass(frozen=True, slots=True)
class PieceCost:
    """One piece, one microbatch.

    forward_s, backward_s: of the whole. input_s: of the gradient of its input alone.
    parameter_bytes: of those that are trained. activation_bytes: what autograd keeps from the
    forward to the backward, parameters left out. output_bytes: what goes on to the next piece.
    """

    forward_s: float
    backward_s: float
    input_s: float = 0.0
    parameter_bytes: int = 0
    activation_bytes: int = 0
    output_bytes: int = 0

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s


def split_measured(
    pieces: Sequence[PieceCost],
    placement: Sequence[int],
    *,
    cap_bytes: float | None = None,
    live: Sequence[int] | None = None,
    state_factor: float = STATE_FACTOR,
    bytes_per_s: float = inf,
    schedule: Schedule | None = None,
) -> tuple[range, ...]:
    """For each stage its pieces, so that the busiest rank takes as little time as can be.

    placement: for each stage the pipe index that runs it. cap_bytes: no rank may hold more. live:
    microbatches that a stage holds at worst (`Timeline.peak_live`); None: as in the schedule, or as
    in 1F1B with microbatches enough, p - s. state_factor: bytes held for each of parameters.
    bytes_per_s: of a link between ranks (`layer_profiler.measure_link`): with two microbatches
    under way, as between the last two stages of 1F1B, a message takes as much of a step as if both
    ranks computed it.
    schedule: the order that will run the stages; then its simulated step is made short instead.

    Raises:
        ScheduleError: nothing fits into cap_bytes, or the schedule is of another placement.
    """
    if schedule is not None and schedule.placement != tuple(placement):
        raise ScheduleError(
            f"{schedule.name} runs its stages on {schedule.placement}, the cut is for "
            f"{tuple(placement)}; give both the same placement"
        )
    memory = None
    if cap_bytes is not None:
        if live is None:
            deepest_first = range(len(placement), 0, -1)
            live = deepest_first if schedule is None else simulate(schedule).peak_live
        memory = MemoryLimit(
            cap_bytes,
            [piece.parameter_bytes * state_factor for piece in pieces],
            [piece.activation_bytes for piece in pieces],
            live,
        )
    times = [piece.step_s for piece in pieces]
    crossing = [0.0, *(piece.output_bytes / bytes_per_s for piece in pieces)][: len(pieces)]
    cut = split_by_cost(
        times, len(placement), placement=placement, memory=memory, crossing=crossing
    )
    if schedule is None:
        return cut

    def step_s(tried: Cut) -> float:
        if memory is not None and not memory.holds(tried, placement):
            return inf
        return simulate(schedule, stage_costs(pieces, tried, bytes_per_s=bytes_per_s)).total

    return refine(cut, schedule, step_s)


def stage_costs(
    pieces: Sequence[PieceCost],
    stages: Sequence[range],
    message_s: float = 0.0,
    bytes_per_s: float = inf,
) -> StageCosts:
    """What schedules are simulated and synthesized with.

    message_s: what any message between two ranks takes, beside its bytes over bytes_per_s.

    The first stage's input asks for no gradient, so there all of a backward is of the weights.
    """

    def row(name: str) -> tuple[float, ...]:
        return tuple(sum(getattr(pieces[i], name) for i in stage) for stage in stages)

    backward = row("backward_s")
    inputs = (0.0, *row("input_s")[1:])
    weights = tuple(max(b - i, 0.0) for b, i in zip(backward, inputs, strict=True))
    given = [sum(pieces[i].output_bytes for i in stage[-1:]) for stage in stages]
    messages = tuple(message_s + num_bytes / bytes_per_s for num_bytes in given)
    return StageCosts(row("forward_s"), backward, inputs, weights, messages)


def block_weights(num_pieces: int, first: float = 1.0, last: float = 1.0) -> list[float]:
    """Costs in blocks: 1 a piece, but `first` for the embedding and `last` for the head."""
    weights = [1.0] * num_pieces
    if weights:
        weights[0], weights[-1] = first, last if num_pieces > 1 else max(first, last)
    return weights

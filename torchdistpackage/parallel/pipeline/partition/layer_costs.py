"""Measured costs of a model's pieces, and the cuts and stage costs that follow from them.

Measuring leaves no trace: gradients are returned as values, so no `.grad` changes and no hook runs,
and buffers and random states are restored. Times add up along a stage. A stage holds its weights
once, and its activations once for every live micro-batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor, nn

from torchdistpackage.comm import p2p, primitives
from torchdistpackage.comm.moments import clock_of, seconds
from torchdistpackage.comm.nested import map_trees
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.microbatches import leaves_of
from torchdistpackage.parallel.pipeline.partition.cost_split import (
    Cut,
    MemoryLimit,
    refine,
    split_by_cost,
)
from torchdistpackage.parallel.pipeline.partition.sequential import Piece
from torchdistpackage.predict.links import LinkModel
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.costs import StageCosts
from torchdistpackage.schedule.engine import simulate
from torchdistpackage.tools.undisturbed import undisturbed

Result = TypeVar("Result")

STATE_FACTOR = 4.0
"""Bytes held for each byte of trained parameters: itself, its gradient, two moments of Adam."""
LINK_BYTES = 2**20
"""Bytes of the message that measures a link, about the size of an activation."""


@dataclass(frozen=True, slots=True)
class PieceCost:
    """The cost of one piece for one micro-batch.

    forward_s, backward_s: seconds of the forward and the full backward.
    input_s: seconds of the gradient of its input alone.
    parameter_bytes: bytes of its trained parameters.
    activation_bytes: bytes that autograd keeps from the forward to the backward, without
        parameters.
    output_bytes: bytes of its output.
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
    """Return the pieces of each stage, such that the busiest rank takes the least time.

    placement: for each stage the pipe index that runs it.
    cap_bytes: most memory of a rank.
    live: most micro-batches that a stage holds at a time (`Timeline.peak_live`); None: those of the
        schedule, or p - s as in 1F1B with enough micro-batches.
    state_factor: bytes held for each byte of parameters.
    bytes_per_s: rate of a link between ranks (`measure_link`). With two micro-batches in flight, as
        between the last two stages of 1F1B, a message takes as much of a step as if both ranks
        computed it.
    schedule: the order that will run the stages; with it, the simulated step is minimised instead.

    Raises:
        ScheduleError: nothing fits into cap_bytes, or the schedule has another placement.
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
    link = LinkModel(bytes_per_s=bytes_per_s)
    crossing = [0.0, *(link.seconds(piece.output_bytes) for piece in pieces)][: len(pieces)]
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
    """Return costs of stages, with which schedules are simulated and synthesized.

    The first stage's input needs no gradient, so all of its backward is for the weights.

    message_s: time of any message between two ranks, in addition to its bytes over bytes_per_s.
    """

    def row(name: str) -> tuple[float, ...]:
        return tuple(sum(getattr(pieces[i], name) for i in stage) for stage in stages)

    backward = row("backward_s")
    inputs = (0.0, *row("input_s")[1:])
    weights = tuple(max(b - i, 0.0) for b, i in zip(backward, inputs, strict=True))
    output_bytes = [sum(pieces[i].output_bytes for i in stage[-1:]) for stage in stages]
    link = LinkModel(message_s, bytes_per_s)
    messages = tuple(link.seconds(num_bytes) for num_bytes in output_bytes)
    return StageCosts(row("forward_s"), backward, inputs, weights, messages)


def block_weights(num_pieces: int, first: float = 1.0, last: float = 1.0) -> list[float]:
    """Return costs in blocks: 1 a piece, but `first` for the embedding and `last` for the head."""
    weights = [1.0] * num_pieces
    if weights:
        weights[0], weights[-1] = first, last if num_pieces > 1 else max(first, last)
    return weights


# -- measurement ---------------------------------------------------------------------------------


def measure(
    pieces: Sequence[Piece], *microbatch: object, rounds: int = 3, group: Group | None = None
) -> list[PieceCost]:
    """Measure the cost of each piece, on the output of the piece before it.

    The pieces must be on the device, in the mode and under the autocast of training. It needs
    memory for the activations of one piece, not of all.

    microbatch: arguments of the first piece. A piece that returns a tuple or a list gives the next
        one several arguments.
    rounds: number of micro-batches whose median is the time, after one that warms up.
    group: ranks that all measure the same pieces; their median is used, so that all decide alike.
    """
    measured: list[list[PieceCost]] = [[] for _ in pieces]
    with undisturbed(*(piece for piece in pieces if isinstance(piece, nn.Module))):
        for turn in range(rounds + 1):
            arguments = microbatch
            for costs, piece in zip(measured, pieces, strict=True):
                output, cost = measure_call(piece, arguments)
                arguments = tuple(output) if isinstance(output, tuple | list) else (output,)
                if turn:
                    costs.append(cost)
    costs_by_piece = [middle(costs) for costs in measured]
    return costs_by_piece if group is None else agreed(costs_by_piece, group)


def measure_link(group: Group, *, num_bytes: int = LINK_BYTES, rounds: int = 3) -> float:
    """Return the bytes per second of a message between adjacent ranks; all ranks call it.

    It is the rate of the slowest pair, equal on all ranks, and infinite for a group of one.
    """
    ranks, index, device = primitives.ranks_of(group), group.rank(), primitives.device_of(group)
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    slowest_s = 0.0
    # pairs that begin with an even rank, then those with an odd one, so that a rank has one peer
    for first in (0, 1):
        peer = index + 1 if index % 2 == first else index - 1
        if not 0 <= peer < len(ranks):
            continue
        both = (p2p.send, p2p.receive) if index < peer else (p2p.receive, p2p.send)
        args = message, group, ranks[peer]
        there_and_back = lambda both=both, args=args: [step(*args) for step in both]  # noqa: E731
        times = [_timed(there_and_back, device)[1] / 2 for _ in range(rounds + 1)]
        slowest_s = max(slowest_s, median(times[1:]))
    slowest_s = max(primitives.gather_objects(slowest_s, group))  # type: ignore[type-var]
    return message.nbytes / slowest_s if slowest_s else inf


def measure_call(
    fn: Callable[..., object],
    inputs_given: Sequence[object],
    trained: Sequence[Tensor] | None = None,
) -> tuple[object, PieceCost]:
    """Call `fn` once; return its output and its cost.

    trained: parameters to differentiate; None: those of the module.
    """
    parameters = list(fn.parameters()) if isinstance(fn, nn.Module) else []
    if trained is None:
        trained = [p for p in parameters if p.requires_grad]
    saved_bytes = _SavedBytes([*parameters, *trained])
    device = next((x.device for x in (*_tensors(list(inputs_given)), *trained)), None)
    inputs: list[Tensor] = []
    with torch.enable_grad():
        arguments = map_trees(lambda x: _cut_off(x, inputs), list(inputs_given))
    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(saved_bytes.note, lambda x: x),
    ):
        output, forward_s = _timed(lambda: fn(*arguments), device)
    ends = [x for x in _tensors(output) if x.requires_grad]
    grads = [torch.ones_like(x) for x in ends]

    def backward(to: Sequence[Tensor], keep: bool) -> float:
        if not ends or not to:
            return 0.0
        options = {"allow_unused": True, "retain_graph": keep}
        return _timed(lambda: torch.autograd.grad(ends, to, grads, **options), device)[1]

    input_s = backward(inputs, keep=True) if trained else 0.0
    backward_s = backward([*inputs, *trained], keep=False)
    return output, PieceCost(
        forward_s,
        backward_s,
        input_s if trained else backward_s,
        sum(p.nbytes for p in trained),
        saved_bytes.num_bytes,
        sum(x.nbytes for x in _tensors(output)),
    )


def agreed(costs: Sequence[PieceCost], group: Group) -> list[PieceCost]:
    """Return the median over the ranks of `group`, piece by piece."""
    everyones = primitives.gather_objects(list(costs), group)
    return [middle(ranks) for ranks in zip(*everyones, strict=True)]  # type: ignore[arg-type]


class _SavedBytes:
    """A counter of the bytes that autograd saves, each storage once, without parameters."""

    def __init__(self, parameters: Sequence[Tensor]):
        self._seen = {p.untyped_storage().data_ptr() for p in parameters}
        self.num_bytes = 0

    def note(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.num_bytes += storage.nbytes()
        return x


def _cut_off(x: object, leaves: list[Tensor]) -> object:
    """Return a copy of a tensor outside its graph, which a piece may change in place.

    If the tensor requires a gradient, its new leaf is appended to `leaves`.
    """
    if not isinstance(x, Tensor):
        return x
    leaf = x.detach()
    if x.requires_grad:
        leaves.append(leaf.requires_grad_())
    return leaf.clone()


def _tensors(value: object) -> Iterator[Tensor]:
    return (x for x in leaves_of(value) if isinstance(x, Tensor))


def _timed(call: Callable[[], Result], device: torch.device | None) -> tuple[Result, float]:
    """Return the value of a call, and the seconds until the device has done it."""
    now = clock_of(device or torch.device("cpu"))
    begin = now()
    result = call()
    return result, seconds(begin, now())


def middle(costs: Sequence[PieceCost]) -> PieceCost:
    """Return the median of each time over several costs of one piece."""
    times = ("forward_s", "backward_s", "input_s")
    return replace(costs[0], **{t: median(getattr(c, t) for c in costs) for t in times})

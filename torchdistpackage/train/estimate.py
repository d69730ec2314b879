"""What the communication of a step takes on a measured cluster, axis by axis. No torch.

Bytes come from the plan and seconds from the cluster's profile; where one of them does not say,
nothing is guessed, and what goes beyond the sizes that were measured says so. Times are of the
messages alone, as if nothing ran at the same time.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from torchdistpackage.harness.bench.profile import CostModel, Profile
from torchdistpackage.harness.bench.request import NETWORK, NODE
from torchdistpackage.harness.operations import COLLECTIVES
from torchdistpackage.models.gpt_layout import EMBED, HEAD, GPTShape
from torchdistpackage.models.model_spec import ModelShape
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.costs import StageCosts
from torchdistpackage.schedule.engine import Timeline, simulate
from torchdistpackage.topology.mesh import crossings
from torchdistpackage.train.context_plan import context_traffic
from torchdistpackage.train.memory import DTypeSizes
from torchdistpackage.train.plan import (
    BUCKET_BYTES,
    Plan,
    stage_loads,
)

_LINKS = {NODE: "inside a node", NETWORK: "between nodes"}


@dataclass(frozen=True, slots=True)
class Estimate:
    """One axis in one step. what: the calls, or why there is no estimate (then time_s is None)."""

    axis: str
    what: str
    time_s: float | None


@dataclass(frozen=True, slots=True)
class _CommVolume:
    """`number` calls of `operation` of `num_bytes` each, between `size` ranks."""

    operation: str
    number: int
    num_bytes: float
    dtype: str
    size: int
    note: str

    @property
    def bus_bytes(self) -> float:
        return self.num_bytes * COLLECTIVES[self.operation].bus_factor(self.size)

    def line(self, profile: Profile, axis: str, link: str) -> CostModel | None:
        return profile.line(axis, link, self.operation, self.dtype, self.size)


def estimates(plan: Plan, profile: Profile, ranks_per_node: int | None) -> tuple[Estimate, ...]:
    """For each axis longer than 1, in mesh order; without ranks_per_node there is one node."""
    links = links_of(plan, ranks_per_node)
    return tuple(_estimate(plan, profile, axis, link) for axis, link in links.items())


def links_of(plan: Plan, ranks_per_node: int | None) -> Mapping[str, str]:
    """NETWORK for an axis of which some group crosses nodes, else NODE."""
    found = crossings(plan.topology.dense, ranks_per_node or plan.world_size)
    return {x.axis: NETWORK if x.num_crossing else NODE for x in found}


def timeline_with_messages(
    plan: Plan, profile: Profile, ranks_per_node: int | None, forward_s: float
) -> Timeline | None:
    """The schedule in seconds, its messages as measured; None where they cannot be estimated.

    forward_s: of one microbatch on a mean stage; others, and backwards, in proportion to the plan's
    costs.
    """
    link = links_of(plan, ranks_per_node).get("pipe")
    if link is None or plan.shape is None:
        return None
    message = _message(plan, plan.shape)
    line = message.line(profile, "pipe", link)
    if line is None or (time_s := line.time_s(message.bus_bytes)) is None:
        return None
    costs = plan.pipeline.costs
    unit_s = forward_s * len(costs.forward) / (sum(costs.forward) or 1.0)
    forward, backward, inputs, weight = (
        tuple(cost * unit_s for cost in row)
        for row in (costs.forward, costs.backward, costs.input, costs.weight)
    )
    messages = (time_s,) * len(forward)
    in_seconds = StageCosts(forward, backward, inputs, weight, messages)
    return simulate(plan.schedule, in_seconds)


def _estimate(plan: Plan, profile: Profile, axis: str, link: str) -> Estimate:
    if plan.shape is None:
        return Estimate(axis, "a model of your own: its bytes are known once it is built", None)
    traffic = _traffic(plan, plan.shape, axis)
    if isinstance(traffic, str):
        return Estimate(axis, traffic, None)
    found = [_of_calls(each, profile, axis, link) for each in traffic]
    unknown = [what for what, time_s in found if time_s is None]
    if unknown:
        return Estimate(axis, unknown[0], None)
    times_s = [time_s for _, time_s in found if time_s is not None]
    return Estimate(axis, " and ".join(what for what, _ in found), sum(times_s))


def _of_calls(
    traffic: _CommVolume, profile: Profile, axis: str, link: str
) -> tuple[str, float | None]:
    """(what is called, seconds of it all), or why that is unknown and None."""
    calls = f"{traffic.operation} of {_megabytes(traffic.num_bytes)} {_LINKS[link]}"
    line = traffic.line(profile, axis, link)
    if line is None:
        return f"the profile has no {traffic.operation} {_LINKS[link]}", None
    once_s = line.time_s(traffic.bus_bytes)
    if once_s is None:
        why = (
            f"{calls}: the profile ends at {_megabytes(line.largest_bytes)}, up to which the size "
            f"made no difference; measure larger ones"
        )
        return why, None
    what = f"{traffic.number} x {calls}: {traffic.note}"
    if traffic.bus_bytes > line.largest_bytes:
        what += (
            f" (extrapolated: {_megabytes(traffic.bus_bytes)} on the bus, measured up to "
            f"{_megabytes(line.largest_bytes)})"
        )
    return what, traffic.number * once_s


def _traffic(plan: Plan, shape: ModelShape, axis: str) -> tuple[_CommVolume, ...] | str:
    """What one rank takes part in along `axis` in a step; a text: why that is unknown."""
    size = plan.topology.dense.axis_size(axis)
    if axis == "data":
        return _shared(plan, size)
    if axis == "pipe":
        number = _busiest_link(plan.schedule) * plan.rounds
        return (replace(_message(plan, shape), number=number),)
    if axis == "tensor" and not isinstance(shape, GPTShape):
        return "what transformers' own modules send is not counted yet"
    if axis == "tensor" and not shape.sequence_parallel:
        # A product in each half of a block, summed once forward and once backward; the embedding
        # is summed forward only, the input of the head backward only.
        number = max(
            sum(1 if plan.pieces[i] in (EMBED, HEAD) else 2 for i in plan.pieces_on(place))
            for place in range(len(plan.schedule.programs))
        )
        number *= plan.rounds * plan.schedule.num_microbatches
        num_bytes, note = _activation_bytes(plan, shape), "sums inside the layers"
        dtype = _profiled(plan.numbers.activations)
        return (_CommVolume("all_reduce", number, num_bytes, dtype, size, note),)
    if axis == "tensor":
        return "under sequence parallelism gathers and scatters are not counted yet"
    if axis == "context":
        way, per_step, sent = context_traffic(plan)
        dtype = _profiled(plan.numbers.activations)
        note = f"attentions over parts of a sequence ({way}), as messages"
        return (_CommVolume("p2p", per_step, sent, dtype, size, note),)
    return f"what travels along {axis} is not counted yet"


def _busiest_link(schedule: Schedule) -> int:
    """Messages of one round between the two ranks that have most, either way."""
    pairs = Counter[frozenset[int]]()
    for one, other in pairwise(schedule.placement):
        if one != other:
            pairs[frozenset((one, other))] += 2 * schedule.num_microbatches
    return max(pairs.values(), default=0)


def _shared(plan: Plan, size: int) -> tuple[_CommVolume, ...]:
    """Of the fullest stage: sums of gradients, and under ZeRO what brings the parameters back."""
    held = max(load.num_trained for load in stage_loads(plan))
    wide, weight = plan.numbers.gradients, plan.numbers.weights
    number = math.ceil(held * wide.num_bytes / BUCKET_BYTES)
    sum_bytes, gather_bytes = (held * x.num_bytes / number for x in (wide, weight))
    note, narrow = "gradients of the fullest stage", _profiled(weight)
    if not plan.zero:
        return (_CommVolume("all_reduce", number, sum_bytes, wide.dtype, size, note),)
    num_sums, num_gathers = (number * (plan.rounds if plan.zero >= n else 1) for n in (2, 3))
    return (
        _CommVolume("reduce_scatter", num_sums, sum_bytes, wide.dtype, size, note),
        _CommVolume("all_gather", num_gathers, gather_bytes, narrow, size, "its parameters"),
    )


def _message(plan: Plan, shape: ModelShape) -> _CommVolume:
    """One, between two stages."""
    note = "a microbatch's activations on, or gradients back"
    dtype = _profiled(plan.numbers.activations)
    return _CommVolume("p2p", 1, _activation_bytes(plan, shape), dtype, 2, note)


def _profiled(numbers: DTypeSizes) -> str:
    """The type as profiles call it."""
    return "bf16" if numbers.dtype == "bfloat16" else numbers.dtype


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.2f} MB"


def _activation_bytes(plan: Plan, shape: ModelShape) -> int:
    """Of one microbatch between two layers, on one rank."""
    axis_size = plan.topology.dense.axis_size
    tokens = plan.samples_per_microbatch * shape.seq_len // axis_size("context")
    if shape.sequence_parallel:
        tokens //= axis_size("tensor")
    return tokens * shape.dim * plan.numbers.activations.num_bytes

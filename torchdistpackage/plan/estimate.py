"""Estimate how long a step's communication takes on a measured cluster, axis by axis. No torch.

Bytes come from the plan and seconds from the cluster's profile; where one of them does not say,
nothing is guessed, and what goes beyond the sizes that were measured says so. Times are of the
messages alone, as if nothing ran at the same time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torchdistpackage.comm.collective_table import COLLECTIVES
from torchdistpackage.harness.bench.profile import CostModel, Profile
from torchdistpackage.harness.bench.request import NETWORK, NODE
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.plan.traffic import busiest, uncounted
from torchdistpackage.predict.calls import CallCount
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.costs import StageCosts
from torchdistpackage.schedule.engine import Timeline, simulate
from torchdistpackage.text import size_text
from torchdistpackage.topology.mesh import crossings

_LINKS = {NODE: "inside a node", NETWORK: "between nodes"}


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of one axis in one step. what: the calls, or the reason without an estimate
    (time_s is then None).
    """

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
    """Return an estimate for each axis longer than 1, in mesh order. Without ranks_per_node all
    ranks share one node.
    """
    links = links_of(plan, ranks_per_node)
    if (why := uncounted(plan)) is not None:
        return tuple(Estimate(axis, why, None) for axis in links)
    messages = max(pipe_messages(plan.schedule).values(), default=0) * plan.rounds
    calls = busiest(plan)[1]
    return tuple(_estimate(calls, profile, axis, link, messages) for axis, link in links.items())


def links_of(plan: Plan, ranks_per_node: int | None) -> Mapping[str, str]:
    """Return NETWORK for each axis with a group that crosses nodes, and NODE for the others."""
    crossed = crossings(plan.topology.dense, ranks_per_node or plan.world_size)
    return {x.axis: NETWORK if x.num_crossing else NODE for x in crossed}


def timeline_with_messages(
    plan: Plan, profile: Profile, ranks_per_node: int | None, forward_s: float
) -> Timeline | None:
    """Return the schedule in seconds, with messages as measured; None if these cannot be estimated.

    forward_s: of one microbatch on a mean stage; others, and backwards, in proportion to the plan's
    costs.
    """
    link = links_of(plan, ranks_per_node).get("pipe")
    if link is None or uncounted(plan) is not None:
        return None
    message = next(_volume(x) for x in busiest(plan)[1] if x.operation == "send")
    link_model = message.line(profile, "pipe", link)
    if link_model is None or (time_s := link_model.time_s(message.bus_bytes)) is None:
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


def _estimate(
    calls: Sequence[CallCount], profile: Profile, axis: str, link: str, messages: int
) -> Estimate:
    """Return the estimate of one axis. messages: number exchanged by the busiest pair of stages."""
    # what is summed over several axes counts with the outermost
    volumes = [_volume(x) for x in calls if x.axis.partition("+")[0] == axis]
    volumes = [
        replace(x, number=messages) if x.operation == "p2p" and axis == "pipe" else x
        for x in volumes
    ]
    times = [_of_calls(each, profile, axis, link) for each in volumes]
    unknown = [description for description, time_s in times if time_s is None]
    if unknown:
        return Estimate(axis, unknown[0], None)
    times_s = [time_s for _, time_s in times if time_s is not None]
    return Estimate(
        axis, " and ".join(description for description, _ in times) or "nothing", sum(times_s)
    )


def _of_calls(
    traffic: _CommVolume, profile: Profile, axis: str, link: str
) -> tuple[str, float | None]:
    """Return (the calls as text, seconds of all calls); (the reason, None) if unknown."""
    calls = f"{traffic.operation} of {size_text(traffic.num_bytes)} {_LINKS[link]}"
    link_model = traffic.line(profile, axis, link)
    if link_model is None:
        return f"the profile has no {traffic.operation} {_LINKS[link]}", None
    once_s = link_model.time_s(traffic.bus_bytes)
    if once_s is None:
        why = (
            f"{calls}: the profile ends at {size_text(link_model.largest_bytes)}, up to which "
            f"the size made no difference; measure larger ones"
        )
        return why, None
    description = f"{traffic.number} x {calls}: {traffic.note}"
    if traffic.bus_bytes > link_model.largest_bytes:
        description += (
            f" (extrapolated: {size_text(traffic.bus_bytes)} on the bus, measured up to "
            f"{size_text(link_model.largest_bytes)})"
        )
    return description, traffic.number * once_s


def pipe_messages(schedule: Schedule) -> Counter[tuple[int, int]]:
    """Return the number of messages in one round between each pair of pipe ranks, both directions
    together.

    The smaller rank of a pair comes first.
    """
    pairs = Counter[tuple[int, int]]()
    for one, other in pairwise(schedule.placement):
        if one != other:
            pairs[min(one, other), max(one, other)] += 2 * schedule.num_microbatches
    return pairs


def link_bytes(call: CallCount) -> float:
    """Return the bytes that a rank sends in these calls if its group forms a ring."""
    return call.number * _volume(call).bus_bytes


def _volume(call: CallCount) -> _CommVolume:
    """Return a call in a profile's terms: for a gather the joined tensor, and types by the
    profile's names.
    """
    dtype = "bf16" if call.dtype == "bfloat16" else call.dtype
    if call.operation == "send":
        return _CommVolume("p2p", call.number, call.call_bytes, dtype, 2, call.what)
    size = len(call.ranks)
    is_part = COLLECTIVES[call.operation].input_is_part
    num_bytes = call.call_bytes * (size if is_part else 1)
    return _CommVolume(call.operation, call.number, num_bytes, dtype, size, call.what)
